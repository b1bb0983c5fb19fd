#include "llama-kv-retype.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-budget-member.h"
#include "llama-kv-cell-types.h"
#include "llama-kv-convert.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <tuple>

std::pair<ggml_type, ggml_type> llama_kv_retype::types() const {
    for (const auto * cache : dyn.caches()) {
        if (cache->has_types()) {
            return cache->cell_types();
        }
    }

    return { GGML_TYPE_COUNT, GGML_TYPE_COUNT };
}

int32_t llama_kv_retype::check_types(ggml_type type_k, ggml_type type_v) const {
    if (!llama_kv_is_type(type_k) || !llama_kv_is_type(type_v)) {
        return LLAMA_MEMORY_TYPE_UNKNOWN;
    }

    const auto & caches = dyn.caches();
    const auto & model  = dyn.lctx.get_model();

    // With --split-mode tensor, there are no tensors that can be converted one by one. llama_kv_dynamic_cache::can_grow() checks
    // the same.
    if (types().first == GGML_TYPE_COUNT || dyn.compute.is_training() || model.split_mode() == LLAMA_SPLIT_MODE_TENSOR ||
            !std::all_of(caches.begin(), caches.end(), [](const auto * cache) { return cache->has_types() || cache->usage().reserved == 0; })) {
        return LLAMA_MEMORY_TYPE_UNSUPPORTED;
    }

    // for these models, llama_init_from_model() refuses a type of V that differs from the type of K
    if (type_k != type_v && (model.hparams.is_mla() || model.arch == LLM_ARCH_DEEPSEEK4)) {
        return LLAMA_MEMORY_TYPE_DIFFER;
    }

    if (ggml_is_quantized(type_v) && !dyn.lctx.get_cparams().flash_attn) {
        return LLAMA_MEMORY_TYPE_NEEDS_FA;
    }

    for (const auto * cache : caches) {
        if (const int32_t res = cache->types->check_types(type_k, type_v)) {
            return res;
        }
    }

    return LLAMA_MEMORY_TYPE_OK;
}

std::unordered_map<const ggml_tensor *, size_t> llama_kv_retype::read_elsewhere(ggml_cgraph * gf) const {
    std::unordered_map<const ggml_tensor *, size_t> res;
    for (const auto * cache : dyn.caches()) {
        for (const ggml_tensor * view : cache->types->read_elsewhere(gf)) {
            res[view->view_src]++;
        }
    }

    return res;
}

void llama_kv_retype::find_rotation() {
    if (is_rotation_known) {
        return;
    }

    try {
        for (auto * cache : dyn.caches()) {
            cache->types->begin_find_rotation();
        }

        dyn.compute.build_graph(true);
    } catch (...) {
        for (auto * cache : dyn.caches()) {
            cache->types->end_find_rotation(nullptr);
        }
        throw;
    }

    for (auto * cache : dyn.caches()) {
        cache->types->end_find_rotation(dyn.lctx.get_sched());
    }

    is_rotation_known = true;
}

