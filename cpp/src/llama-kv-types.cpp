// The types of the cells change while they are in use: llama_set_memory_type()
//
// What stays: positions, cells, rows, the objects of the tensors. What changes: the types and strides of the tensors, where they
// are, and the basis that K and V are stored in (llama-kv-rotation.cpp).
//
// All or nothing: all that can fail comes first, with the tensors saying the new types and holding the old data: a graph may
// not read more of the cells on another backend, the compute buffers have to be there, and, if rows become larger, all of their memory.
// The data is then moved layer by layer and does not fail.

#include "llama-kv-dynamic-cache.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-convert.h"
#include "llama-kv-layout.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

//
// llama_kv_dynamic
//

int32_t llama_kv_dynamic::check_types(ggml_type type_k, ggml_type type_v) const {
    if (!llama_kv_is_type(type_k) || !llama_kv_is_type(type_v)) {
        return LLAMA_MEMORY_TYPE_UNKNOWN;
    }

    // as in llama_kv_dynamic_cache::can_grow(): with --split-mode tensor there are no tensors to be converted one by one
    if (types().first == GGML_TYPE_COUNT || lctx->opt_ctx || lctx->model.split_mode() == LLAMA_SPLIT_MODE_TENSOR ||
            !std::all_of(caches.begin(), caches.end(), [](const auto * cache) { return cache->has_types() || cache->usage().reserved == 0; })) {
        return LLAMA_MEMORY_TYPE_UNSUPPORTED;
    }

    // what llama_init_from_model() refuses
    if (type_k != type_v && (lctx->model.hparams.is_mla() || lctx->model.arch == LLM_ARCH_DEEPSEEK4)) {
        return LLAMA_MEMORY_TYPE_DIFFER;
    }

    if (ggml_is_quantized(type_v) && !lctx->cparams.flash_attn) {
        return LLAMA_MEMORY_TYPE_NEEDS_FA;
    }

    for (const auto * cache : caches) {
        if (const int32_t res = cache->check_types(type_k, type_v)) {
            return res;
        }
    }

    return LLAMA_MEMORY_TYPE_OK;
}

std::unordered_map<const ggml_tensor *, size_t> llama_kv_dynamic::read_elsewhere(ggml_cgraph * gf) const {
    std::unordered_map<const ggml_tensor *, size_t> res;
    for (const auto * cache : caches) {
        for (const ggml_tensor * view : cache->read_elsewhere(gf)) {
            res[view->view_src]++;
        }
    }

    return res;
}

