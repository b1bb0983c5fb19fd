#include "llama-kv-convert.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-fault.h"
#include "llama-kv-layout.h"

#include "ggml-backend.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <vector>

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

void llama_kv_converter::fit() {
    auto * sched = lctx.get_sched();

    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        const size_t size = ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i));

        // a compute buffer holds each element twice in f32: as it was read, and after the rotation
        if (size > 0) {
            n_elements = std::min<int64_t>(n_elements, size/(2*sizeof(float)));
        }
    }
}

void llama_kv_converter::uninterrupted::set(ggml_abort_callback callback, void * data) {
    lctx.set_abort_callback(callback, data);
}

// check whether the lines are whole rows of the tensor
// Such lines are written with ggml_set_rows(), as a batch writes its cells. Every backend supports that for any row.
static bool is_rows(const llama_kv_lines & lines) {
    return lines.stride == ggml_row_size(lines.t->type, lines.n) && lines.offs % lines.stride == 0;
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

        cur = llama_mul_mat_hadamard(ctx, cur, rot);
    }

    idxs = nullptr;
    if (is_rows(to)) {
        idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, to.n_lines);
        ggml_set_input(idxs);
        ggml_set_name(idxs, "kv_convert_idxs");

        const int64_t n_rows = to.rows ? to.t->ne[1]*to.t->ne[2] : to.offs/to.stride + to.n_lines;

        cur = ggml_set_rows(ctx, ggml_view_2d(ctx, to.t, to.n, n_rows, to.stride, 0), cur, idxs);
    } else {
        cur = ggml_cpy(ctx, cur, ggml_view_2d(ctx, to.t, to.n, to.n_lines, to.stride, to.offs));
    }

    ggml_build_forward_expand(res->get_gf(), cur);

    return res->get_gf();
}

bool llama_kv_converter::reserve(const ggml_tensor * like, ggml_type type, uint32_t n_rot) {
    ggml_tensor from = *like;
    ggml_tensor to   = *like;

    llama_kv_set_type(&to, type);

    const int64_t n = std::min(like->ne[1]*like->ne[2], llama_kv_n_lines(like->type, like->ne[0], n_elements));

    auto * sched = lctx.get_sched();

    ggml_backend_sched_reset(sched);

    return !llama_kv_fault_alloc() && ggml_backend_sched_reserve(sched, build(
                { &from, 0, from.nb[1], like->ne[0], n },
                { &to,   0, to.nb[1],   like->ne[0], n }, n_rot));
}

bool llama_kv_converter::compute(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot, const float * matrix) {
    auto * sched = lctx.get_sched();

    ggml_backend_sched_reset(sched);
    ggml_backend_sched_set_eval_callback(sched, nullptr, nullptr); // a batch sets its own callback, which must not see this graph

    ggml_cgraph * gf = build(from, to, n_rot);

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        return false;
    }

    if (rot) {
        ggml_backend_tensor_set(rot, matrix, 0, ggml_nbytes(rot));
    }
    if (idxs) {
        std::vector<int64_t> data(to.n_lines);
        if (to.rows) {
            std::copy_n(to.rows, to.n_lines, data.begin());
        } else {
            std::iota(data.begin(), data.end(), to.offs/to.stride);
        }
        ggml_backend_tensor_set(idxs, data.data(), 0, ggml_nbytes(idxs));
    }

    const bool res = lctx.graph_compute(gf, from.n_lines > 1) == GGML_STATUS_SUCCESS;

    ggml_backend_sched_synchronize(sched);

    return res;
}

void llama_kv_converter::run(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot, const float * matrix) try {
    const int64_t n = llama_kv_n_lines(from.t->type, from.n, n_elements);

    for (int64_t l = 0; l < from.n_lines && !is_failed; l += n) {
        const auto part = [&](const llama_kv_lines & lines) -> llama_kv_lines {
            const size_t offs = lines.offs + (lines.rows ? 0 : l*lines.stride);

            return { lines.t, offs, lines.stride, lines.n, std::min(n, lines.n_lines - l), lines.rows ? lines.rows + l : nullptr };
        };

        is_failed = !compute(part(from), part(to), n_rot, matrix);

        if (is_failed) {
            LLAMA_LOG_ERROR("%s: failed to compute the KV cells in another type\n", __func__);
        }
    }
} catch (const std::exception & err) { // do not throw: some tensors have their new types already, so the next ones must change
    LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
    is_failed = true;
}