int32_t llama_kv_retype::prepare_types(ggml_type type_k, ggml_type type_v) {
    const auto [type_k_old, type_v_old] = types();

    const auto & caches = dyn.caches();

    const auto pretend = [&](ggml_type type_k, ggml_type type_v) {
        for (auto * cache : caches) {
            cache->types->pretend_types(type_k, type_v);
        }
    };

    int32_t res = LLAMA_MEMORY_TYPE_NO_MEMORY;

    try {
        // The scheduler ends the process if no backend supports the operation that writes the cells. So check that before a graph
        // is built.
        if (!std::all_of(caches.begin(), caches.end(), [&](const auto * cache) { return cache->types->can_write(dyn.lctx.get_sched(), type_k, type_v); })) {
            LLAMA_LOG_WARN("%s: there is no kernel that writes %s and %s where the cells are\n", __func__, ggml_type_name(type_k), ggml_type_name(type_v));
            return LLAMA_MEMORY_TYPE_BACKEND;
        }

        auto n_elsewhere = read_elsewhere(dyn.compute.build_graph(true));

        pretend(type_k, type_v);

        ggml_cgraph * gf = dyn.compute.build_graph(true);

        const auto n_elsewhere_next = read_elsewhere(gf);

        if (ggml_is_quantized(type_v) && dyn.any([&](const auto * cache) { return cache->types->transposes_v(gf); })) {
            res = LLAMA_MEMORY_TYPE_NEEDS_FA;
        } else if (std::any_of(n_elsewhere_next.begin(), n_elsewhere_next.end(), [&](const auto & next) { return next.second > n_elsewhere[next.first]; })) {
            LLAMA_LOG_WARN("%s: attention over %s and %s would not run where the cells are\n", __func__, ggml_type_name(type_k), ggml_type_name(type_v));
            res = LLAMA_MEMORY_TYPE_BACKEND;
        } else if (dyn.compute.reserve_graph()) {
            res = LLAMA_MEMORY_TYPE_OK;
        } else {
            dyn.compute.set_lost();
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
        dyn.compute.set_lost();
    }

    pretend(type_k_old, type_v_old);

    return res;
}

void llama_kv_retype::convert(const std::function<void(llama_kv_converter &)> & f) {
    auto & lctx = dyn.lctx;

    dyn.synchronize();

    lctx.sched_reserve(); // adapters that were set since the last reservation may need larger graphs, as in set_types()
    find_rotation();

    const llama_kv_converter::uninterrupted scope(lctx, dyn.compute.abort_callback(), dyn.compute.abort_callback_data());

    dyn.set_moved(false); // graphs must be built again, even if the restore of a state ends early

    llama_kv_converter converter(lctx);
    converter.fit();
    f(converter);

    if (converter.has_failed()) {
        dyn.compute.set_lost();
        dyn.usage.count_no_memory(); // the conversion had no memory, or the device failed
        throw std::runtime_error("failed to convert KV cells");
    }
}

int32_t llama_kv_retype::set_types(ggml_type type_k, ggml_type type_v) {
    if (const int32_t res = check_types(type_k, type_v)) {
        return res;
    }

    const auto [type_k_old, type_v_old] = types();

    if (type_k == type_k_old && type_v == type_v_old) {
        return LLAMA_MEMORY_TYPE_OK;
    }

    auto & lctx    = dyn.lctx;
    auto & compute = dyn.compute;

    budget.begin_account();

    const size_t n_bytes_above_old = budget.n_bytes_above();

    const int64_t t_start_us = ggml_time_us();

    const size_t n_bytes_old         = dyn.usage.total().committed;
    const size_t n_bytes_compute_old = compute.n_bytes();

    const llama_kv_converter::uninterrupted scope(lctx, compute.abort_callback(), compute.abort_callback_data());

    llama_kv_converter converter(lctx);

    int32_t res = LLAMA_MEMORY_TYPE_NO_MEMORY;

    try {
        dyn.synchronize();

        // reserve the compute buffers now if that is due: adapters that were set since the last reservation need larger graphs
        lctx.sched_reserve();

        // do the pending K-shifts and stream copies with the old types, as if the types did not change
        lctx.memory_update(false);
        dyn.synchronize();

        find_rotation();

        res = prepare_types(type_k, type_v);

        if (res == LLAMA_MEMORY_TYPE_OK) {
            // limit the conversion to the existing compute buffers, because a failed allocation of larger ones would lose them
            converter.fit();
        }

        for (auto * cache : dyn.caches()) {
            if (res == LLAMA_MEMORY_TYPE_OK && !cache->types->prepare_types(converter, type_k, type_v)) {
                res = LLAMA_MEMORY_TYPE_NO_MEMORY;
            }
        }

        // check the budget with the compute buffers that the change needs. A context that was above its budget before the change
        // may stay above it, but must not exceed it by more
        if (res == LLAMA_MEMORY_TYPE_OK) {
            budget.reclaim(budget.n_bytes_above_in(type_k, type_v));
        }
        if (res == LLAMA_MEMORY_TYPE_OK && budget.has_budget() && budget.n_bytes_above_in(type_k, type_v) > n_bytes_above_old) {
            LLAMA_LOG_INFO("%s: the budget has no room for %s and %s\n", __func__, ggml_type_name(type_k), ggml_type_name(type_v));
            res = LLAMA_MEMORY_TYPE_NO_MEMORY;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
        res = LLAMA_MEMORY_TYPE_NO_MEMORY;
    }

    for (auto * cache : dyn.caches()) {
        if (res == LLAMA_MEMORY_TYPE_OK) {
            cache->types->set_types(converter, type_k, type_v);
        } else {
            cache->storage().forget_types();
        }
    }

    // The change failed and must leave nothing behind, so the larger compute buffers are freed as well.
    if (res != LLAMA_MEMORY_TYPE_OK && compute.n_bytes() > n_bytes_compute_old) {
        compute.set_lost();
    }

    if (converter.has_failed()) {
        LLAMA_LOG_ERROR("%s: the device failed, all cells are lost\n", __func__);
        dyn.lost.lose(lctx);
        compute.set_lost();
        res = LLAMA_MEMORY_TYPE_LOST;
    }

    // Graphs must be built again, also after a failure. Set this flag before a call that may throw.
    dyn.set_moved(true);

    if (res == LLAMA_MEMORY_TYPE_OK) {
        const int64_t t_us = ggml_time_us() - t_start_us;

        dyn.usage.count_retype(t_us);

        // Log a warning instead of an info, because the precision of the cells has changed and nothing else shows that.
        LLAMA_LOG_WARN("%s: requantizing KV cache: K %s -> %s, V %s -> %s (%.2f -> %.2f MiB) in %.0f ms\n", __func__,
                ggml_type_name(type_k_old), ggml_type_name(type_k), ggml_type_name(type_v_old), ggml_type_name(type_v),
                n_bytes_old/1024.0/1024.0, dyn.usage.total().committed/1024.0/1024.0, (ggml_time_us() - t_start_us)/1e3);
    }

    if (compute.is_lost() || !compute.reserve(true)) {
        compute.reset_sched();
    }

    budget.account();

    return res;
}

//
// C interface
//

int32_t llama_set_memory_type(llama_context * ctx, ggml_type type_k, ggml_type type_v) {
    const auto dyn = llama_kv_dynamic::of(*ctx);

    int32_t res = LLAMA_MEMORY_TYPE_UNSUPPORTED;

    if (dyn && dyn->retype) {
        ctx->synchronize();

        try {
            dyn->forget(); // forget the rows that were requested for a batch that did not run
            res = dyn->retype->set_types(type_k, type_v);
        } catch (const std::bad_alloc &) {
            // There was no memory to count the bytes, either before the first change or after the last change. So compare the
            // types, to find out whether the change is complete.
            res = dyn->retype->types() == std::make_pair(type_k, type_v) ? LLAMA_MEMORY_TYPE_OK : LLAMA_MEMORY_TYPE_NO_MEMORY;
        }

        if (res == LLAMA_MEMORY_TYPE_OK) {
            dyn->retype->budget.forget_first_types();
        }
    }

    if (res != LLAMA_MEMORY_TYPE_OK) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, llama_memory_type_reason(res));
    }

    return res;
}

