#pragma once

// Growth policy of the dynamic KV cache (--kv-dynamic): how many cells the storage gets next.
//
// Pure functions over numbers, so that the policy can be read and tested without a model.
//
// By copy (llama-kv-storage-copy.cpp). Sizes are cells of one stream; n_bytes_cell is the size of one cell index over all streams:
//
//   - The storage starts at two blocks of 256 cells, or less if the cache is smaller.
//   - A growth covers at least the current batch: one growth per batch, not several doublings.
//   - Otherwise it doubles while the step is at most LLAMA_KV_GROWTH_STEP_BYTES. Larger storages grow by that step or by an eighth,
//     whichever is larger.
//   - Such a step ends at an odd number of blocks, if the result is a growth. The strips of transposed V are as long as the storage,
//     and a CPU reads them fastest if their distance is not a power of two: with 4096 cells, generating at 3000 tokens needs a tenth
//     longer than with 4352, in a static cache as well (kv-bench -fa off).
//   - One block always stays beyond the reach of a batch, unless the storage has its full size. So no view of the cells in use covers
//     the whole storage unless it also does so in a static cache. A view of the whole storage is contiguous, and backends choose
//     kernels by that property, which add in another order (a BLAS for transposed V, CUDA, Vulkan).
//   - The storage never exceeds the size of the static cache.
//
// In place in device memory, blocks have 256 cells as well: nothing may read a row that does not exist.
//
// In place (llama-kv-storage-inplace.cpp), a growth copies nothing and changes no stride. So the storage starts with 256 cells and
// grows by small steps, which keep each call short: an eighth of the storage, at least LLAMA_KV_GROWTH_BLOCK_IN_PLACE cells and at
// most LLAMA_KV_GROWTH_STEP_BYTES_IN_PLACE bytes.
//
// Memory is freed together with cells (llama_memory_seq_rm, _seq_keep, _clear), at once, because an idle server makes no later
// calls. Freed rows return only by decoding, so the work of a growth stays in proportion to that work:
//
//   - In place, if a quarter of the cells (and 512) are free: all blocks without a cell in use, also in the middle.
//   - By copy, if half of the cells are free, and the cells in use are at most half of their maximum since the last resize: down to
//     the cells in use plus a quarter, or to the start if no cell is in use. So a step of 1 GiB survives the removal of a few cells.
//   - Never below the start.
//
// A chat that removes its last tokens and adds others frees less than that.
//
// Rejected: a fixed step of 256 cells (the number of copied bytes is quadratic in the context length), doubling all the
// way (at 8 GiB the last doubling holds 4 GiB that may never be used), steps of 1 GiB all the way (with 64 streams they are
// 256 cells, and quadratic again), to double below a number of cells (with 64 streams that was a step of 8 GiB).

#include <cstddef>
#include <cstdint>

static constexpr uint32_t LLAMA_KV_GROWTH_START      = 256;
static constexpr size_t   LLAMA_KV_GROWTH_STEP_BYTES = size_t(1) << 30;

// the attention window n_kv is padded to 256 cells (llama_kv_cache::get_n_kv), but uncommitted memory can be read
static constexpr uint32_t LLAMA_KV_GROWTH_BLOCK_IN_PLACE      = 32;
static constexpr size_t   LLAMA_KV_GROWTH_STEP_BYTES_IN_PLACE = size_t(16) << 20;

// all sizes are in cells
struct llama_kv_growth {
    uint32_t n_max; // size of the static cache, the storage never exceeds it
    uint32_t n_pad; // the storage is a multiple of this, unless it is n_max. 0 counts as 1
    size_t   n_bytes_cell; // bytes of K and V data behind one cell, over all layers, streams and caches that grow with it
    bool     in_place = false; // nothing is copied
    size_t   n_bytes_step = LLAMA_KV_GROWTH_STEP_BYTES;
    bool     has_windows = false; // in place: all that the attention window covers is there

    // return the number that all sizes are multiples of: the padding of the storage
    uint32_t block() const;

    // cells to start with
    uint32_t start() const;

    // cells of a storage of n_cur that a batch can use
    uint32_t usable(uint32_t n_cur) const;

    // the smallest storage that n_need cells can be used of. n_max if n_need exceeds it
    uint32_t smallest(uint32_t n_need) const;

    // the storage to grow to from n_cur cells, so that n_need cells can be used. never less than n_cur
    uint32_t next(uint32_t n_cur, uint32_t n_need) const;

    // the storage to shrink to from n_cur cells when n_keep of them have to stay. n_cur when it is not worth it
    // n_peak: the most that had to stay since the last resize
    uint32_t shrink(uint32_t n_cur, uint32_t n_keep, uint32_t n_peak) const;
};