int32_t llama_kv_dynamic::prepare_types(ggml_type type_k, ggml_type type_v) {
    const auto [type_k_old, type_v_old] = types();

    const auto pretend = [this](ggml_type type_k, ggml_type type_v) {
        for (auto * cache : caches) {
            cache->pretend_types(type_k, type_v);
        }
    };

    int32_t res = LLAMA_MEMORY_TYPE_NO_MEMORY;

    try {
        // the scheduler ends the process where it cannot place what writes the cells
        if (!std::all_of(caches.begin(), caches.end(), [&](const auto * cache) { return cache->can_write(lctx->get_sched(), type_k, type_v); })) {
            LLAMA_LOG_WARN("%s: there is no kernel that writes %s and %s where the cells are\n", __func__, ggml_type_name(type_k), ggml_type_name(type_v));
            return LLAMA_MEMORY_TYPE_BACKEND;
        }

        auto n_elsewhere = read_elsewhere(build_graph(true));

        pretend(type_k, type_v);

        ggml_cgraph * gf = build_graph(true);

        const auto n_elsewhere_next = read_elsewhere(gf);

        if (ggml_is_quantized(type_v) && any([&](const auto * cache) { return cache->transposes_v(gf); })) {
            res = LLAMA_MEMORY_TYPE_NEEDS_FA;
        } else if (std::any_of(n_elsewhere_next.begin(), n_elsewhere_next.end(), [&](const auto & next) { return next.second > n_elsewhere[next.first]; })) {
            LLAMA_LOG_WARN("%s: attention over %s and %s would not run where the cells are\n", __func__, ggml_type_name(type_k), ggml_type_name(type_v));
            res = LLAMA_MEMORY_TYPE_BACKEND;
        } else if (reserve_graph()) {
            res = LLAMA_MEMORY_TYPE_OK;
        } else {
            is_sched_lost = true;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
        is_sched_lost = true;
    }

    pretend(type_k_old, type_v_old);

    return res;
}

void llama_kv_dynamic::convert(const std::function<void(llama_kv_converter &)> & f) {
    synchronize();

    lctx->sched_reserve(); // as in set_types()
    find_rotation();

    const llama_kv_converter::uninterrupted scope(*lctx, lctx->abort_callback, lctx->abort_callback_data);

    set_moved(false); // also if a state ends too early

    llama_kv_converter converter(*lctx);
    converter.fit();
    f(converter);

    if (converter.has_failed()) {
        set_sched_lost();
        throw std::runtime_error("failed to convert KV cells");
    }
}

int32_t llama_kv_dynamic::set_types(ggml_type type_k, ggml_type type_v) {
    if (const int32_t res = check_types(type_k, type_v)) {
        return res;
    }

    const auto [type_k_old, type_v_old] = types();

    if (type_k == type_k_old && type_v == type_v_old) {
        return LLAMA_MEMORY_TYPE_OK;
    }

    begin_account();

    const size_t n_bytes_above_old = n_bytes_above(n_bytes_caches());

    const int64_t t_start_us = ggml_time_us();

    const size_t n_bytes_old       = usage().committed;
    const size_t n_bytes_sched_old = n_bytes_sched();

    const llama_kv_converter::uninterrupted scope(*lctx, lctx->abort_callback, lctx->abort_callback_data);

    llama_kv_converter converter(*lctx);

    int32_t res = LLAMA_MEMORY_TYPE_NO_MEMORY;

    try {
        synchronize();

        lctx->sched_reserve(); // if it is due: with adapters that were set, graphs are larger than there is room for now

        // shifts and copies of streams that wait are done as they would have been
        lctx->memory_update(false);
        synchronize();

        find_rotation();

        res = prepare_types(type_k, type_v);

        if (res == LLAMA_MEMORY_TYPE_OK) {
            converter.fit(); // else the compute buffers can be gone
        }

        for (auto * cache : caches) {
            if (res == LLAMA_MEMORY_TYPE_OK && !cache->prepare_types(converter, type_k, type_v)) {
                res = LLAMA_MEMORY_TYPE_NO_MEMORY;
            }
        }

        // with the compute buffers that this takes. what is above already, as it was there before the budget, may get less
        if (res == LLAMA_MEMORY_TYPE_OK && budget && n_bytes_above(n_bytes_next(false, type_k, type_v)) > n_bytes_above_old) {
            LLAMA_LOG_INFO("%s: the budget has no room for %s and %s\n", __func__, ggml_type_name(type_k), ggml_type_name(type_v));
            res = LLAMA_MEMORY_TYPE_NO_MEMORY;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
        res = LLAMA_MEMORY_TYPE_NO_MEMORY;
    }

    for (auto * cache : caches) {
        if (res == LLAMA_MEMORY_TYPE_OK) {
            cache->set_types(converter, type_k, type_v);
        } else {
            cache->storage->forget_types();
        }
    }

    // nothing has changed, which goes for the compute buffers too
    is_sched_lost = is_sched_lost || (res != LLAMA_MEMORY_TYPE_OK && n_bytes_sched() > n_bytes_sched_old);

    if (converter.has_failed()) {
        LLAMA_LOG_ERROR("%s: the device failed, all cells are lost\n", __func__);
        lose_cells();
        is_sched_lost = true;
        res = LLAMA_MEMORY_TYPE_LOST;
    }

    // here as well as where the cells are read from elsewhere. before anything that may throw
    set_moved(true);

    if (res == LLAMA_MEMORY_TYPE_OK) {
        counters.n_retype++;
        counters.t_retype_us += ggml_time_us() - t_start_us;

        // not for all to see otherwise, and it is their precision
        LLAMA_LOG_WARN("%s: requantizing KV cache: K %s -> %s, V %s -> %s (%.2f -> %.2f MiB) in %.0f ms\n", __func__,
                ggml_type_name(type_k_old), ggml_type_name(type_k), ggml_type_name(type_v_old), ggml_type_name(type_v),
                n_bytes_old/1024.0/1024.0, usage().committed/1024.0/1024.0, (ggml_time_us() - t_start_us)/1e3);
    }

    if (is_sched_lost || !reserve(true)) {
        reset_sched();
    }

    account();

    return res;
}

//
// llama_kv_dynamic_cache
//

int32_t llama_kv_dynamic_cache::check_types(ggml_type type_k, ggml_type type_v) const {
    for (const auto & layer : kv.layers) {
        const auto is_split = [](const ggml_tensor * t, ggml_type type, uint32_t n_head) {
            return t && (t->ne[0] % ggml_blck_size(type) != 0 || n_head % ggml_blck_size(type) != 0);
        };

        if (is_split(layer.k, type_k, kv.hparams.n_embd_head_k(layer.il)) || is_split(layer.v, type_v, kv.hparams.n_embd_head_v(layer.il))) {
            return LLAMA_MEMORY_TYPE_BLOCK;
        }
    }

    return LLAMA_MEMORY_TYPE_OK;
}

bool llama_kv_dynamic_cache::can_write(ggml_backend_sched_t sched, ggml_type type_k, ggml_type type_v) const {
    const ggml_context_ptr ctx { ggml_init({ 8*kv.layers.size()*ggml_tensor_overhead(), nullptr, true }) };
    if (!ctx) {
        throw std::bad_alloc();
    }

    const auto can = [&](const ggml_tensor * t, ggml_type type) {
        const ggml_tensor * op = ggml_set_rows(ctx.get(), ggml_new_tensor_2d(ctx.get(), type, t->ne[0], t->ne[1]*t->ne[2]),
                ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, t->ne[0], 1), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 1));

        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);

            if (ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(t->buffer)) && ggml_backend_supports_op(backend, op)) {
                return true;
            }
        }

        return false;
    };

    return std::all_of(kv.layers.begin(), kv.layers.end(), [&](const auto & layer) {
        return can(layer.k, type_k) && (!layer.v || can(layer.v, type_v));
    });
}

