#pragma once

#include "llama-kv.h"

#include "ggml-backend.h"

#include <string>

// Lists the functions of libllama that kv-bench calls. They are in the linked libllama, or in a libllama that llama_api_load()
// loads, which can be from another build.
//
// llama_api_load() loads each libllama into a new namespace (dlmopen(), glibc), together with its own ggml and C library. So
// two libraries with the same name and symbols share nothing.
//
// Rejected: two processes that take turns. Each process has its own core, scheduler queue and weights. These change the speed
// by more than the difference that is measured.
// Rejected: dlopen() with RTLD_DEEPBIND. Both libraries would share ggml, which a patch may change.
//
// Both libraries must be built from the same version of upstream, because llama_context_params must be the same struct.
// The field kv_dynamic of the patches does not change the size: it uses padding bytes of upstream's struct.
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
    X(llama_memory_seq_add)       \
    X(llama_memory_can_shift)     \
    X(llama_state_seq_get_size)   \
    X(llama_state_seq_get_data)   \
    X(llama_state_seq_set_data)   \
    X(llama_decode)               \
    X(llama_synchronize)

struct llama_api {
#define KV_BENCH_MEMBER(name) decltype(&::name) name = nullptr;
    KV_BENCH_API(KV_BENCH_MEMBER)
#undef KV_BENCH_MEMBER

    decltype(&::llama_get_memory_usage) llama_get_memory_usage = nullptr; // null if the library does not have the patches

    // functions of the library's own C library
    void * (*malloc)(size_t)   = nullptr;
    void   (*free)(void *)     = nullptr;
    int    (*mallopt)(int, int) = nullptr; // null if the C library is not glibc
};

// let malloc() map large buffers, such as ggml's work buffer (a new uint8_t[])
// On the heap, such a buffer begins at any multiple of 16 bytes. Depending on this address, a prompt is 20 % slower or faster
// (measured with AVX-512). A mapped buffer always begins at the same offset in a page.
void llama_api_map_large_buffers(const llama_api & api);

llama_api llama_api_linked();

// return the path of the linked libllama. throws std::runtime_error
std::string llama_api_linked_path();

// load a libllama from a path. Its build must have shared libraries. throws std::runtime_error
llama_api llama_api_load(const std::string & path);
