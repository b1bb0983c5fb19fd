// A budget for the KV caches of several contexts, and the types that they step down through to stay within it
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

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-convert.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv.h"

#include <algorithm>
#include <exception>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

struct llama_memory_budget {
    const std::vector<ggml_type> types;

    llama_memory_budget_usage usage; // n_bytes is 0: what there is

    bool hold = false; // fail rather than take the next types
};

// a: smaller cells than b
static bool llama_kv_type_is_smaller(ggml_type a, ggml_type b) {
    return ggml_type_size(a)*ggml_blck_size(b) < ggml_type_size(b)*ggml_blck_size(a);
}

// K and V each take a type where it makes them smaller
static void take_smaller(std::pair<ggml_type, ggml_type> & types, ggml_type type) {
    types.first  = llama_kv_type_is_smaller(type, types.first)  ? type : types.first;
    types.second = llama_kv_type_is_smaller(type, types.second) ? type : types.second;
}

//
// llama_kv_dynamic
//

bool llama_kv_dynamic::set_budget(llama_memory_budget * budget) {
    if (this->budget) {
        this->budget->usage.committed -= std::exchange(n_bytes_accounted, 0);
    }

    this->budget = enabled ? budget : nullptr;

    try {
        account();

        // what the model rules out is told before it is needed. a backend may refuse a type then
        auto next = types();
        for (size_t i = 0; this->budget && next.first != GGML_TYPE_COUNT && i < budget->types.size(); ++i) {
            const auto cur = next;
            take_smaller(next, budget->types[i]);

            const int32_t res = next == cur ? LLAMA_MEMORY_TYPE_OK : check_types(next.first, next.second);
            if (res != LLAMA_MEMORY_TYPE_OK) {
                LLAMA_LOG_WARN("%s: this context cannot have %s and %s: %s\n", __func__,
                        ggml_type_name(next.first), ggml_type_name(next.second), llama_memory_type_reason(res));
            }
        }
    } catch (const std::bad_alloc &) { // none leaves a function of the interface: the next growth counts
    }

    return this->budget != nullptr;
}

size_t llama_kv_dynamic::n_bytes_next(bool ahead, ggml_type type_k, ggml_type type_v) const {
    return std::accumulate(caches.begin(), caches.end(), size_t(0), [&](size_t sum, const auto * cache) {
        return sum + cache->storage->n_bytes(cache->need ? cache->next(ahead) : cache->storage->rows(), type_k, type_v);
    });
}

size_t llama_kv_dynamic::n_bytes_caches() const {
    return std::accumulate(caches.begin(), caches.end(), size_t(0), [](size_t sum, const auto * cache) { return sum + cache->usage().committed; });
}

size_t llama_kv_dynamic::n_bytes_sched() const {
    return std::accumulate(lctx->backend_ptrs.begin(), lctx->backend_ptrs.end(), size_t(0), [this](size_t sum, ggml_backend_t backend) {
        return sum + ggml_backend_sched_get_buffer_size(lctx->sched.get(), backend);
    });
}

size_t llama_kv_dynamic::n_bytes_compute() const {
    const size_t res = n_bytes_sched();

    return res - std::min(res, n_bytes_compute_start.value_or(res));
}

void llama_kv_dynamic::begin_account() {
    if (budget && !n_bytes_compute_start) {
        n_bytes_compute_start = n_bytes_sched();
    }

    account();
}

size_t llama_kv_dynamic::n_bytes_above(size_t n_bytes_caches) const {
    if (!budget || budget->usage.n_bytes == 0) {
        return 0;
    }

    const size_t n_bytes = budget->usage.committed - n_bytes_accounted + n_bytes_caches + n_bytes_compute();

    return n_bytes - std::min(n_bytes, budget->usage.n_bytes);
}

bool llama_kv_dynamic::is_within(size_t n_bytes_caches) const {
    // what the compute buffers need for cells that are there is had, and the cells of another context are not had here
    return n_bytes_caches <= n_bytes_accounted_caches || n_bytes_above(n_bytes_caches) == 0;
}

bool llama_kv_dynamic::fits(bool ahead) const {
    return !budget || is_within(n_bytes_next(ahead, types().first, types().second));
}

void llama_kv_dynamic::account() {
    if (!budget) {
        return;
    }

    n_bytes_accounted_caches = n_bytes_caches();

    const size_t n_bytes = n_bytes_accounted_caches + n_bytes_compute();

    budget->usage.committed += n_bytes - n_bytes_accounted;

    n_bytes_accounted = n_bytes;
}

void llama_kv_dynamic::fit_compute() {
    if (!std::exchange(is_shifted, false) || !budget || lctx->opt_ctx) {
        return;
    }

    account();

    if (n_bytes_above(n_bytes_accounted_caches) > 0) {
        reset_sched();
        account();
    }
}

