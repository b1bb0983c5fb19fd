#pragma once

#include "values.h"

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

// everything the command line says; the same values go to the static and to the dynamic side
struct kv_check_params {
    std::string model;
    std::string draft; // a model that reads the cells of this one, for the check of that name
    std::string override_key; // of the model's metadata, for other toys than there are
    uint32_t    override_val = 0;

    std::string text; // a file whose words are the tokens, "": tokens drawn from the seed

    std::string fail;  // N or N+: the allocations of a growth that fail in the check "no-memory", "": none

    uint32_t limit_mib = 0; // MiB that the system still gives in the check "no-memory" (Linux), 0: no limit

    llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    ggml_type             type_k     = GGML_TYPE_F16;
    ggml_type             type_v     = GGML_TYPE_F16;

    std::vector<std::vector<cell_types>> retypes; // chains of types for the checks retype-*, empty: the usual ones

    uint32_t n_seqs     = 1;
    bool     unified    = false;
    bool     swa_full   = false;
    bool     embeddings = false;

    enum llama_pooling_type pooling = LLAMA_POOLING_TYPE_NONE; // only looked at with embeddings

    uint32_t n_ctx    = 0;   // cells over all streams, 0: enough for n_fill
    uint32_t n_ubatch = 128;
    uint32_t n_fill   = 0;   // cells per stream that the long checks use, 0: by n_seqs and quick
    uint32_t n_rs_seq = 4;   // rollback snapshots of recurrent layers, where the model supports them

    int32_t n_threads    = 1;
    int32_t n_gpu_layers = -1; // -1: all of them with a device, none without

    std::string device; // NAME[,NAME...], "": the CPU alone
    std::string rpc;    // HOST:PORT[,HOST:PORT...]

    struct fake_device {
        uint32_t n_mib;
        uint32_t page_kib; // 0: it has no pages
        bool     is_f16;   // flash attention over f16 alone
    };
    std::vector<fake_device> fake_devices; // FAKE0, FAKE1, ...

    bool        offload_kqv = true;

    std::string storage; // how the dynamic side grows in host memory: inplace, copy, or "" for its own choice

    std::vector<std::string> checks; // empty: all of them

    uint32_t seed      = 1;
    uint32_t timeout_s = 900; // for one side of the whole run
    bool     quick     = false;
    bool     verbose   = false;
    bool     train     = false; // the check of that name: it needs weights that can be written, and changes them
    bool     mtp       = false; // the draft is the model's own MTP layer, with cells of its own
    bool     self      = false; // both sides static: a test of the model and of this program
    uint32_t self_ctx  = 0;     // n_ctx of the second static side, 0: the same

    bool memory     = false; // report what a context costs instead of comparing
    bool kv_dynamic = false; // which context --memory creates
    bool no_alloc   = false; // --memory: only measure, as --fit does

    // set by main when the static cache cannot go beyond a number of positions
    bool fallback = false;
};

enum class args_result { ok, help, error };

args_result kv_check_parse_args(int argc, char ** argv, kv_check_params & params);

void kv_check_usage(const char * prog);
