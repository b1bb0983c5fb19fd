#pragma once

// What of the flags of the KV cache is more than a field of the context parameters: --kv-budget, --kv-auto-quant, --kv-cache-tokens

#include "common.h"
#include "fit.h"

#include "llama.h"

#include <cstddef>
#include <cstdint>

// after the arguments are parsed: make params.kv_budget of them. throws std::invalid_argument
void common_kv_budget_init(common_params & params);

// the size of the context with --kv-cache-tokens, 0: the model's
uint32_t common_kv_n_ctx(const common_params & params);

// --fit with a budget: contexts are measured with the smallest types that they may take, as long as this lives
class common_kv_budget_fit {
public:
    common_kv_budget_fit(const common_params & params, llama_context_params & tgt, llama_context_params & dft);
    ~common_kv_budget_fit();

    common_kv_budget_fit(const common_kv_budget_fit &) = delete;

    // the size of a context that was left to --fit: no more than the budget holds. extra: as for common_fit_params()
    void fit_n_ctx(const llama_model_params & mparams, const common_fit_extra_model * extra);

private:
    struct bytes {
        size_t cells   = 0;
        size_t compute = 0;
    };

    // of all contexts with n_ctx cells
    bytes measure(uint32_t n_ctx, const llama_model_params & mparams, const common_fit_extra_model * extra) const;

    const common_params & params;

    llama_context_params & tgt;
    llama_context_params & dft;

    const llama_context_params tgt_given;
    const llama_context_params dft_given;
};