bool llama_kv_dynamic::step_down(bool is_full) {
    if (!budget || budget->hold || types().first == GGML_TYPE_COUNT) {
        return false;
    }

    auto next = types();

    const size_t n_bytes_old = n_bytes_caches();

    // a growth is held against the budget again when the cells are smaller
    const bool is_growth = any([](const auto * cache) { return cache->need.has_value(); });

    for (const auto type : budget->types) {
        take_smaller(next, type);

        const size_t n_bytes = n_bytes_next(false, next.first, next.second);

        if (next == types() || !(is_full || is_growth ? n_bytes_above(n_bytes) == 0 : is_within(n_bytes))) {
            continue;
        }

        // before the types change, after which there can be no memory to account for it
        const auto first = std::exchange(types_first, types_first.first == GGML_TYPE_COUNT ? types() : types_first);

        const int32_t res = set_types(next.first, next.second);

        if (res != LLAMA_MEMORY_TYPE_OK) {
            LLAMA_LOG_WARN("%s: no %s and %s: %s\n", __func__, ggml_type_name(next.first), ggml_type_name(next.second), llama_memory_type_reason(res));
        }

        if (res != LLAMA_MEMORY_TYPE_OK && res != LLAMA_MEMORY_TYPE_LOST) {
            types_first = first;
        }

        if (res == LLAMA_MEMORY_TYPE_OK) {
            budget->usage.n_down++;

            // without memory beside the cells, nothing goes back: another rung would not help either
            return n_bytes_caches() < n_bytes_old;
        }

        if (res == LLAMA_MEMORY_TYPE_LOST) {
            return false;
        }
    }

    return false;
}

void llama_kv_dynamic::step_up() {
    if (!budget || lctx->opt_ctx || types_first.first == GGML_TYPE_COUNT || any([](const auto * cache) { return cache->usage().n_cells_used > 0; })) {
        return;
    }

    const size_t n_bytes = n_bytes_next(false, types_first.first, types_first.second);

    if (!is_within(n_bytes) && n_bytes_above(n_bytes) > n_bytes_compute()) {
        return; // nor without what the compute buffers have grown by
    }

    // they do not shrink by themselves, and that was for cells that are gone
    new_sched();

    if (is_within(n_bytes) && set_types(types_first.first, types_first.second) == LLAMA_MEMORY_TYPE_OK) {
        types_first = { GGML_TYPE_COUNT, GGML_TYPE_COUNT };
        budget->usage.n_up++;
    } else {
        reset_sched();
    }
}

bool llama_kv_dynamic::follow_budget_of(llama_context & ctx) try {
    auto * dyn = of(ctx);

    if (!dyn || !dyn->budget) {
        return false;
    }

    ctx.synchronize();

    dyn->forget(); // what a batch asked for that did not run
    dyn->step_up();
    dyn->begin_account();

    return dyn->n_bytes_above(dyn->n_bytes_caches()) == 0 || (dyn->step_down(true) && dyn->n_bytes_above(dyn->n_bytes_caches()) == 0);
} catch (const std::exception & err) { // none leaves a function of the interface
    LLAMA_LOG_WARN("%s: no room is made: %s\n", __func__, err.what());
    return false;
}

//
// interface
//

llama_memory_budget * llama_memory_budget_init(size_t n_bytes, const ggml_type * types, size_t n_types) try {
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

    return new llama_memory_budget { { types, types + n_types }, { n_bytes, 0, 0, 0, 0 } };
} catch (const std::bad_alloc &) {
    LLAMA_LOG_ERROR("%s: not enough host memory\n", __func__);
    return nullptr;
}

void llama_memory_budget_free(llama_memory_budget * budget) {
    delete budget;
}

bool llama_memory_budget_add(llama_memory_budget * budget, llama_context * ctx) {
    auto * dyn = ctx ? llama_kv_dynamic::of(*ctx) : nullptr;

    return dyn && dyn->set_budget(budget);
}

void llama_memory_budget_hold(llama_memory_budget * budget, bool hold) {
    budget->hold = hold;
}

bool llama_memory_budget_set_other(llama_memory_budget * budget, size_t n_bytes, llama_context * ctx) {
    auto & usage = budget->usage;

    const size_t n_bytes_old = usage.other;

    if (usage.n_bytes > 0 && n_bytes > std::max(n_bytes_old, usage.n_bytes)) {
        return false; // no cell needs to change for that
    }

    const auto set = [&](size_t n) {
        usage.committed += n - usage.other;
        usage.other      = n;
    };

    set(n_bytes);

    const bool has_room = usage.n_bytes == 0 || usage.committed <= usage.n_bytes;

    if (n_bytes > n_bytes_old && has_room) {
        return true;
    }

    if ((ctx && llama_kv_dynamic::follow_budget_of(*ctx)) || n_bytes <= n_bytes_old) {
        return true;
    }

    set(n_bytes_old);

    return false;
}

llama_memory_budget_usage llama_memory_budget_get_usage(const llama_memory_budget * budget) {
    return budget->usage;
}
