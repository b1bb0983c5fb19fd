#pragma once

// The share of one llama_context in a llama_memory_budget, and the types that its cells step down through to stay within it
//
// Before a growth, the member compares the budget with the new size of the caches, the other contexts and the growth of the compute
// buffers: first for the rows that the growth policy wants, then for the rows that the batch needs. If even these do not fit, or if an
// allocation fails, the cells change directly to the first type that fits. They skip the types between, since each change costs
// precision. If no type fits, nothing changes, and the batch fails as in a full cache.
//
// The member counts the committed bytes after a growth. During a growth by copy, a layer can exist twice.
//
// Other objects, for example weights that are loaded and freed, can use a part of the budget. The cells make room for them at once.
//
// When no cell of a context is in use, the context returns to its first types, at no cost.

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

    // join a budget, which has to outlive this. null: no limit
    // returns whether there is one
    bool join(llama_memory_budget * budget);

    // make room after a change of the bytes that other objects use. returns false if there is no room
    bool make_room();

    void begin_account() override;
    void account() override;
    bool fits(bool ahead) const override;
    bool fits_rows(const llama_kv_dynamic_cache & cache, const llama_kv_rows & rows) const override;
    bool is_kept() const override;
    size_t n_bytes_compute() const override;
    void fit_compute() override;
    bool step_down() override { return step_down(false); }
    void step_up() override;

    bool has_budget() const { return budget != nullptr; }

    // bytes above the budget: now, and with the cells in these types
    size_t n_bytes_above() const;
    size_t n_bytes_above_in(ggml_type type_k, ggml_type type_v) const;

    // the types of now are wanted: nothing to step up to
    void forget_first_types();

private:
    // bytes of the caches, and with the rows that were requested in these types
    size_t n_bytes_caches() const;
    size_t n_bytes_next(bool ahead, ggml_type type_k, ggml_type type_v) const;

    size_t n_bytes_grown() const; // by the compute buffers

    // if the caches took that many bytes
    size_t n_bytes_above_with(size_t n_bytes_caches) const;
    bool   is_within         (size_t n_bytes_caches) const;

    // change to the next types with which the caches fit. returns false if there are none
    // is_full: the caches exceed the budget already
    bool step_down(bool is_full);

    llama_kv_dynamic & dyn;

    llama_memory_budget * budget = nullptr;

    size_t n_bytes_accounted        = 0; // of the budget
    size_t n_bytes_accounted_caches = 0; // of these, without compute buffers
    std::optional<size_t> n_bytes_compute_start; // of the compute buffers, before a cache has grown

    std::pair<ggml_type, ggml_type> types_first = { GGML_TYPE_COUNT, GGML_TYPE_COUNT }; // to step up to
};

// have the caches of a context change their types, and its budget. when the context is made
void llama_kv_types_init(llama_kv_dynamic & dyn);
