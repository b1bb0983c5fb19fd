#include "llama-kv-budget-member.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-convert.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"
#include "llama-kv-retype.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <utility>
#include <vector>

struct llama_memory_budget {
    const std::vector<ggml_type> types;

    llama_memory_budget_usage usage; // n_bytes is 0 if the only limit is the available memory

    bool hold = false; // let a batch fail instead of changing to the next types

    size_t (* reclaim)(size_t n_bytes, void * user_data) = nullptr;
    void *  reclaim_data = nullptr;

    // let the owner of the budget free n_bytes_freed bytes of its reclaimable memory, and return the bytes of it still in use
    size_t n_bytes_reclaimable(size_t n_bytes_freed = 0) const { return reclaim ? reclaim(n_bytes_freed, reclaim_data) : 0; }

    // return the bytes above the limit
    size_t n_bytes_above() const {
        const size_t n = usage.committed + n_bytes_reclaimable();
        return usage.n_bytes == 0 ? 0 : n - std::min(n, usage.n_bytes);
    }
};

// check whether cells of type a are smaller than cells of type b
static bool llama_kv_type_is_smaller(ggml_type a, ggml_type b) {
    return ggml_type_size(a)*ggml_blck_size(b) < ggml_type_size(b)*ggml_blck_size(a);
}

// set each type of the pair to `type`, if `type` is smaller
static void take_smaller(std::pair<ggml_type, ggml_type> & types, ggml_type type) {
    types.first  = llama_kv_type_is_smaller(type, types.first)  ? type : types.first;
    types.second = llama_kv_type_is_smaller(type, types.second) ? type : types.second;
}

void llama_kv_types_init(llama_kv_dynamic & dyn) {
    auto budget = std::make_unique<llama_kv_budget_member>(dyn);

    dyn.retype = std::make_shared<llama_kv_retype>(dyn, *budget);

    dyn.set_limit(std::move(budget));
}

llama_kv_budget_member::~llama_kv_budget_member() {
    if (budget) {
        budget->usage.committed -= n_bytes_accounted;
    }
}

bool llama_kv_budget_member::join(llama_memory_budget * budget) {
    if (this->budget) {
        this->budget->usage.committed -= std::exchange(n_bytes_accounted, 0);
    }

    this->budget = dyn.is_enabled() ? budget : nullptr;

    try {
        account();

        // warn now about types that the model does not allow. A backend can still refuse a type later
        auto next = dyn.retype->types();
        for (size_t i = 0; this->budget && next.first != GGML_TYPE_COUNT && i < budget->types.size(); ++i) {
            const auto cur = next;
            take_smaller(next, budget->types[i]);

            const int32_t res = next == cur ? LLAMA_MEMORY_TYPE_OK : dyn.retype->check_types(next.first, next.second);
            if (res != LLAMA_MEMORY_TYPE_OK) {
                LLAMA_LOG_WARN("%s: this context cannot have %s and %s: %s\n", __func__,
                        ggml_type_name(next.first), ggml_type_name(next.second), llama_memory_type_reason(res));
            }
        }
    } catch (const std::bad_alloc &) { // no host memory for counting. the next growth counts
    }

    return this->budget != nullptr;
}

//
// accounting
//

size_t llama_kv_budget_member::n_bytes_next(bool ahead, ggml_type type_k, ggml_type type_v) const {
    size_t res = 0;

    for (const auto * cache : dyn.caches()) {
        res += cache->storage().n_bytes(cache->rows_after_growth(ahead), type_k, type_v);
    }

    return res;
}

size_t llama_kv_budget_member::n_bytes_caches() const {
    size_t res = 0;

    for (const auto * cache : dyn.caches()) {
        res += cache->usage().committed;
    }

    return res;
}

size_t llama_kv_budget_member::n_bytes_grown() const {
    const size_t res = dyn.compute.n_bytes();

    return res - std::min(res, n_bytes_compute_start.value_or(res));
}

size_t llama_kv_budget_member::n_bytes_compute() const {
    return budget ? n_bytes_grown() : 0;
}

void llama_kv_budget_member::begin_account() {
    if (budget && !n_bytes_compute_start) {
        n_bytes_compute_start = dyn.compute.n_bytes();
    }

    account();
}

void llama_kv_budget_member::account() {
    if (!budget) {
        return;
    }

    n_bytes_accounted_caches = n_bytes_caches();

    const size_t n_bytes = n_bytes_accounted_caches + n_bytes_grown();

    budget->usage.committed += n_bytes - n_bytes_accounted;

    n_bytes_accounted = n_bytes;
}

