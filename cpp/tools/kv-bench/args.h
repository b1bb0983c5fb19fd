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

    std::string device; // device of all layers and of the cache. empty: only the CPU

    uint32_t n_ctx     = 131072; // cells
    uint32_t n_ubatch  = 512;    // tokens per decode call while the cache is filled
    int32_t  n_threads = 2;

    std::vector<uint32_t> depths; // numbers of cells in use, ascending. empty: only create the context

    std::vector<ggml_type> retype; // after filling the cache, change its cells to these types, one after the other

    uint32_t               budget = 0; // limit of the memory of the cache in MiB. 0: no limit
    std::vector<ggml_type> auto_quant; // smaller types that the cells change to within the budget

    bool limit = false; // after each growth, also measure the time for the same bytes without a cache

    // options for measuring speed. The calls of this context and of a static context alternate
    uint32_t n_round = 0; // number of rounds. each round creates new contexts. 0: measure memory, not speed

    uint32_t seed = 0; // for random addresses of the contexts' memory. odd: the library --other is loaded first

    std::string other; // path of the libllama of another build, for the static context

    ggml_type base_type = GGML_TYPE_COUNT; // type of K and V of the static context. GGML_TYPE_COUNT: type_k and type_v

    uint32_t n_gen    = 24;  // tokens generated at each depth
    uint32_t n_prompt = 64;  // tokens of a prompt batch
    uint32_t n_batch  = 6;   // consecutive prompt batches at each depth

    bool verbose = false;
};

enum class args_result { ok, help, error };

args_result kv_bench_parse_args(int argc, char ** argv, kv_bench_params & params);

void kv_bench_usage(const char * prog);
