#pragma once

// Changes of the types of the KV cells, and budgets for the memory of KV caches. llama-kv.h includes this file

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

    // Results of llama_set_memory_type(). If the result is neither LLAMA_MEMORY_TYPE_OK nor LLAMA_MEMORY_TYPE_LOST, nothing has
    // changed
    enum llama_memory_type_result {
        LLAMA_MEMORY_TYPE_OK          =  0,
        LLAMA_MEMORY_TYPE_UNKNOWN     = -1, // the type is not one of f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl
        LLAMA_MEMORY_TYPE_NEEDS_FA    = -2, // a quantized V needs flash attention
        LLAMA_MEMORY_TYPE_DIFFER      = -3, // K and V must have the same type in this model (MLA)
        LLAMA_MEMORY_TYPE_BLOCK       = -4, // the block size of the type does not divide the size of a head
        LLAMA_MEMORY_TYPE_UNSUPPORTED = -5, // the context has no KV cells of its own (recurrent, or shared with another
                                            // context), or each K and V tensor is split over devices (--split-mode tensor),
                                            // or the context is used for training
        LLAMA_MEMORY_TYPE_BACKEND     = -6, // the device of a layer cannot compute attention with this type
        LLAMA_MEMORY_TYPE_NO_MEMORY   = -7, // not enough memory for larger cells, or for the small buffers of the conversion
        LLAMA_MEMORY_TYPE_LOST        = -8, // the device failed during the change, and all cells are empty. with a budget,
                                            // llama_decode() also changes types, and the device can fail during that change.
                                            // after such a failure, llama_decode() returns -3 for a batch that continues an old
                                            // sequence. this ends when the sequence is removed or restored, or a batch begins
                                            // the sequence at position 0
    };

    // Convert the cells of all KV caches of the context to other types. May be called at any time between two calls of
    // llama_decode()
    // Sequences keep their positions and cells. Works with and without kv_dynamic
    // Precision that a type cannot hold is lost: cells that return from q8_0 to f16 keep the precision of q8_0
    // If a draft shares the cells of its target, a change of the target's types also changes the draft
    // Not thread-safe, as llama_decode()
    // Returns one of llama_memory_type_result
    LLAMA_API int32_t llama_set_memory_type(struct llama_context * ctx, enum ggml_type type_k, enum ggml_type type_v);

    // Return the types of the KV cells in type_k and type_v. GGML_TYPE_COUNT: the context has no KV cells
    LLAMA_API void llama_get_memory_type(const struct llama_context * ctx, enum ggml_type * type_k, enum ggml_type * type_v);

    // Return the reason for a result of llama_set_memory_type(), for a message: a static string in English, without a full stop
    LLAMA_API const char * llama_memory_type_reason(int32_t result);

    // Budget: a limit on the memory of the KV caches of several contexts, and a list of smaller types. The cells change to a
    // type of the list when their memory would exceed the limit
    // The budget must outlive the contexts
    // Not thread-safe: contexts that share a budget must not be used at the same time
    struct llama_memory_budget;

    // Create a budget
    // n_bytes: limit for all KV caches plus the growth of the compute buffers. 0: the only limit is the available memory
    // types:   types of the cells, ordered from larger to smaller
    // A context starts with its own type_k and type_v. If a growth would exceed n_bytes, or an allocation fails, the cells change
    // to the first of `types` that fits. K and V each change only if that makes them smaller. If none of `types` fits, the
    // batch fails as in a full cache. When no cell is in use, the context returns to its own type_k and type_v
    // Returns NULL if a type cannot be a type of KV cells, or is not smaller than the type before it
    LLAMA_API struct llama_memory_budget * llama_memory_budget_init(size_t n_bytes, const enum ggml_type * types, size_t n_types);
    LLAMA_API void                         llama_memory_budget_free(struct llama_memory_budget * budget);

    // Put a context with kv_dynamic under the budget. Call this before the first llama_decode() of the context
    // The budget is not a member of llama_context_params, because programs compiled with upstream's header need that struct to
    // have upstream's size
    // budget: NULL removes the context from its budget
    // ctx:    NULL does nothing
    // Returns true if the context has a budget after the call. The result is false if budget or ctx is NULL, or if the context
    // has no kv_dynamic. If the cells of the context cannot change their types, the budget only limits their memory
    LLAMA_API bool llama_memory_budget_add(struct llama_memory_budget * budget, struct llama_context * ctx);

    // Choose what happens if a batch has no memory. hold = true: the batch fails, and the caller can free unused memory first
    // hold = false (default): the cells change to smaller types
    LLAMA_API void llama_memory_budget_hold(struct llama_memory_budget * budget, bool hold);

    // Set the number of bytes of the budget that other objects use, for example weights that the caller loads and frees
    // Call this function before loading and after freeing such objects
    // ctx: a context of the budget, or NULL. Its cells change to smaller types if that makes enough room. If n_bytes decreases
    // and no cell is in use, the cells return to their first types
    // Returns false if the budget has no room for n_bytes. The budget then keeps the old number of bytes. The cells can still
    // have changed to smaller types: on a device without memory for a copy, they are converted inside their old buffer, which
    // frees no memory
    // Not thread-safe, as llama_decode()
    LLAMA_API bool llama_memory_budget_set_other(struct llama_memory_budget * budget, size_t n_bytes, struct llama_context * ctx);

    // Count the reclaimable memory of the caller in the budget. This is memory that the caller can free at any time, such as
    // saved states. It can use the bytes of the budget that the caches and the other objects do not use
    // reclaim: function that frees at least n_bytes of the reclaimable memory if possible, and returns the bytes of this memory
    //          that are still in use. llama.cpp calls it with n_bytes = 0 to count the bytes. llama.cpp calls it with a larger
    //          number before a growth fails, before types change, and before llama_memory_budget_set_other() returns false. The
    //          function may read the sequences of the contexts, but must not change them. NULL: there is no reclaimable memory
    LLAMA_API void llama_memory_budget_set_reclaim(
            struct llama_memory_budget * budget, size_t (*reclaim)(size_t n_bytes, void * user_data), void * user_data);

    struct llama_memory_budget_usage {
        size_t   n_bytes;   // the limit of llama_memory_budget_init()
        size_t   committed; // bytes in use: all caches of the budget, the growth of their compute buffers, `other`, and `reclaimable`
        size_t   other;     // bytes set by llama_memory_budget_set_other()
        uint32_t n_down;    // number of times that the cells of a context changed to smaller types
        uint32_t n_up;      // number of times that the cells of a context returned to their first types
        size_t   reclaimable; // bytes counted by the callback of llama_memory_budget_set_reclaim()
    };

    LLAMA_API struct llama_memory_budget_usage llama_memory_budget_get_usage(const struct llama_memory_budget * budget);

#ifdef __cplusplus
}
#endif
