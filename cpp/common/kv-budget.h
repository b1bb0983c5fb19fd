#pragma once

// Process the flags of the KV cache that do not just set a context parameter: --kv-budget, --kv-auto-quant, --kv-cache-tokens

#include "common.h"
#include "fit.h"

#include "llama.h"

#include <cstdint>
#include <utility>
#include <vector>

// create params.kv_budget from the parsed arguments. throws std::invalid_argument
void common_kv_budget_init(common_params & params);

// return the flash attention setting of a context: enabled if a quantized type of `--kv-auto-quant` requires that, otherwise
// the setting in params
llama_flash_attn_type common_kv_flash_attn_type(const common_params & params);

// return params.n_ctx, limited by the option `--kv-cache-tokens`. A result of 0 means the context size that the model was
// trained with
uint32_t common_kv_n_ctx(const common_params & params);

// set the contexts that `--fit` measures to the smallest types of the budget, while an object of this class exists
// A context keeps its own types if its model supports none of the smaller types. The destructor restores the types.
// extra: model that `--fit` fits together with the main model, as in common_fit_params(). null: only the main model is fitted
class common_kv_budget_fit {
public:
    common_kv_budget_fit(
            const common_params & params, const llama_model_params & mparams, llama_context_params & tgt, const common_fit_extra_model * extra);
    ~common_kv_budget_fit();

    common_kv_budget_fit(const common_kv_budget_fit &) = delete;

    // reduce the context size that `--fit` has chosen, so that the cells of the context fit into the budget
    void fit_n_ctx();

private:
    void take_smallest(const char * path, const llama_model_params & mparams, llama_context_params & cparams);

    const common_params      & params;
    const llama_model_params & mparams;

    llama_context_params & tgt;

    const common_fit_extra_model * extra;

    // for each context: a pointer to its parameters, and a copy of the parameters with their first types
    std::vector<std::pair<llama_context_params *, llama_context_params>> given;
};
