#pragma once

// What the dynamic KV cache (llama_context_params::kv_dynamic) adds to llama.h

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

    // memory behind the KV cells and the recurrent states of a context
    struct llama_memory_usage {
        size_t   reserved;       // bytes at full size: what a context without kv_dynamic takes
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
    };

    // Works with and without kv_dynamic
    LLAMA_API struct llama_memory_usage llama_get_memory_usage(const struct llama_context * ctx);

#ifdef __cplusplus
}
#endif
