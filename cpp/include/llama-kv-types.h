#pragma once

// Changes of the types of the KV cells, and budgets for the memory of KV caches. llama-kv.h includes this file

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

    // results of llama_set_memory_type(). except for LLAMA_MEMORY_TYPE_OK and _LOST, nothing has changed
    enum llama_memory_type_result {
        LLAMA_MEMORY_TYPE_OK          =  0,
        LLAMA_MEMORY_TYPE_UNKNOWN     = -1, // not a type of KV cells: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl
        LLAMA_MEMORY_TYPE_NEEDS_FA    = -2, // a quantized V needs flash attention
        LLAMA_MEMORY_TYPE_DIFFER      = -3, // K and V cannot have different types in this model (MLA)
        LLAMA_MEMORY_TYPE_BLOCK       = -4, // the block size of the type does not divide the size of a head
        LLAMA_MEMORY_TYPE_UNSUPPORTED = -5, // no KV cache of its own (recurrent, shared with another context), one that is split
                                            // over devices as tensors, or a context that trains
        LLAMA_MEMORY_TYPE_BACKEND     = -6, // the device of a layer cannot compute attention over it
        LLAMA_MEMORY_TYPE_NO_MEMORY   = -7, // for larger cells, or for the small work memory of the change itself
        LLAMA_MEMORY_TYPE_LOST        = -8, // the device failed during the change: all cells are empty. within a budget, llama_decode()
                                            // can fail in this way. it then returns -3 for a batch that continues an old sequence,
                                            // until the sequence is removed or restored, or begins at 0
    };

    // Convert the cells of all KV caches of the context to other types, at any time between two calls of llama_decode(). Sequences keep
    // their positions and cells; only the precision changes. Works with and without kv_dynamic
    // Precision that a type cannot hold is lost: cells that return from q8_0 to f16 keep the precision of q8_0
    // A context that shares cells (a draft with its target) changes together with its target
    // Not thread-safe, as llama_decode()
    // Returns one of llama_memory_type_result
    LLAMA_API int32_t llama_set_memory_type(struct llama_context * ctx, enum ggml_type type_k, enum ggml_type type_v);

    // The types of the KV cells. GGML_TYPE_COUNT: the context has none
    LLAMA_API void llama_get_memory_type(const struct llama_context * ctx, enum ggml_type * type_k, enum ggml_type * type_v);

    // The reason for a result of llama_set_memory_type(), for a message: static, in English, without a full stop
    LLAMA_API const char * llama_memory_type_reason(int32_t result);

    // Limit on the memory of the KV caches of several contexts, and the smaller types that they change to at the limit
    // It must outlive the contexts
    // Not thread-safe: contexts that share a budget must not be used at the same time
    struct llama_memory_budget;

    // n_bytes: limit for all KV caches plus the growth of the compute buffers. 0: the available memory
    // types:   ordered from larger to smaller. If a growth would exceed n_bytes, or an allocation fails, the cells change to the next
    //          type, K and V each only if that makes them smaller. A context starts with its own type_k and type_v, and returns to them
    //          when no cell is in use. After the last type, the batch fails as in a full cache
    // Returns NULL if a type cannot be a type of KV cells or is not smaller than the one before
    LLAMA_API struct llama_memory_budget * llama_memory_budget_init(size_t n_bytes, const enum ggml_type * types, size_t n_types);
    LLAMA_API void                         llama_memory_budget_free(struct llama_memory_budget * budget);

    // Put a context with kv_dynamic under the budget, before its first llama_decode(). Not a member of llama_context_params, whose size
    // must equal upstream's for programs compiled with upstream's header
    // budget: NULL removes the context from its budget, ctx: NULL does nothing
    // Returns false if the context cannot have a budget: without kv_dynamic, or if its cells cannot change their types
    LLAMA_API bool llama_memory_budget_add(struct llama_memory_budget * budget, struct llama_context * ctx);

    // Let a batch fail (default: false) instead of changing the types, so that the caller can free unused memory first
    LLAMA_API void llama_memory_budget_hold(struct llama_memory_budget * budget, bool hold);

    // Set the bytes of the budget that other objects use: weights that the caller loads and frees next to the caches. Call this function
    // before loading and after freeing
    // ctx: a context of the budget, or NULL. Its cells change to the next types if that makes enough room. After a decrease, they return
    //      to their first types if no cell is in use
    // Returns false if there is no room: the old number stays in force. The cells may have changed to smaller types nevertheless, if the
    // change had no memory to work in
    // Not thread-safe, as llama_decode()
    LLAMA_API bool llama_memory_budget_set_other(struct llama_memory_budget * budget, size_t n_bytes, struct llama_context * ctx);

    struct llama_memory_budget_usage {
        size_t   n_bytes;   // as given
        size_t   committed; // bytes in use by all caches of the budget
        size_t   other;     // of these: by llama_memory_budget_set_other()
        uint32_t n_down;    // changes of a context to the next types
        uint32_t n_up;      // returns to the first types
    };

    LLAMA_API struct llama_memory_budget_usage llama_memory_budget_get_usage(const struct llama_memory_budget * budget);

#ifdef __cplusplus
}
#endif
