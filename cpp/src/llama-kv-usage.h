#pragma once

// Accounting of the memory of a context, for static and dynamic caches: llama_get_memory_usage() and llama_memory_seq_usage()
//
// The class counts growths, shrinks and changes of type. It does not count cells: total() and seq() look at the cells when they
// are called.

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

    // log the counters if at least one cache has grown
    void log() const;

    void count_growth(int64_t t_us);         // a growth of all caches of the context
    void count_no_memory();
    void count_copied(size_t n_bytes);       // bytes that the growth of one cache has copied
    void count_shrink(size_t n_bytes_copied); // a shrink of one cache, and the bytes that it has copied
    void count_retype(int64_t t_us);

    // end a release of memory, in which several caches may have shrunk. All shrinks since the previous call count as one in
    // n_shrink
    void end_release() { has_shrunk = false; }

    bool has_retyped() const { return counters.n_retype > 0; }

    // return the bytes and cells of all caches, and the counters
    // throws std::bad_alloc
    llama_memory_usage total() const;

    // return the memory that belongs to one sequence. The function looks at every cell
    // throws std::bad_alloc
    llama_seq_usage seq(llama_seq_id seq_id) const;

private:
    const llama_context & lctx;

    const std::vector<llama_kv_dynamic_cache *> & caches;

    llama_memory_usage counters = {}; // only the counters are set

    bool has_shrunk = false; // a cache has shrunk since the last end_release()
};

// return the sum of the bytes of all buffer types of a memory
size_t llama_kv_sum_bytes(const llama_memory_i & memory);

// divide `size` bytes into n whole shares, and return the i-th share. The first shares get one byte of the remainder each
size_t llama_kv_share(size_t size, size_t n, size_t i);
