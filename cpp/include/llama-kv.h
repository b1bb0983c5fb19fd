#pragma once

// Additions of the dynamic KV cache (llama_context_params::kv_dynamic) to llama.h

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

    // Memory of the KV cells and the recurrent states of a context
    struct llama_memory_usage {
        size_t   reserved;       // bytes at full size, which is the size of the cache without kv_dynamic
        size_t   committed;      // bytes that are allocated
        size_t   used;           // bytes of the cells that hold a token
        uint32_t n_cells;        // cells with memory, over all streams of the largest KV cache
        uint32_t n_cells_max;    // cells at full size
        uint32_t n_cells_used;   // cells that hold a token
        uint32_t n_grow;         // number of growths
        uint32_t n_shrink;       // number of times that memory was freed
        size_t   n_bytes_copied; // bytes that growths and shrinks copied
        int64_t  t_grow_us;      // duration of all growths
        int64_t  t_grow_max_us;  // duration of the longest growth
        uint32_t n_retype;       // number of changes of type
        int64_t  t_retype_us;    // duration of all changes of type
        uint32_t n_no_memory;    // number of failed allocations for cells, including cells of a state that is restored
    };

    // Return the memory of the context. Works with and without kv_dynamic
    // All members are 0 if the small host memory for counting cannot be allocated
    LLAMA_API struct llama_memory_usage llama_get_memory_usage(const struct llama_context * ctx);

    // Cells that hold a token of one sequence
    struct llama_seq_cells {
        uint32_t n_cells;
        uint32_t n_shared; // cells that also belong to other sequences
        uint32_t n_runs;   // number of runs of adjacent cells
    };

    // Memory that one sequence of a context uses
    struct llama_seq_usage {
        // bytes of the sequence. The sum over all sequences of the context equals llama_memory_usage::used
        // The bytes of a shared cell are divided equally among its sequences. If a remainder of n bytes is left, the n
        // sequences with the smallest ids count one more byte each
        // Recurrent states have the same size for each sequence, even for an empty one
        size_t bytes;
        size_t bytes_window; // the part of `bytes` that belongs to caches with a window (SWA)

        struct llama_seq_cells cells;  // cells in the largest KV cache without a window
        struct llama_seq_cells window; // cells in the largest KV cache with a window
    };

    // Return the memory of one sequence. Reads every cell on each call and keeps no counters. Works with and without kv_dynamic
    // All members are 0 if the small host memory for counting cannot be allocated
    // Not thread-safe, as llama_decode()
    LLAMA_API struct llama_seq_usage llama_memory_seq_usage(const struct llama_context * ctx, llama_seq_id seq_id);

#ifdef __cplusplus
}
#endif

// Include the headers of other layers of the patch set, if this tree contains them
#if __has_include("llama-kv-types.h")
#    include "llama-kv-types.h"
#endif
