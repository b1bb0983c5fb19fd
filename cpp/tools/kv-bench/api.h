#pragma once

#include "llama-kv.h"

#include "ggml-backend.h"

#include <string>

// What kv-bench calls of a libllama: the one that it is linked to, or another build's, loaded beside it.
//
// A second libllama with the same name and the same symbols gets a namespace of its own (dlmopen(), glibc), with its own ggml and
// its own C library: nothing of it is the first one's. Two processes that take turns would do as well, but then each also has
// its own core, scheduler queue and weights, and these make more of a difference than what is to be measured.
// Rejected as well: dlopen() with RTLD_DEEPBIND, as both would share ggml, and a patch may change that.
//
// Both have to be of one upstream: llama_context_params has to be the same struct. kv_dynamic lies where upstream has padding.
#define KV_BENCH_API(X)           \
    X(ggml_backend_load_all)      \
    X(llama_backend_free)         \
    X(llama_log_set)              \
    X(llama_model_default_params) \
    X(llama_model_load_from_file) \
    X(llama_model_free)           \
    X(llama_model_get_vocab)      \
    X(llama_vocab_n_tokens)       \
    X(llama_context_default_params) \
    X(llama_init_from_model)      \
    X(llama_free)                 \
    X(llama_get_memory)           \
    X(llama_memory_clear)         \
    X(llama_memory_seq_rm)        \
    X(llama_memory_seq_cp)        \
    X(llama_decode)               \
    X(llama_synchronize)

struct llama_api {
#define KV_BENCH_MEMBER(name) decltype(&::name) name = nullptr;
    KV_BENCH_API(KV_BENCH_MEMBER)
#undef KV_BENCH_MEMBER

    decltype(&::llama_get_memory_usage) llama_get_memory_usage = nullptr; // null without the patches

    // of the C library that it uses
    void * (*malloc)(size_t)   = nullptr;
    void   (*free)(void *)     = nullptr;
    int    (*mallopt)(int, int) = nullptr; // null where that is not glibc
};

// ggml's work buffer is new uint8_t[]: on the heap it begins at any multiple of 16 bytes, and a prompt is 20 % slower or faster for
// it, by chance (measured with AVX-512). A large buffer that is mapped begins at the same place in its page every time.
void llama_api_map_large_buffers(const llama_api & api);

llama_api llama_api_linked();

// the file of the libllama that this program is linked to. throws std::runtime_error
std::string llama_api_linked_path();

// path: libllama of a build with shared libraries. throws std::runtime_error
llama_api llama_api_load(const std::string & path);
