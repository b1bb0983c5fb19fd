#pragma once

// Additions of the dynamic KV cache (llama_context_params::kv_dynamic) to llama.h

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

    // memory behind the KV cells and the recurrent states of a context
    struct llama_memory_usage {
        size_t   reserved;       // bytes at full size: the size of the cache without kv_dynamic
        size_t   committed;      // bytes that are taken now
        size_t   used;           // bytes behind the cells that hold a token
        uint32_t n_cells;        // cells with memory, over all streams of the largest KV cache
        uint32_t n_cells_max;    // the same at full size
        uint32_t n_cells_used;   // the same that hold a token
        uint32_t n_grow;         // times the context has grown
        uint32_t n_shrink;       // times it has given memory back
        size_t   n_bytes_copied; // bytes moved for that
        int64_t  t_grow_us;      // time all growths took
        int64_t  t_grow_max_us;  // time the longest one took
        uint32_t n_retype;       // times the types of the KV cells have changed
        int64_t  t_retype_us;    // time that took
        uint32_t n_no_memory;    // failed allocations for cells, including those of a state
    };

    // Works with and without kv_dynamic
    // All members are 0 if the small host memory for counting cannot be allocated
    LLAMA_API struct llama_memory_usage llama_get_memory_usage(const struct llama_context * ctx);

    // cells that hold a token of a sequence
    struct llama_seq_cells {
        uint32_t n_cells;
        uint32_t n_shared; // of these: with other sequences
        uint32_t n_runs;   // runs of adjacent cells
    };

    // memory that one sequence of a context uses
    struct llama_seq_usage {
        // the sum over all sequences of the context equals llama_memory_usage::used. the bytes of a shared cell are divided among its
        // sequences, and the sequences with the smallest ids get one byte of the remainder each. recurrent states have the same size for
        // each sequence, also for an empty one
        size_t bytes;
        size_t bytes_window; // of these: in caches with a window (SWA)

        struct llama_seq_cells cells;  // of the largest KV cache without a window
        struct llama_seq_cells window; // of the largest one with a window
    };

    // Looks at every cell on each call and keeps no counters. Works with and without kv_dynamic
    // All members are 0 if the small host memory for counting cannot be allocated
    // Not thread-safe, as llama_decode()
    LLAMA_API struct llama_seq_usage llama_memory_seq_usage(const struct llama_context * ctx, llama_seq_id seq_id);

#ifdef __cplusplus
}
#endif

// the interfaces of other layers, as far as this tree has them
#if __has_include("llama-kv-types.h")
#    include "llama-kv-types.h"
#endif
