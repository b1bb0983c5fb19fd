#pragma once

// Growth policy of the dynamic KV cache (--kv-dynamic): the number of cells that the storage has next
//
// The functions depend only on their arguments, so that the policy can be read and tested without a model.
//
// Growth by copy (llama-kv-storage-copy.cpp). All sizes are cells of one stream. n_bytes_cell is the size of one cell in all
// streams together.
//
//   - The storage starts with two blocks of 256 cells, or with all cells if the cache is smaller.
//   - A growth covers at least the current batch. So a batch causes one growth, not several.
//   - A growth doubles the storage if it adds at most LLAMA_KV_GROWTH_STEP_BYTES. A larger storage grows by this number of
//     bytes or by an eighth of its size, whichever is larger.
//   - The new size is an odd number of blocks, unless that would not be a growth. Transposed V is an array with one strip of
//     cells for each element of a row. The strips are as long as the storage, and a CPU reads them fastest if their distance is
//     not a power of two. With 3000 tokens in the cache, generating a token is a tenth slower with 4096 cells than with 4352,
//     in a static cache as well (kv-bench -fa off).
//   - A batch uses the last block only if the storage has its full size. So a view of the cells in use covers the whole storage
//     only if the same view covers a whole static cache. This matters because a view of the whole storage is contiguous. For
//     contiguous views, backends choose other kernels, which add in another order and so change the logits (a BLAS for
//     transposed V, CUDA, Vulkan).
//   - The storage is never larger than the static cache.
//
// Growth in place (llama-kv-storage-inplace.cpp). A growth copies nothing and changes no stride.
//
//   - The storage starts with 256 cells.
//   - It grows by small steps, which keep each call short: an eighth of the storage, but at most
//     LLAMA_KV_GROWTH_STEP_BYTES_IN_PLACE bytes. The new size is rounded up to whole blocks, and a step is at least one block.
//   - A block has LLAMA_KV_GROWTH_BLOCK_IN_PLACE cells in host memory. In device memory, a block has 256 cells, because nothing
//     may read a row that does not exist.
//
// Shrinking. Memory is freed together with cells (llama_memory_seq_rm, _seq_keep, _clear). This happens at once, because an idle
// server makes no later calls. Freed rows are allocated again only by decoding, so the work of growing again stays in proportion
// to the work of decoding.
//
//   - In place, all blocks without a cell in use are freed, unless these blocks are too few. Together, they must have at least
//     512 cells, and at least a quarter of the cells of the storage. In host memory, this includes blocks in the middle. In
//     device memory, all blocks before the last cell in use stay.
//   - By copy, n is the number of cells up to the last cell in use, in whole blocks. The storage shrinks to n plus a quarter of
//     n, rounded up to whole blocks, plus the last block, which no batch uses. If no cell is in use, it shrinks to its size at
//     the start. There are two conditions for n > 0: the new size is at most half of the old size, and n is at most half of its
//     maximum since the last resize. Without the second condition, a storage that has just grown by 1 GiB would shrink again
//     after only a few cells are removed.
//   - The storage is never smaller than at the start.
//
// A chat that removes its last tokens and adds others frees fewer cells than these conditions require, so its storage does not
// shrink.
//
// Rejected: a fixed step of 256 cells (the number of copied bytes is quadratic in the context length), doubling at every size
// (at 8 GiB, the last doubling adds 4 GiB that may never be used), steps of 1 GiB at every size (with 64 streams, such a step
// has 256 cells, so the copied bytes are quadratic again), doubling below a fixed number of cells (with 64 streams, that was a
// step of 8 GiB).

#include <cstddef>
#include <cstdint>

static constexpr uint32_t LLAMA_KV_GROWTH_START      = 256;
static constexpr size_t   LLAMA_KV_GROWTH_STEP_BYTES = size_t(1) << 30;

// Blocks in place can be smaller than the padding of the attention window (256 cells, see llama_kv_cache::get_n_kv), because
// memory that is not committed can be read.
static constexpr uint32_t LLAMA_KV_GROWTH_BLOCK_IN_PLACE      = 32;
static constexpr size_t   LLAMA_KV_GROWTH_STEP_BYTES_IN_PLACE = size_t(16) << 20;

// all sizes are in cells
struct llama_kv_growth {
    uint32_t n_max; // size of the static cache, which is the maximum of the storage
    uint32_t n_pad; // the storage is a multiple of this number, unless it is n_max. 0 means 1
    // bytes of the K and V data of one cell over all layers. by copy: also over all streams and caches that grow together
    size_t   n_bytes_cell;
    bool     in_place = false; // growth copies nothing
    size_t   n_bytes_step = LLAMA_KV_GROWTH_STEP_BYTES;
    bool     has_windows = false; // in place in device memory: all rows in the attention window must exist

    // return the size of a block. All sizes of the storage are multiples of it
    uint32_t block() const;

    // return the size of the storage at the start
    uint32_t start() const;

    // return the number of cells that a batch can use in a storage of n_cur cells
    uint32_t usable(uint32_t n_cur) const;

    // return the smallest size of a storage, in cells, in which a batch can use n_need cells. The result is at most n_max
    uint32_t smallest(uint32_t n_need) const;

    // return the size to grow to from n_cur cells, so that a batch can use n_need cells. never less than n_cur
    uint32_t next(uint32_t n_cur, uint32_t n_need) const;

    // return the size to shrink to from n_cur cells, if the first n_keep cells are still needed. The result is n_cur if
    // shrinking is not worth it
    // n_peak: the largest number of cells that were needed since the last resize
    uint32_t shrink(uint32_t n_cur, uint32_t n_keep, uint32_t n_peak) const;
};
