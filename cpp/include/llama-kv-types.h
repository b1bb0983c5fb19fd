#pragma once

// Changes of the types of the KV cells, and budgets for the memory of KV caches. llama-kv.h includes this file

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

    // what llama_set_memory_type() returns. all but LLAMA_MEMORY_TYPE_OK and _LOST: nothing has changed
    enum llama_memory_type_result {
        LLAMA_MEMORY_TYPE_OK          =  0,
        LLAMA_MEMORY_TYPE_UNKNOWN     = -1, // not a type of KV cells: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl
        LLAMA_MEMORY_TYPE_NEEDS_FA    = -2, // a quantized V needs flash attention
        LLAMA_MEMORY_TYPE_DIFFER      = -3, // K and V cannot have different types in this model (MLA)
        LLAMA_MEMORY_TYPE_BLOCK       = -4, // the block size of the type does not divide the size of a head
        LLAMA_MEMORY_TYPE_UNSUPPORTED = -5, // no KV cache of its own (recurrent, shared with another context), one that is split
                                            // over devices as tensors, or a context that trains
        LLAMA_MEMORY_TYPE_BACKEND     = -6, // the device of a layer cannot compute attention over it
        LLAMA_MEMORY_TYPE_NO_MEMORY   = -7, // for larger cells, or for what the change itself takes, which is little
        LLAMA_MEMORY_TYPE_LOST        = -8, // the device failed in the middle of it: all cells are empty. llama_decode(), which can
                                            // meet this within a budget, returns -3 for a batch that goes on with a sequence of
                                            // before, until the sequence is removed or restored, or begins at 0
    };

    // Convert the cells of all KV caches of the context to other types, at any time between two calls of llama_decode(), with
    // sequences in them: positions and cells do not change, only the precision. Works with and without kv_dynamic
    // What a type cannot hold is lost: from q8_0 back to f16 is q8_0's precision
    // The cells of a context that shares them (a draft with its target) change with those of its target
    // Not thread-safe, as llama_decode()
    // Returns one of llama_memory_type_result
    LLAMA_API int32_t llama_set_memory_type(struct llama_context * ctx, enum ggml_type type_k, enum ggml_type type_v);

    // The types of the KV cells. GGML_TYPE_COUNT: the context has none
    LLAMA_API void llama_get_memory_type(const struct llama_context * ctx, enum ggml_type * type_k, enum ggml_type * type_v);

    // The reason for a result of llama_set_memory_type(), for a message: static, in English, without a full stop
    LLAMA_API const char * llama_memory_type_reason(int32_t result);

    // What the KV caches of several contexts may take together, and the types that they step down through to stay within it
    // It has to outlive them
    // Not thread-safe: the contexts that share one must not be used at the same time
    struct llama_memory_budget;

    // n_bytes: of all KV caches and of what their growth adds to the compute buffers. 0: what there is
    // types:   from larger to smaller. Before a growth would pass n_bytes, or where memory cannot be had, the cells take the next of
    //          these, K and V each only where that makes them smaller: a context starts with its own type_k and type_v. When a
    //          context has no cell in use, it goes back to these. Without a type that is left, the batch fails as in a full cache
    // Returns NULL if the types are not of KV cells or one is not smaller than the one before
    LLAMA_API struct llama_memory_budget * llama_memory_budget_init(size_t n_bytes, const enum ggml_type * types, size_t n_types);
    LLAMA_API void                         llama_memory_budget_free(struct llama_memory_budget * budget);

    // A context with kv_dynamic stays within the budget: to be called before its first llama_decode(). Not a member of
    // llama_context_params, whose size is that of upstream's for programs that are compiled with its header
    // budget: NULL for none, ctx: NULL does nothing
    // Returns false if the context has none then, or cannot have one: without kv_dynamic, or cells whose types cannot change
    LLAMA_API bool llama_memory_budget_add(struct llama_memory_budget * budget, struct llama_context * ctx);

    // Let a batch fail (default: false) where the cells would take the next types, so that what nobody needs can be freed before
    LLAMA_API void llama_memory_budget_hold(struct llama_memory_budget * budget, bool hold);

    // What something else takes of the budget from now on: weights that are loaded and freed beside the caches. To be called before
    // they are loaded and after they are freed
    // ctx: one of those that share the budget, or NULL. Its cells take the next types if that makes the room, and when there is
    //      more room and none is in use they go back to the first ones
    // Returns false if there is no room: it takes what it did before. Cells that found no memory beside them to become smaller
    // may have taken the next types all the same
    // Not thread-safe, as llama_decode()
    LLAMA_API bool llama_memory_budget_set_other(struct llama_memory_budget * budget, size_t n_bytes, struct llama_context * ctx);

    struct llama_memory_budget_usage {
        size_t   n_bytes;   // as given
        size_t   committed; // bytes of them that are taken
        size_t   other;     // of these: by llama_memory_budget_set_other()
        uint32_t n_down;    // times that a context has taken the next types
        uint32_t n_up;      // times that one has gone back to its first ones
    };

    LLAMA_API struct llama_memory_budget_usage llama_memory_budget_get_usage(const struct llama_memory_budget * budget);

#ifdef __cplusplus
}
#endif
