// The common start of the programs in this folder: a model, without a log, and contexts that grow

#pragma once

#include "llama.h"
#include "llama-kv.h"

#include <cstdint>

static inline llama_model * load_model(const char * path) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_backend_load_all();

    return llama_model_load_from_file(path, llama_model_default_params());
}

// use one thread, and flash attention
static inline llama_context_params dynamic_params(uint32_t n_ctx) {
    auto params = llama_context_default_params();
    params.n_ctx           = n_ctx;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.kv_dynamic      = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;

    return params;
}
