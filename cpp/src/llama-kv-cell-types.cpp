#include "llama-kv-cell-types.h"

#include "llama-hparams.h"
#include "llama-kv-convert.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"
#include "llama-kv-graph.h"
#include "llama-kv-layout.h"
#include "llama-kv-retype.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <new>
#include <utility>

llama_kv_cell_types::llama_kv_cell_types(llama_kv_dynamic_cache & cache, const llama_hparams & hparams, bool v_trans, rotation rot) :
    foreign(*this), cache(cache), hparams(hparams), v_trans(v_trans), layers(cache.layers()), rot(std::move(rot)) {
}

//
// checks
//

int32_t llama_kv_cell_types::check_types(ggml_type type_k, ggml_type type_v) const {
    for (const auto & layer : layers) {
        const auto is_split = [](const ggml_tensor * t, ggml_type type, uint32_t n_head) {
            return t && (t->ne[0] % ggml_blck_size(type) != 0 || n_head % ggml_blck_size(type) != 0);
        };

        if (is_split(layer.k, type_k, hparams.n_embd_head_k(layer.il)) || is_split(layer.v, type_v, hparams.n_embd_head_v(layer.il))) {
            return LLAMA_MEMORY_TYPE_BLOCK;
        }
    }

    return LLAMA_MEMORY_TYPE_OK;
}

bool llama_kv_cell_types::can_write(ggml_backend_sched_t sched, ggml_type type_k, ggml_type type_v) const {
    const ggml_context_ptr ctx { ggml_init({ 8*layers.size()*ggml_tensor_overhead(), nullptr, true }) };
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

    return std::all_of(layers.begin(), layers.end(), [&](const auto & layer) {
        return can(layer.k, type_k) && (!layer.v || can(layer.v, type_v));
    });
}

std::unordered_set<const ggml_tensor *> llama_kv_cell_types::read_elsewhere(ggml_cgraph * gf) const {
    return llama_kv_views_read_elsewhere(gf, layers);
}

bool llama_kv_cell_types::transposes_v(ggml_cgraph * gf) const {
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);

        if (node->op == GGML_OP_CONT && std::any_of(layers.begin(), layers.end(), [&](const auto & layer) {
                    return layer.v && node->src[0]->view_src == layer.v;
                })) {
            return true;
        }
    }

    return false;
}

//
// the basis
//

void llama_kv_cell_types::init_rot(ggml_type type_k, ggml_type type_v, bool force) {
    const auto n_rot_k = rot.n_rot_k;
    const auto n_rot_v = rot.n_rot_v;

    try {
        rot.init(type_k, type_v, force);
    } catch (...) { // there was no memory for a matrix
        rot.n_rot_k = n_rot_k;
        rot.n_rot_v = n_rot_v;
        throw;
    }
}

void llama_kv_cell_types::prepare_shift() {
    if (cache.dyn && cache.has_types() && ggml_is_quantized(cache.cell_types().first)) {
        cache.dyn->retype->find_rotation();
    }
}

void llama_kv_cell_types::begin_find_rotation() {
    noted_rot_k = nullptr;
    noted_rot_v = nullptr;

    if (cache.has_types()) {
        init_rot(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, true); // force: a state can be rotated although the cells are not
    }
}

void llama_kv_cell_types::end_find_rotation(ggml_backend_sched_t sched) {
    // A tensor is in the graph if the scheduler has a backend for the tensor. The sources of the nodes do not show this: after
    // the split, a node on a device has copies of the inputs as its sources.
    const auto is_in_graph = [&](ggml_tensor * t) {
        return sched && t && ggml_backend_sched_get_tensor_backend(sched, t);
    };

    is_rotated_k = is_in_graph(noted_rot_k);
    is_rotated_v = is_in_graph(noted_rot_v);

    if (cache.has_types()) {
        const auto [type_k, type_v] = cache.cell_types();

        init_rot(type_k, type_v);
    }
}

std::pair<uint32_t, uint32_t> llama_kv_cell_types::wanted_rots(ggml_type type_k, ggml_type type_v, bool force) {
    const auto [type_k_cur, type_v_cur] = cache.cell_types();

    init_rot(type_k, type_v, force);
    const std::pair<uint32_t, uint32_t> res = { rot.n_rot_k, rot.n_rot_v };
    init_rot(type_k_cur, type_v_cur);

    return res;
}

uint32_t llama_kv_cell_types::wanted_rot(bool is_v, ggml_type type_k, ggml_type type_v, bool force) {
    const auto res = wanted_rots(type_k, type_v, force);

    return is_v ? res.second : res.first;
}

uint32_t llama_kv_cell_types::rotation_to_now(bool is_v, uint32_t from) const {
    return (is_v ? is_rotated_v : is_rotated_k) ? rotation_delta(from, n_rot(is_v)) : 0;
}

uint32_t llama_kv_cell_types::rotation_delta(uint32_t from, uint32_t to) {
    return from == to ? 0 : from + to;
}

//
// the change
//

void llama_kv_cell_types::pretend_types(ggml_type type_k, ggml_type type_v) {
    for (const auto & layer : layers) {
        llama_kv_storage::set_layout(layer, v_trans, [&](ggml_tensor * t, bool) {
            llama_kv_set_type(t, t == layer.k ? type_k : type_v);
        });
    }

    init_rot(type_k, type_v);
}

bool llama_kv_cell_types::prepare_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v) {
    if (!cache.has_types()) {
        return true;
    }

    const auto [to_k, to_v] = wanted_rots(type_k, type_v);

    next.n_rot_k = is_rotated_k ? rotation_delta(rot.n_rot_k, to_k) : 0;
    next.n_rot_v = is_rotated_v ? rotation_delta(rot.n_rot_v, to_v) : 0;

    const auto used = cache.n_used();

    const bool is_empty = std::all_of(used.begin(), used.end(), [](uint32_t n) { return n == 0; });

    const bool res = is_empty || std::all_of(layers.begin(), layers.end(), [&](const auto & layer) {
        return converter.reserve(layer.k, type_k, next.n_rot_k) && (!layer.v || converter.reserve(layer.v, type_v, next.n_rot_v));
    });

    return res && cache.storage().prepare_types(type_k, type_v, used);
}

void llama_kv_cell_types::set_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v) {
    if (!cache.has_types()) {
        return;
    }

    const auto convert = [&](const llama_kv_lines & from, const llama_kv_lines & to, bool is_v) {
        const uint32_t n_rot = is_v ? next.n_rot_v : next.n_rot_k;

        converter.run(from, to, n_rot, rot_matrix(n_rot));
    };

    if (!cache.storage().set_types(convert)) {
        converter.set_failed();
    }
    cache.storage().moved(); // reset the flag, because the context already knows that the tensors have moved

    init_rot(type_k, type_v);
}
