#pragma once

// What of the flags of the KV cache is more than a field of the context parameters: --kv-budget, --kv-auto-quant, --kv-cache-tokens

#include "common.h"
#include "fit.h"

#include "llama.h"

#include <cstdint>
#include <utility>
#include <vector>

// after the arguments are parsed: make params.kv_budget of them. throws std::invalid_argument
void common_kv_budget_init(common_params & params);

// flash attention of a context, with --kv-auto-quant
llama_flash_attn_type common_kv_flash_attn_type(const common_params & params);

// the size of the context with --kv-cache-tokens, 0: the model's
uint32_t common_kv_n_ctx(const common_params & params);

// --fit with a budget: contexts are measured with the smallest types that they may take and can have, as long as this lives
// extra: as for common_fit_params(), may be null
class common_kv_budget_fit {
public:
    common_kv_budget_fit(
            const common_params & params, const llama_model_params & mparams, llama_context_params & tgt, const common_fit_extra_model * extra);
    ~common_kv_budget_fit();

    common_kv_budget_fit(const common_kv_budget_fit &) = delete;

    // the size of a context that was left to --fit: no more than the budget holds
    void fit_n_ctx();

private:
    void take_smallest(const char * path, const llama_model_params & mparams, llama_context_params & cparams);

    const common_params      & params;
    const llama_model_params & mparams;

    llama_context_params & tgt;

    const common_fit_extra_model * extra;

    std::vector<std::pair<llama_context_params *, llama_context_params>> given; // what the types were
};
