// The scheduler of a context and its compute buffers, which follow the cache

#include "llama-kv-dynamic.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-fault.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <exception>

void llama_kv_dynamic::synchronize() const {
    if (lctx->get_sched()) {
        ggml_backend_sched_synchronize(lctx->get_sched());
    }

    for (const auto & reader : readers) {
        if (const auto dyn = reader.lock()) {
            dyn->synchronize();
        }
    }
}

ggml_cgraph * llama_kv_dynamic::build_graph(bool split_only) {
    const uint32_t n_seqs    = lctx->cparams.n_seq_max;
    const uint32_t n_tokens  = std::min(lctx->cparams.n_ctx, lctx->cparams.n_ubatch);
    const uint32_t n_outputs = std::min<uint32_t>(n_tokens, lctx->cparams.n_outputs_max);

    const auto mctx = lctx->memory->init_full();

    // see [TAG_RESERVE_DIAG_DECAY] in llama_context::sched_reserve()
    const uint32_t n_seqs_worst = lctx->model.arch == LLM_ARCH_KIMI_LINEAR || lctx->model.arch == LLM_ARCH_MINIMAX_01 ? 1 : n_seqs;

    return lctx->graph_reserve(n_tokens, n_seqs_worst, n_outputs, mctx.get(), split_only);
}

bool llama_kv_dynamic::reserve_graph() {
    if (llama_kv_fault_alloc() || !build_graph(false)) {
        return false;
    }

    for (size_t i = 0; i < lctx->backend_ptrs.size(); ++i) {
        lctx->backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(lctx->sched.get(), lctx->backend_ptrs[i]);
    }

    return true;
}

bool llama_kv_dynamic::reserve(bool last) {
    // in place the tensors stay as they are. before the first batch there is nothing that would have to follow
    if (!is_larger || lctx->sched_need_reserve) {
        is_larger = false;
        return true;
    }

    try {
        bool ok = reserve_graph();

        if (!ok && last && !llama_kv_fault_alloc()) {
            lctx->sched_need_reserve = true;
            lctx->sched_reserve();
            ok = true;
        }

        if (ok) {
            is_larger     = false;
            is_sched_lost = false;
            return true;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
    }

    LLAMA_LOG_WARN("%s: failed to reserve the compute buffers for the larger KV cache\n", __func__);

    is_sched_lost = true;

    return false;
}

void llama_kv_dynamic::reset_graphs() {
    for (auto & res : lctx->gf_res_prev) {
        if (res) {
            res->reset();
        }
    }
}

void llama_kv_dynamic::new_sched() {
    synchronize(); // a batch that nobody has read may still use the compute buffers

    const uint32_t n_tokens = std::min(lctx->cparams.n_ctx, lctx->cparams.n_ubatch);

    lctx->sched.reset(ggml_backend_sched_new(lctx->backend_ptrs.data(), lctx->backend_buft.data(), lctx->backend_ptrs.size(),
                lctx->graph_max_nodes(n_tokens), lctx->cparams.pipeline_parallel, lctx->cparams.op_offload));

    // the cache of experts sees the copies of the scheduler
    ggml_backend_sched_set_copy_callback(lctx->sched.get(), llama_context::sched_copy_experts, lctx);

    reset_graphs();
}

void llama_kv_dynamic::reset_sched() {
    new_sched();

    is_sched_lost = false;
    is_larger     = false;

    try {
        lctx->sched_reserve(); // what is due has to come before

        if (reserve_graph()) {
            return;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
    }

    LLAMA_LOG_WARN("%s: failed to reserve the compute buffers for what is left of the KV cache\n", __func__);

    // a reservation that failed leaves the scheduler without the buffers that it has given out
    new_sched();
}
