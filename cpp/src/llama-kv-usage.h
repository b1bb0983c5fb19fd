#pragma once

// Accounting of the memory behind a context, for static and dynamic caches: llama_get_memory_usage(), llama_memory_seq_usage(), and
// the counters of growths, shrinks and changes of types
//
// Cells have no counters: total() and seq() look at the cells when they are called.

#include "llama-kv.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class llama_kv_dynamic_cache;
struct llama_memory_i;

class llama_kv_usage {
public:
    // caches: all caches of the context, including those that cannot grow
    llama_kv_usage(const llama_context & lctx, const std::vector<llama_kv_dynamic_cache *> & caches) : lctx(lctx), caches(caches) {}

    // log the counters, if any cache has grown
    void log() const;

    void count_growth(int64_t t_us);         // of all caches together
    void count_no_memory();
    void count_copied(size_t n_bytes);       // by a growth of one cache
    void count_shrink(size_t n_bytes_copied); // of one cache
    void count_retype(int64_t t_us);

    // count all shrinks up to this call as one, over all caches
    void end_release() { has_shrunk = false; }

    bool has_retyped() const { return counters.n_retype > 0; }

    // bytes and cells of all caches, and the counters
    // throws std::bad_alloc
    llama_memory_usage total() const;

    // the part of one sequence. looks at every cell
    // throws std::bad_alloc
    llama_seq_usage seq(llama_seq_id seq_id) const;

private:
    const llama_context & lctx;

    const std::vector<llama_kv_dynamic_cache *> & caches;

    llama_memory_usage counters = {}; // only the counters are set

    bool has_shrunk = false; // since the last end_release()
};

// sum of the bytes of all buffer types
size_t llama_kv_sum_bytes(const llama_memory_i & memory);

// the share of the i-th of n in size, in whole bytes: the first shares get the bytes that are left over, so that all n sum to size
size_t llama_kv_share(size_t size, size_t n, size_t i);
