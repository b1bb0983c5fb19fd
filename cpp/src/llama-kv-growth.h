#pragma once

// Growth policy of the dynamic KV cache (--kv-dynamic): how many cells the storage gets next.
//
// Pure functions over numbers, so that the policy can be read and tested without a model:
//
//   - the storage starts at LLAMA_KV_GROWTH_START cells (less if the cache is smaller)
//   - below LLAMA_KV_GROWTH_DOUBLE_MAX cells it doubles
//   - from there on it grows by steps that are worth LLAMA_KV_GROWTH_STEP_BYTES of K/V data
//   - it always gets at least what the batch at hand needs: one growth per batch, not several doublings
//   - it never exceeds the size of the static cache
//
// Rejected: a fixed step of 256 cells (the number of copied bytes is quadratic in the context length), doubling all the
// way (at 8 GiB the last doubling holds 4 GiB that may never be used).

#include <cstddef>
#include <cstdint>

static constexpr uint32_t LLAMA_KV_GROWTH_START      = 256;
static constexpr uint32_t LLAMA_KV_GROWTH_DOUBLE_MAX = 4096;
static constexpr size_t   LLAMA_KV_GROWTH_STEP_BYTES = size_t(1) << 30;

// all sizes are in cells
struct llama_kv_growth {
    uint32_t n_max; // size of the static cache, the storage never exceeds it
    uint32_t n_pad; // the storage is a multiple of this, unless it is n_max. 0 counts as 1
    size_t   n_bytes_cell; // bytes of K and V data behind one cell, over all layers and streams

    // cells to start with
    uint32_t start() const;

    // the smallest storage that holds n_need cells. n_max if n_need exceeds it
    uint32_t smallest(uint32_t n_need) const;

    // the storage to grow to from n_cur cells, so that it holds n_need cells. never less than n_cur
    uint32_t next(uint32_t n_cur, uint32_t n_need) const;
};