size_t llama_kv_budget_member::n_bytes_above_with(size_t n_bytes_caches) const {
    if (!budget || budget->usage.n_bytes == 0) {
        return 0;
    }

    const size_t n_bytes = budget->usage.committed - n_bytes_accounted + n_bytes_caches + n_bytes_grown() + budget->n_bytes_reclaimable();

    return n_bytes - std::min(n_bytes, budget->usage.n_bytes);
}

void llama_kv_budget_member::reclaim(size_t n_bytes) const {
    if (budget && n_bytes > 0) {
        budget->n_bytes_reclaimable(n_bytes);
    }
}

bool llama_kv_budget_member::make_within(size_t n_bytes_caches) const {
    if (!is_within(n_bytes_caches)) {
        reclaim(n_bytes_above_with(n_bytes_caches));
    }

    return is_within(n_bytes_caches);
}

bool llama_kv_budget_member::is_within(size_t n_bytes_caches) const {
    // Caches that do not grow are always within the limit: their memory and their compute buffers are allocated already. This is also
    // the case for a draft that uses the cells of another context.
    return n_bytes_caches <= n_bytes_accounted_caches || n_bytes_above_with(n_bytes_caches) == 0;
}

size_t llama_kv_budget_member::n_bytes_above() const {
    return n_bytes_above_with(n_bytes_caches());
}

size_t llama_kv_budget_member::n_bytes_above_in(ggml_type type_k, ggml_type type_v) const {
    return n_bytes_above_with(n_bytes_next(false, type_k, type_v));
}

bool llama_kv_budget_member::fits(bool ahead) const {
    if (!budget) {
        return true;
    }

    const auto   types   = dyn.retype->types();
    const size_t n_bytes = n_bytes_next(ahead, types.first, types.second);

    return ahead ? is_within(n_bytes) : make_within(n_bytes);
}

bool llama_kv_budget_member::fits_rows(const llama_kv_dynamic_cache & cache, const llama_kv_rows & rows) const {
    const auto & storage = cache.storage();

    // Without a budget, all rows fit. Return before the bytes are counted, because a context without cells has no types.
    if (!budget || rows == storage.rows()) {
        return true;
    }

    const auto types = dyn.retype->types();

    const auto n_bytes = [&](const llama_kv_rows & r) { return storage.n_bytes(r, types.first, types.second); };

    return make_within(n_bytes_caches() - n_bytes(storage.rows()) + n_bytes(rows));
}

bool llama_kv_budget_member::is_kept(bool ahead) const {
    return !budget || (ahead ? is_within(n_bytes_caches()) : make_within(n_bytes_caches()));
}

void llama_kv_budget_member::fit_compute() {
    if (!budget || dyn.compute.is_training()) {
        return;
    }

    account();

    if (n_bytes_above_with(n_bytes_accounted_caches) > 0) {
        dyn.compute.reset_sched();
        account();
    }
}

//
// the ladder of types
//

bool llama_kv_budget_member::step_down(bool is_full) {
    const auto cur = dyn.retype->types();

    if (!budget || budget->hold || cur.first == GGML_TYPE_COUNT) {
        return false;
    }

    auto next = cur;

    const size_t n_bytes_old = n_bytes_caches();

    // A requested growth is checked against the budget again after the change of types. Then the caches count with their
    // smaller types, so is_within() allows less than it does now. So here, the growth must not exceed the budget at all.
    const bool is_growth = dyn.any([](const auto * cache) { return cache->requested.has_rows(); });

    for (const auto type : budget->types) {
        take_smaller(next, type);

        const size_t n_bytes = n_bytes_next(false, next.first, next.second);

        if (next == dyn.retype->types() || !(is_full || is_growth ? n_bytes_above_with(n_bytes) == 0 : is_within(n_bytes))) {
            continue;
        }

        // set types_first before the change of types, because set_types() can throw after the change, when it counts the bytes
        const auto first = std::exchange(types_first, types_first.first == GGML_TYPE_COUNT ? dyn.retype->types() : types_first);

        const int32_t res = dyn.retype->set_types(next.first, next.second);

        if (res != LLAMA_MEMORY_TYPE_OK) {
            LLAMA_LOG_WARN("%s: no %s and %s: %s\n", __func__, ggml_type_name(next.first), ggml_type_name(next.second), llama_memory_type_reason(res));
        }

        if (res != LLAMA_MEMORY_TYPE_OK && res != LLAMA_MEMORY_TYPE_LOST) {
            types_first = first;
        }

        if (res == LLAMA_MEMORY_TYPE_OK) {
            budget->usage.n_down++;

            // If there was no memory for a copy of the cells, they were converted inside of their old buffer. Except in pages of
            // host memory, the buffer keeps its size, so nothing was freed. A still smaller type would not free anything
            // either, so it is not tried.
            return n_bytes_caches() < n_bytes_old;
        }

        if (res == LLAMA_MEMORY_TYPE_LOST) {
            return false;
        }
    }

    return false;
}