void llama_get_memory_type(const llama_context * ctx, ggml_type * type_k, ggml_type * type_v) {
    const auto dyn = llama_kv_dynamic::of(*ctx);

    std::tie(*type_k, *type_v) = dyn && dyn->retype ? dyn->retype->types() : std::make_pair(GGML_TYPE_COUNT, GGML_TYPE_COUNT);
}

const char * llama_memory_type_reason(int32_t result) {
    switch (result) {
        case LLAMA_MEMORY_TYPE_OK:          return "done";
        case LLAMA_MEMORY_TYPE_UNKNOWN:     return "not a type of KV cells";
        case LLAMA_MEMORY_TYPE_NEEDS_FA:    return "a quantized V needs flash attention";
        case LLAMA_MEMORY_TYPE_DIFFER:      return "K and V cannot have different types in this model";
        case LLAMA_MEMORY_TYPE_BLOCK:       return "the block size of the type does not divide the size of a head";
        case LLAMA_MEMORY_TYPE_UNSUPPORTED: return "there are no KV cells here that could change their type";
        case LLAMA_MEMORY_TYPE_BACKEND:     return "the device of a layer cannot compute attention over this type";
        case LLAMA_MEMORY_TYPE_NO_MEMORY:   return "not enough memory";
        case LLAMA_MEMORY_TYPE_LOST:        return "the device failed, and all cells are empty";
        default:                            return "unknown";
    }
}
