#pragma once

#include "values.h"

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

// the command line. The runs with the static and with the dynamic cache use the same values
struct kv_check_params {
    std::string model;
    std::string draft; // a model that reads the cells of `model`, for the check "draft"
    std::string override_key; // key of the model's metadata that is set to override_val, to change a toy model
    uint32_t    override_val = 0;

    std::string text; // a file whose words are the tokens. "": random tokens from the seed

    std::string fail;  // N or N+: the allocations that fail in the check "no-memory". "": none

    uint32_t limit_mib = 0; // MiB that the system still provides in the check "no-memory" (Linux). 0: no limit

    llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    ggml_type             type_k     = GGML_TYPE_F16;
    ggml_type             type_v     = GGML_TYPE_F16;

    std::vector<std::vector<cell_types>> retypes; // chains of types for the checks retype-*. empty: the default chains

    uint32_t n_seqs     = 1;
    bool     unified    = false;
    bool     swa_full   = false;
    bool     embeddings = false;

    enum llama_pooling_type pooling = LLAMA_POOLING_TYPE_NONE; // ignored without embeddings

    uint32_t n_ctx    = 0;   // cells over all streams. 0: enough for n_fill
    uint32_t n_ubatch = 128;
    uint32_t n_fill   = 0;   // cells per stream that the long checks use. 0: depends on n_seqs and quick
    uint32_t n_rs_seq = 4;   // rollback snapshots of recurrent layers, if the model supports them

    int32_t n_threads    = 1;
    int32_t n_gpu_layers = -1; // -1: all layers if there is a device, otherwise none

    std::string device; // NAME[,NAME...]. "": only the CPU
    std::string rpc;    // HOST:PORT[,HOST:PORT...]

    struct fake_device {
        uint32_t n_mib;
        uint32_t page_kib; // 0: the device has no pages
        bool     is_f16;   // the device supports flash attention only for f16
    };
    std::vector<fake_device> fake_devices; // FAKE0, FAKE1, ...

    bool        offload_kqv = true;

    std::string storage; // growth of the dynamic cache in host memory: inplace, copy, or "" for the default

    std::vector<std::string> checks; // empty: all checks

    uint32_t seed      = 1;
    uint32_t timeout_s = 900; // seconds that the run with one of the two caches may take in total
    bool     quick     = false;
    bool     verbose   = false;
    bool     train     = false; // also run the check "train", which needs writable weights and changes them
    bool     mtp       = false; // the draft is the model's own MTP layer, with its own cells
    bool     self      = false; // compare two static caches, to test the model and this program
    uint32_t self_ctx  = 0;     // n_ctx of the second static cache. 0: the same as the first

    bool memory     = false; // report the memory of a context instead of comparing two caches
    bool kv_dynamic = false; // the context that --memory creates has a dynamic cache
    bool no_alloc   = false; // with --memory: measure only, without allocating, as --fit does

    // shorter sequences. set by main() if the model aborts at positions beyond those that it was trained for
    bool fallback = false;
};

enum class args_result { ok, help, error };

args_result kv_check_parse_args(int argc, char ** argv, kv_check_params & params);

void kv_check_usage(const char * prog);
