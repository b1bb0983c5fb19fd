#pragma once

// Process the flags of the KV cache that are more than a context parameter: --kv-budget, --kv-auto-quant,
// --kv-cache-tokens

#include "common.h"
#include "fit.h"

#include "llama.h"

#include <cstdint>
#include <utility>
#include <vector>

// set params.kv_budget from the parsed arguments. throws std::invalid_argument
void common_kv_budget_init(common_params & params);

// return the flash attention of a context, which --kv-auto-quant requires
llama_flash_attn_type common_kv_flash_attn_type(const common_params & params);

// return the size of the context with --kv-cache-tokens. 0: the model's
uint32_t common_kv_n_ctx(const common_params & params);

// let --fit measure contexts with the smallest types of the budget that they support, while this object lives. extra:
// as for common_fit_params(), may be null
class common_kv_budget_fit {
public:
    common_kv_budget_fit(
            const common_params & params, const llama_model_params & mparams, llama_context_params & tgt, const common_fit_extra_model * extra);
    ~common_kv_budget_fit();

    common_kv_budget_fit(const common_kv_budget_fit &) = delete;

    // return the size of a context that --fit chose, limited to the budget
    void fit_n_ctx();

private:
    void take_smallest(const char * path, const llama_model_params & mparams, llama_context_params & cparams);

    const common_params      & params;
    const llama_model_params & mparams;

    llama_context_params & tgt;

    const common_fit_extra_model * extra;

    std::vector<std::pair<llama_context_params *, llama_context_params>> given; // the original types
};
