#pragma once

// One llama_context as a member of a llama_memory_budget. The member counts the bytes of the context, and changes the cells of
// the context to smaller types to stay within the budget
//
// A growth is allowed if all memory that the budget counts is within the limit after the growth. This memory includes the new
// rows, the other contexts and the growth of the compute buffers. The member first checks the rows that the growth policy
// wants. If these rows do not fit, the member checks the rows that the batch needs.
//
// If the rows that the batch needs do not fit either, or if an allocation fails, the types of the cells change. The new type is
// the first type of the budget with which these rows fit. The cells change to this type directly, because each change costs
// precision. If the rows do not fit with any type, nothing changes, and the batch fails as in a full cache.
//
// The member counts the committed bytes after a growth. The peak during a growth by copy is not counted: one layer can then exist
// twice.
//
// Objects other than caches can use some bytes of the budget, for example weights that are loaded and freed. When these objects
// need more bytes, the cells change to smaller types at once.
//
// The owner of the budget can use its remaining bytes for reclaimable memory, for example saved states. If the rows that a
// batch needs do not fit, the member first reclaims that memory. For rows that only the growth policy wants, no memory is
// reclaimed.
//
// When no cell of a context is in use, the context returns to its first types. This costs nothing, because there is nothing to
// convert.

#include "llama-kv-limit.h"

#include "llama-kv.h"

#include <cstddef>
#include <optional>
#include <utility>

class llama_kv_dynamic;

class llama_kv_budget_member : public llama_kv_limit {
public:
    explicit llama_kv_budget_member(llama_kv_dynamic & dyn) : dyn(dyn) {}
    ~llama_kv_budget_member() override;

    // put the context under a budget, which must outlive this object. null: remove the limit
    // returns whether the context has a budget after the call
    bool join(llama_memory_budget * budget);

    // change to smaller types until the caches are within the budget. Call this after other objects use more of the budget
    // returns false if no type is small enough
    bool make_room();

    void begin_account() override;
    void account() override;
    bool fits(bool ahead) const override;
    bool fits_rows(const llama_kv_dynamic_cache & cache, const llama_kv_rows & rows) const override;
    bool is_kept(bool ahead) const override;
    size_t n_bytes_compute() const override;
    void fit_compute() override;
    bool step_down() override { return step_down(false); }
    void step_up() override;

    bool has_budget() const { return budget != nullptr; }

    // n_bytes_above():    return the bytes by which the budget is exceeded now
    // n_bytes_above_in(): return the bytes by which the budget would be exceeded if the caches of this context had the given
    //                     types and their requested rows
    size_t n_bytes_above() const;
    size_t n_bytes_above_in(ggml_type type_k, ggml_type type_v) const;

    // let the owner of the budget free this many bytes of its own memory, or as many as it can
    void reclaim(size_t n_bytes) const;

    // forget the types that step_up() would return to. Call this when the user has chosen new types
    void forget_first_types();

private:
    // return the bytes of all caches of the context
    size_t n_bytes_caches() const;
    size_t n_bytes_next(bool ahead, ggml_type type_k, ggml_type type_v) const;

    size_t n_bytes_grown() const; // return the bytes by which the compute buffers have grown

    // n_bytes_above_with(): return the bytes by which the budget would be exceeded if the caches of this context had
    //                       n_bytes_caches bytes
    // is_within():          check whether the budget allows this size of the caches. Caches without a growth are always allowed
    size_t n_bytes_above_with(size_t n_bytes_caches) const;
    bool   is_within         (size_t n_bytes_caches) const;

    // call is_within(). If the result is false, let the owner of the budget free memory, and call is_within() again
    bool make_within(size_t n_bytes_caches) const;

    // change the cells to the next types with which the caches fit. returns false if the caches do not fit with any types
    // is_full: the budget is exceeded already, so the types must change even without a growth
    bool step_down(bool is_full);

    llama_kv_dynamic & dyn;

    llama_memory_budget * budget = nullptr;

    size_t n_bytes_accounted        = 0; // bytes of this context that are counted in budget->usage.committed
    size_t n_bytes_accounted_caches = 0; // the part of n_bytes_accounted that belongs to caches, not to compute buffers
    std::optional<size_t> n_bytes_compute_start; // bytes of the compute buffers before any cache has grown

    // types that step_up() returns to. GGML_TYPE_COUNT: the context still has its first types
    std::pair<ggml_type, ggml_type> types_first = { GGML_TYPE_COUNT, GGML_TYPE_COUNT };
};

// enable changes of type and budgets for a new context
void llama_kv_types_init(llama_kv_dynamic & dyn);
