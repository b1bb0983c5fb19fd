#pragma once

// Limit on the memory of the KV caches of one context
//
// This base class allows every growth, so only the memory of the machine is a limit. The layer `types` replaces it by a budget,
// within which cells change to smaller types (llama-kv-budget-member.h).

#include <cstddef>

class llama_kv_dynamic_cache;
class llama_kv_rows;

class llama_kv_limit {
public:
    virtual ~llama_kv_limit() = default;

    // begin_account(): count the bytes of the caches before a cache grows or shrinks
    // account():       count the bytes of the caches again after the cache has grown or shrunk
    virtual void begin_account() {}
    virtual void account() {}

    // check whether all caches may have their requested rows, as far as this is known before the growth
    // ahead: include the rows that the growth policy allocates in advance
    virtual bool fits(bool ahead) const { (void) ahead; return true; }

    // check whether one cache may have these rows instead of its current rows
    virtual bool fits_rows(const llama_kv_dynamic_cache & cache, const llama_kv_rows & rows) const { (void) cache; (void) rows; return true; }

    // check whether the memory in use is within the limit. `ahead` has the same meaning as in fits()
    virtual bool is_kept(bool ahead) const { (void) ahead; return true; }

    // return the bytes by which the compute buffers have grown since the first growth of a cache. 0: the limit does not count
    // compute buffers
    virtual size_t n_bytes_compute() const { return 0; }

    // free the additional memory of the compute buffers, if the context exceeds the limit with this memory
    // Call this function after a K-shift: the graph of a K-shift can need larger compute buffers than any batch.
    virtual void fit_compute() {}

    // change the cells to smaller types. returns false if this makes no room
    virtual bool step_down() { return false; }

    // change the cells back to their first types if no cell is in use
    virtual void step_up() {}
};
