#include "llama-kv-convert.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-compat.h"
#include "llama-kv-fault.h"

#include "ggml-backend.h"

#include <algorithm>

bool llama_kv_is_type(int32_t type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_IQ4_NL: return true;
        default:               return false;
    }
}

void llama_kv_converter::uninterrupted::set(ggml_abort_callback callback, void * data) {
    lctx.set_abort_callback(callback, data);
}

ggml_cgraph * llama_kv_converter::build(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot) {
    auto * res = lctx.get_gf_res_reserve();
    res->reset();

    ggml_context * ctx = res->get_ctx();

    ggml_tensor * cur = ggml_view_2d(ctx, from.t, from.n, from.n_lines, from.stride, from.offs);

    cur = ggml_cast(ctx, cur, GGML_TYPE_F32);

    rot = nullptr;
    if (n_rot > 0) {
        rot = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_rot, n_rot);
        ggml_set_input(rot);
        ggml_set_name(rot, "kv_convert_rot");

        cur = llama_kv_compat_hadamard(ctx, cur, rot, 0);
    }

    cur = ggml_cpy(ctx, cur, ggml_view_2d(ctx, to.t, to.n, to.n_lines, to.stride, to.offs));

    ggml_build_forward_expand(res->get_gf(), cur);

    return res->get_gf();
}

bool llama_kv_converter::reserve(const ggml_tensor * like, ggml_type type, uint32_t n_rot) {
    ggml_tensor from = *like;
    ggml_tensor to   = *like;

    to.type  = type;
    to.nb[0] = ggml_type_size(type);
    to.nb[1] = ggml_row_size(type, to.ne[0]);
    to.nb[2] = to.nb[1]*to.ne[1];
    to.nb[3] = to.nb[2]*to.ne[2];

    const int64_t n_lines = std::min(like->ne[1]*like->ne[2], std::max<int64_t>(1, LLAMA_KV_CONVERT_ELEMENTS/like->ne[0]));

    auto * sched = lctx.get_sched();

    ggml_backend_sched_reset(sched);

    return !llama_kv_fault_alloc() && ggml_backend_sched_reserve(sched, build(
                { &from, 0, from.nb[1], like->ne[0], n_lines },
                { &to,   0, to.nb[1],   like->ne[0], n_lines }, n_rot));
}

void llama_kv_converter::run(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot, const float * matrix) {
    if (is_failed) {
        return;
    }

    auto * sched = lctx.get_sched();

    ggml_backend_sched_reset(sched);
    ggml_backend_sched_set_eval_callback(sched, nullptr, nullptr); // each batch sets its own

    ggml_cgraph * gf = build(from, to, n_rot);

    is_failed = !ggml_backend_sched_alloc_graph(sched, gf);

    if (!is_failed) {
        if (rot) {
            ggml_backend_tensor_set(rot, matrix, 0, ggml_nbytes(rot));
        }

        is_failed = lctx.graph_compute(gf, from.n_lines > 1) != GGML_STATUS_SUCCESS;

        ggml_backend_sched_synchronize(sched);
    }

    if (is_failed) {
        LLAMA_LOG_ERROR("%s: failed to compute the KV cells in another type\n", __func__);
    }
}