void llama_kv_dynamic_cache::pretend_types(ggml_type type_k, ggml_type type_v) {
    for (const auto & layer : kv.layers) {
        llama_kv_storage::set_layout(layer.k, layer.v, layer.k_stream, layer.v_stream, kv.v_trans, [&](ggml_tensor * t, bool) {
            llama_kv_set_type(t, t == layer.k ? type_k : type_v);
        });
    }

    init_rot(type_k, type_v);
}

bool llama_kv_dynamic_cache::transposes_v(ggml_cgraph * gf) const {
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);

        if (node->op == GGML_OP_CONT && std::any_of(kv.layers.begin(), kv.layers.end(), [&](const auto & layer) {
                    return layer.v && node->src[0]->view_src == layer.v;
                })) {
            return true;
        }
    }

    return false;
}

//
// the change
//

bool llama_kv_dynamic_cache::prepare_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v) {
    if (!has_types()) {
        return true;
    }

    const auto [to_k, to_v] = wanted_blocks(type_k, type_v);

    rot_next.k = is_rotated_k ? turned(kv.n_rot_k, to_k) : 0;
    rot_next.v = is_rotated_v ? turned(kv.n_rot_v, to_v) : 0;

    const auto used = n_used();

    const bool is_empty = std::all_of(used.begin(), used.end(), [](uint32_t n) { return n == 0; });

    const bool res = is_empty || std::all_of(kv.layers.begin(), kv.layers.end(), [&](const auto & layer) {
        return converter.reserve(layer.k, type_k, rot_next.k) && (!layer.v || converter.reserve(layer.v, type_v, rot_next.v));
    });

    return res && storage->prepare_types(type_k, type_v, used);
}

void llama_kv_dynamic_cache::set_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v) {
    if (!has_types()) {
        return;
    }

    const auto convert = [&](const llama_kv_lines & from, const llama_kv_lines & to, bool is_v) {
        const uint32_t n_rot = is_v ? rot_next.v : rot_next.k;

        converter.run(from, to, n_rot, rot_matrix(n_rot));
    };

    if (!storage->set_types(convert)) {
        converter.set_failed();
    }
    storage->moved(); // the context knows

    init_rot(type_k, type_v);
}

//
// interface
//

int32_t llama_kv_dynamic::set_types_of(llama_context & ctx, ggml_type type_k, ggml_type type_v) {
    auto * dyn = of(ctx);

    if (!dyn) {
        return LLAMA_MEMORY_TYPE_UNSUPPORTED;
    }

    ctx.synchronize();

    int32_t res = LLAMA_MEMORY_TYPE_NO_MEMORY;

    try {
        dyn->forget(); // what a batch asked for that did not run
        res = dyn->set_types(type_k, type_v);
    } catch (const std::bad_alloc &) { // to account for it: before anything has changed, or when all has
        if (dyn->types() == std::make_pair(type_k, type_v)) {
            res = LLAMA_MEMORY_TYPE_OK;
        }
    }

    if (res == LLAMA_MEMORY_TYPE_OK) {
        dyn->types_first = { GGML_TYPE_COUNT, GGML_TYPE_COUNT }; // nothing to step up to: it was wanted so
    }

    return res;
}

int32_t llama_set_memory_type(llama_context * ctx, ggml_type type_k, ggml_type type_v) {
    const int32_t res = llama_kv_dynamic::set_types_of(*ctx, type_k, type_v);

    if (res != LLAMA_MEMORY_TYPE_OK) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, llama_memory_type_reason(res));
    }

    return res;
}

void llama_get_memory_type(const llama_context * ctx, ggml_type * type_k, ggml_type * type_v) {
    const auto * dyn = llama_kv_dynamic::of(*ctx);

    std::tie(*type_k, *type_v) = dyn ? dyn->types() : std::make_pair(GGML_TYPE_COUNT, GGML_TYPE_COUNT);
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
