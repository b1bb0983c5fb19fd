// The basis that K and V are stored in
//
// For quantized types most graphs rotate them before they are written and after they are read (n_rot_k and n_rot_v of llama_kv_cache
// say that the types want it). Some graphs never do, and the flags do not tell. So a graph is built with all flags set, and a
// cache is rotated if the matrix of that graph has a use.

#include "llama-kv-dynamic-cache.h"

#include "llama-context.h"

void llama_kv_dynamic::find_rotation() {
    if (is_rotation_known) {
        return;
    }

    try {
        for (auto * cache : caches) {
            cache->begin_find_rotation();
        }

        build_graph(true);
    } catch (...) {
        for (auto * cache : caches) {
            cache->end_find_rotation(nullptr);
        }
        throw;
    }

    for (auto * cache : caches) {
        cache->end_find_rotation(lctx->sched.get());
    }

    is_rotation_known = true;
}

//
// llama_kv_dynamic_cache
//

void llama_kv_dynamic_cache::begin_find_rotation() {
    noted_rot_k = nullptr;
    noted_rot_v = nullptr;

    if (has_types()) {
        init_rot(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0);
    }
}

void llama_kv_dynamic_cache::end_find_rotation(ggml_backend_sched_t sched) {
    // by the scheduler, who has a backend for whatever is in the graph: once it is split, the nodes on a device have copies of their
    // inputs as sources, and not the inputs
    const auto is_in_graph = [&](ggml_tensor * t) {
        return sched && t && ggml_backend_sched_get_tensor_backend(sched, t);
    };

    is_rotated_k = is_in_graph(noted_rot_k);
    is_rotated_v = is_in_graph(noted_rot_v);

    if (has_types()) {
        init_rot(types().first, types().second);
    }
}

void llama_kv_dynamic_cache::init_rot(ggml_type type_k, ggml_type type_v) {
    const auto n_rot_k = kv.n_rot_k;
    const auto n_rot_v = kv.n_rot_v;

    try {
        kv.init_rot(type_k, type_v);
    } catch (...) { // no memory for a matrix
        kv.n_rot_k = n_rot_k;
        kv.n_rot_v = n_rot_v;
        throw;
    }
}

llama_kv_dynamic_cache::rotations llama_kv_dynamic_cache::wanted_blocks(ggml_type type_k, ggml_type type_v) {
    const auto [type_k_cur, type_v_cur] = types();

    init_rot(type_k, type_v);
    const rotations res = { kv.n_rot_k, kv.n_rot_v };
    init_rot(type_k_cur, type_v_cur);

    return res;
}

uint32_t llama_kv_dynamic_cache::turned(uint32_t from, uint32_t to) {
    return from == to ? 0 : from + to;
}
