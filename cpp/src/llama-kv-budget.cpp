#include "llama-kv-budget.h"

#include "llama-impl.h"

#include <utility>

llama_memory_budget::llama_memory_budget(size_t n_bytes, std::vector<ggml_type> types) : n_bytes(n_bytes), types(std::move(types)) {
    usage.n_bytes = n_bytes;
}

bool llama_kv_type_is_smaller(ggml_type a, ggml_type b) {
    return ggml_type_size(a)*ggml_blck_size(b) < ggml_type_size(b)*ggml_blck_size(a);
}

//
// interface
//

llama_memory_budget * llama_memory_budget_init(size_t n_bytes, const ggml_type * types, size_t n_types) {
    for (size_t i = 0; i < n_types; ++i) {
        switch (types[i]) {
            case GGML_TYPE_F32:
            case GGML_TYPE_F16:
            case GGML_TYPE_BF16:
            case GGML_TYPE_Q8_0:
            case GGML_TYPE_Q5_1:
            case GGML_TYPE_Q5_0:
            case GGML_TYPE_Q4_1:
            case GGML_TYPE_Q4_0:
            case GGML_TYPE_IQ4_NL: break;
            default:
                LLAMA_LOG_ERROR("%s: %s is not a type of KV cells\n", __func__, ggml_type_name(types[i]));
                return nullptr;
        }
        if (i > 0 && !llama_kv_type_is_smaller(types[i], types[i - 1])) {
            LLAMA_LOG_ERROR("%s: %s is not smaller than %s\n", __func__, ggml_type_name(types[i]), ggml_type_name(types[i - 1]));
            return nullptr;
        }
    }

    return new llama_memory_budget(n_bytes, { types, types + n_types });
}

void llama_memory_budget_free(llama_memory_budget * budget) {
    delete budget;
}

void llama_memory_budget_hold(llama_memory_budget * budget, bool hold) {
    budget->hold = hold;
}

llama_memory_budget_usage llama_memory_budget_get_usage(const llama_memory_budget * budget) {
    return budget->usage;
}
