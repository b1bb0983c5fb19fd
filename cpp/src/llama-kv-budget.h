#pragma once

// The bytes that several contexts share and the types that their cells step down through (llama_memory_budget_add())

#include "llama-kv.h"

#include <cstddef>
#include <vector>

struct llama_memory_budget {
    llama_memory_budget(size_t n_bytes, std::vector<ggml_type> types);

    const size_t                 n_bytes; // 0: what there is
    const std::vector<ggml_type> types;

    bool hold = false; // fail rather than take the next types

    llama_memory_budget_usage usage = {};
};

// a: smaller cells than b
bool llama_kv_type_is_smaller(ggml_type a, ggml_type b);
