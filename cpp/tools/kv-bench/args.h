#pragma once

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

struct kv_bench_params {
    std::string model;

    bool kv_dynamic = false;

    llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    ggml_type             type_k     = GGML_TYPE_F16;
    ggml_type             type_v     = GGML_TYPE_F16;

    uint32_t n_ctx     = 131072; // cells
    uint32_t n_ubatch  = 512;    // tokens per decode call while the cache is filled
    int32_t  n_threads = 2;

    std::vector<uint32_t> depths; // ascending; empty: only create the context

    uint32_t n_gen    = 16;  // tokens generated at each depth, 0: do not measure
    uint32_t n_prompt = 64;  // tokens of a prompt batch at each depth, 0: do not measure
    uint32_t n_repeat = 5;   // prompt batches at each depth
    uint32_t n_cross  = 8;   // tokens generated before and after a growth between two depths, 0: none
    uint32_t max_gen  = 0;   // deepest depth at which speed is measured, 0: all

    uint64_t limit_bytes = 0; // also measure plain memcpy and page commits of so many bytes, 0: do not
    uint64_t chunk_bytes = 0; // commit in pieces of this size as well, 0: do not

    bool verbose = false;
};

enum class args_result { ok, help, error };

args_result kv_bench_parse_args(int argc, char ** argv, kv_bench_params & params);

void kv_bench_usage(const char * prog);
