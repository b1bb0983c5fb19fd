#pragma once

// Growth policy of the dynamic KV cache (--kv-dynamic): how many cells the storage gets next.
//
// Pure functions over numbers, so that the policy can be read and tested without a model.
//
// By copy (llama-kv-storage-copy.cpp), in cells of one stream, n_bytes_cell being what one cell index takes over all streams:
//
//   - the storage starts at two blocks of 256 cells, less if the cache is smaller
//   - a growth takes at least what the batch at hand needs: one growth per batch, not several doublings
//   - else it doubles, as long as that takes no more than LLAMA_KV_GROWTH_STEP_BYTES, and takes that much, or an eighth of
//     what there is, from there on
//   - such a step goes to an odd number of blocks, if that is a growth. The strips of transposed V are as long as there are cells,
//     and a CPU reads them best where their distance is no power of two: generating at 3000 tokens takes a tenth longer with 4096
//     cells than with 4352, in a static cache as well (kv-bench -fa off)
//   - one block is always beyond what a batch can use, unless all of the cache is there. So no view that a graph makes of the
//     cells in use covers all of the storage where it would not do so in a static cache: a view that does is contiguous, and
//     backends choose kernels by that, which sum in another order (a BLAS for transposed V, CUDA, Vulkan)
//   - it never exceeds the size of the static cache
//
// In place in memory of a device the blocks have 256 cells as well: nothing may read what is not there.
//
// In place (llama-kv-storage-inplace.cpp) a growth copies nothing and no stride changes, so it starts with 256 cells and takes small
// steps, which keeps the call that grows short: an eighth of what there is, at least LLAMA_KV_GROWTH_BLOCK_IN_PLACE cells and
// at most LLAMA_KV_GROWTH_STEP_BYTES_IN_PLACE.
//
// Memory is given back when cells are freed (llama_memory_seq_rm, _seq_keep, _clear), at once, because an idle server has no
// later. What goes has to be decoded again to come back, so the work of a growth stays in proportion to that:
//
//   - in place, when a quarter of the cells (and 512) can go: all blocks without a cell in use, also in the middle
//   - by copy, when half of the cells can go, and the cells in use have become half of what they were since the last resize:
//     down to the cells in use and a quarter, and to the start when none is in use. A step of 1 GiB that was just taken is not given back for a few removed cells
//   - never below the start
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

// the attention window n_kv is padded to 256 cells (llama_kv_cache::get_n_kv), but what is not committed can be read
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

    // sizes are multiples of this: what the storage has to be padded to
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
