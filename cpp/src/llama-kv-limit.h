#pragma once

// Limit on the memory of the KV caches of one context. This class has no limit but the memory of the machine: every growth may be
// tried. The layer of types replaces it by a budget with smaller types to step down to (llama-kv-budget-member.h)

#include <cstddef>

class llama_kv_dynamic_cache;
class llama_kv_rows;

class llama_kv_limit {
public:
    virtual ~llama_kv_limit() = default;

    // update the counted bytes. begin_account(): before a cache grows or shrinks
    virtual void begin_account() {}
    virtual void account() {}

    // check whether all caches may have their requested rows, as far as this is known in advance
    // ahead: include the rows that the growth policy allocates in advance
    virtual bool fits(bool ahead) const { (void) ahead; return true; }

    // check whether one cache may have these rows instead of its current rows
    virtual bool fits_rows(const llama_kv_dynamic_cache & cache, const llama_kv_rows & rows) const { (void) cache; (void) rows; return true; }

    // check whether the memory in use is within the limit
    virtual bool is_kept() const { return true; }

    // bytes by which the compute buffers have grown, as far as they count
    virtual size_t n_bytes_compute() const { return 0; }

    // free the growth of the compute buffers if it exceeds the limit, after a K-shift, which can need more than any batch
    virtual void fit_compute() {}

    // change the cells to smaller types. returns false if that makes no room
    virtual bool step_down() { return false; }

    // change the cells back to their first types if no cell is in use
    virtual void step_up() {}
};