void llama_kv_budget_member::step_up() {
    if (!budget || dyn.compute.is_training() || types_first.first == GGML_TYPE_COUNT ||
            dyn.any([](const auto * cache) { return cache->usage().n_cells_used > 0; })) {
        return;
    }

    const size_t n_bytes = n_bytes_next(false, types_first.first, types_first.second);

    if (!make_within(n_bytes) && n_bytes_above_with(n_bytes) > n_bytes_grown()) {
        return; // the first types would not fit even without the growth of the compute buffers
    }

    // free the compute buffers: they do not shrink by themselves, and still have the size for the rows that were just freed
    dyn.compute.create_sched();

    if (is_within(n_bytes) && dyn.retype->set_types(types_first.first, types_first.second) == LLAMA_MEMORY_TYPE_OK) {
        forget_first_types();
        budget->usage.n_up++;
    } else {
        dyn.compute.reset_sched();
    }
}

void llama_kv_budget_member::forget_first_types() {
    types_first = { GGML_TYPE_COUNT, GGML_TYPE_COUNT };
}

bool llama_kv_budget_member::make_room() {
    dyn.lctx.synchronize();

    dyn.forget(); // forget the rows that were requested for a batch that did not run
    step_up();
    begin_account();
    reclaim(n_bytes_above());

    return n_bytes_above() == 0 || (step_down(true) && n_bytes_above() == 0);
}

//
// C interface
//

// return the budget member of a context. null: the types of the context cannot change
static llama_kv_budget_member * member_of(llama_context * ctx) {
    const auto dyn = ctx ? llama_kv_dynamic::of(*ctx) : nullptr;

    return dyn && dyn->retype ? &dyn->retype->budget : nullptr;
}

llama_memory_budget * llama_memory_budget_init(size_t n_bytes, const ggml_type * types, size_t n_types) {
    for (size_t i = 0; i < n_types; ++i) {
        if (!llama_kv_is_type(types[i])) {
            LLAMA_LOG_ERROR("%s: type %d is not one of KV cells\n", __func__, types[i]);
            return nullptr;
        }
        if (i > 0 && !llama_kv_type_is_smaller(types[i], types[i - 1])) {
            LLAMA_LOG_ERROR("%s: %s is not smaller than %s\n", __func__, ggml_type_name(types[i]), ggml_type_name(types[i - 1]));
            return nullptr;
        }
    }

    try {
        return new llama_memory_budget { { types, types + n_types }, { n_bytes, 0, 0, 0, 0, 0 } };
    } catch (const std::bad_alloc &) {
        LLAMA_LOG_ERROR("%s: not enough host memory\n", __func__);
        return nullptr;
    }
}

void llama_memory_budget_free(llama_memory_budget * budget) {
    delete budget;
}

bool llama_memory_budget_add(llama_memory_budget * budget, llama_context * ctx) {
    auto * member = member_of(ctx);

    return member && member->join(budget);
}

void llama_memory_budget_hold(llama_memory_budget * budget, bool hold) {
    budget->hold = hold;
}

bool llama_memory_budget_set_other(llama_memory_budget * budget, size_t n_bytes, llama_context * ctx) {
    auto & usage = budget->usage;

    const size_t n_bytes_old = usage.other;

    if (usage.n_bytes > 0 && n_bytes > std::max(n_bytes_old, usage.n_bytes)) {
        return false; // more than the budget: changing cells cannot help
    }

    const auto set = [&](size_t n) {
        usage.committed += n - usage.other;
        usage.other      = n;
    };

    set(n_bytes);

    if (const size_t n_bytes_above = budget->n_bytes_above()) {
        budget->n_bytes_reclaimable(n_bytes_above);
    }

    const bool has_room = budget->n_bytes_above() == 0;

    if (n_bytes > n_bytes_old && has_room) {
        return true;
    }

    auto * member = member_of(ctx);

    bool is_made = false;

    try {
        is_made = member && member->has_budget() && member->make_room();
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: no room is made: %s\n", __func__, err.what());
    }

    if (is_made || n_bytes <= n_bytes_old) {
        return true;
    }

    set(n_bytes_old);

    return false;
}

void llama_memory_budget_set_reclaim(llama_memory_budget * budget, size_t (* reclaim)(size_t n_bytes, void * user_data), void * user_data) {
    budget->reclaim      = reclaim;
    budget->reclaim_data = user_data;
}

llama_memory_budget_usage llama_memory_budget_get_usage(const llama_memory_budget * budget) {
    auto res = budget->usage;

    res.reclaimable = budget->n_bytes_reclaimable();
    res.committed  += res.reclaimable;

    return res;
}
