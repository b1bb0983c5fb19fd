#pragma once

// The share of one llama_context in a llama_memory_budget, and the types that its cells step down through to stay within it
//
// Before a growth, with the rows that it wants and then with those that it needs: what the caches would take, with what the other
// contexts take and what the compute buffers have grown by, is compared with the budget. If even the least does not fit, or if
// there is no memory, the cells take the first of the types with which it would: not one after the other, since each costs
// precision. Without such a type nothing changes, and the batch fails as in a full cache.
//
// What is counted is what is committed after a growth. While it runs, a layer can be there twice by copy.
//
// Something else, like weights that come and go, can take a part of the budget. The cells make room for it at once.
//
// When no cell of a context is in use, it goes back to the types that it started with, which costs nothing.

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

    // something else takes more or less of the budget than before. returns false if there is no room for it
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

    // take the next types with which the caches would fit. returns false if there are none
    // is_full: what is there already is too much
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
