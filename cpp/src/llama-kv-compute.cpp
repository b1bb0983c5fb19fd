#include "llama-kv-compute.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-fault.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <exception>

bool llama_kv_compute::is_training() const {
    return lctx.opt_ctx;
}

ggml_abort_callback llama_kv_compute::abort_callback() const {
    return lctx.abort_callback;
}

void * llama_kv_compute::abort_callback_data() const {
    return lctx.abort_callback_data;
}

void llama_kv_compute::synchronize() const {
    if (lctx.get_sched()) {
        ggml_backend_sched_synchronize(lctx.get_sched());
    }
}

ggml_cgraph * llama_kv_compute::build_graph(bool split_only) {
    const uint32_t n_seqs    = lctx.cparams.n_seq_max;
    const uint32_t n_tokens  = std::min(lctx.cparams.n_ctx, lctx.cparams.n_ubatch);
    const uint32_t n_outputs = std::min<uint32_t>(n_tokens, lctx.cparams.n_outputs_max);

    const auto mctx = lctx.memory->init_full();

    // see [TAG_RESERVE_DIAG_DECAY] in llama_context::sched_reserve()
    const uint32_t n_seqs_worst = lctx.model.arch == LLM_ARCH_KIMI_LINEAR || lctx.model.arch == LLM_ARCH_MINIMAX_01 ? 1 : n_seqs;

    return lctx.graph_reserve(n_tokens, n_seqs_worst, n_outputs, mctx.get(), split_only);
}

void llama_kv_compute::drop_graphs() {
    for (auto & res : lctx.gf_res_prev) {
        if (res) {
            res->reset();
        }
    }
}

bool llama_kv_compute::reserve_graph() {
    if (llama_kv_fault_alloc() || !build_graph(false)) {
        return false;
    }

    for (size_t i = 0; i < lctx.backend_ptrs.size(); ++i) {
        lctx.backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(lctx.sched.get(), lctx.backend_ptrs[i]);
    }

    return true;
}

bool llama_kv_compute::reserve(bool last) {
    // Return if the compute buffers are large enough. This is always so after a growth in place, which does not move the
    // tensors. Also return before the first batch, which reserves the first compute buffers itself.
    if (!too_small || lctx.sched_need_reserve) {
        too_small = false;
        return true;
    }

    try {
        bool ok = reserve_graph();

        if (!ok && last && !llama_kv_fault_alloc()) {
            lctx.sched_need_reserve = true;
            lctx.sched_reserve();
            ok = true;
        }

        if (ok) {
            too_small = false;
            lost      = false;
            return true;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
    }

    LLAMA_LOG_WARN("%s: failed to reserve the compute buffers for the larger KV cache\n", __func__);

    lost = true;

    return false;
}

void llama_kv_compute::create_sched() {
    synchronize(); // a batch whose results were not read yet may still use the compute buffers

    const uint32_t n_tokens = std::min(lctx.cparams.n_ctx, lctx.cparams.n_ubatch);

    lctx.sched.reset(ggml_backend_sched_new(lctx.backend_ptrs.data(), lctx.backend_buft.data(), lctx.backend_ptrs.size(),
                lctx.graph_max_nodes(n_tokens), lctx.cparams.pipeline_parallel, lctx.cparams.op_offload));

    // call back for each copy that the scheduler makes, because the cache of MoE experts must see these copies
    ggml_backend_sched_set_copy_callback(lctx.sched.get(), llama_context::sched_copy_experts, &lctx);

    drop_graphs();
}

void llama_kv_compute::reset_sched() {
    create_sched();

    lost      = false;
    too_small = false;

    try {
        lctx.sched_reserve(); // a pending reservation must run first

        if (reserve_graph()) {
            return;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
    }

    LLAMA_LOG_WARN("%s: failed to reserve the compute buffers for what is left of the KV cache\n", __func__);

    // A failed reservation leaves the scheduler without its buffers, but tensors still point to them. So create a new scheduler.
    create_sched();
}

size_t llama_kv_compute::n_bytes() const {
    size_t res = 0;

    for (ggml_backend_t backend : lctx.backend_ptrs) {
        res += ggml_backend_sched_get_buffer_size(lctx.sched.get(), backend);
    }

    return res;
}
