#include "server-pool-capacity.h"

#include "llama-kv.h"

#include <algorithm>
#include <cstddef>

server_pool_capacity::server_pool_capacity(const common_params & params, const server_contexts & ctxs, const server_conversations & conversations)
    : params(params), ctxs(ctxs), conversations(conversations) {}

int32_t server_pool_capacity::n_cells_max(bool ignore_draft) const {
    const auto usage = llama_get_memory_usage(ctxs.ctx_tgt);

    if (params.kv_budget_mib == 0 || usage.n_cells_max == 0) {
        return usage.n_cells_max;
    }

    const auto budget = llama_memory_budget_get_usage(params.kv_budget.get());

    double size_cell = double(usage.reserved)/usage.n_cells_max;
    size_t n_states  = 0; // bytes of recurrent states, which the budget does not count

    if (llama_model_is_hybrid(ctxs.model_tgt)) {
        if (usage.n_cells >= usage.n_cells_max || usage.committed >= usage.reserved) {
            return usage.n_cells_max;
        }
        size_cell = double(usage.reserved - usage.committed)/(usage.n_cells_max - usage.n_cells);
        n_states  = usage.reserved - std::min<double>(usage.reserved, usage.n_cells_max*size_cell);
    }

    // with `--cache-ram budget`, a growth of the cells can reclaim the memory of the entries in RAM. It cannot reclaim the
    // memory of paused requests and of the checkpoints of the slots
    size_t n_others = budget.other;
    if (!ignore_draft) {
        const size_t n_cells = usage.committed - std::min(usage.committed, n_states);
        const size_t n_fixed = budget.committed - budget.reclaimable;

        n_others = n_fixed - std::min(n_fixed, n_cells) + std::min(budget.reclaimable, conversations.n_bytes_of_slots());
    }
    const size_t n_bytes  = budget.n_bytes - std::min(budget.n_bytes, n_others);

    return std::min<double>(usage.n_cells_max, n_bytes/(size_cell*type_ratio()));
}

bool server_pool_capacity::is_too_small(int32_t n_tokens) const {
    return is_too_small(n_tokens, n_cells_max(true));
}

bool server_pool_capacity::is_too_small(int32_t n_tokens, int32_t n_max) const {
    return params.kv_budget_mib > 0 && n_tokens > n_max && n_max > 0 &&
        !llama_model_is_recurrent(ctxs.model_tgt) && !llama_model_is_hybrid(ctxs.model_tgt);
}

double server_pool_capacity::type_ratio() const {
    const auto size = [](ggml_type type) { return double(ggml_type_size(type))/ggml_blck_size(type); };

    ggml_type type_k = GGML_TYPE_COUNT;
    ggml_type type_v = GGML_TYPE_COUNT;
    llama_get_memory_type(ctxs.ctx_tgt, &type_k, &type_v);

    const auto & types = params.kv_auto_quant;
    if (types.empty() || type_k == GGML_TYPE_COUNT) {
        return 1.0;
    }

    const double last = size(types.back());

    return (std::min(last, size(type_k)) + std::min(last, size(type_v)))/(size(type_k) + size(type_v));
}
