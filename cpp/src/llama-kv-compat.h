#pragma once

// What the dynamic KV cache (--kv-dynamic) uses and not every upstream that it is built on has. The overload with int is
// taken where the member is there, the one with long elsewhere.

#include "ggml.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>

// llama_cparams::n_outputs_max: the largest number of outputs in a batch of n_tokens
template <typename T>
auto llama_kv_compat_n_outputs(const T & cparams, uint32_t n_tokens, int) -> decltype(uint32_t(cparams.n_outputs_max)) {
    return std::min<uint32_t>(n_tokens, cparams.n_outputs_max);
}

template <typename T>
uint32_t llama_kv_compat_n_outputs(const T &, uint32_t n_tokens, long) {
    return n_tokens;
}

// llama_hparams::n_layer_all: layers, those of drafts included
template <typename T>
auto llama_kv_compat_n_layer(const T & hparams, int) -> decltype(uint32_t(hparams.n_layer_all)) {
    return hparams.n_layer_all;
}

template <typename T>
uint32_t llama_kv_compat_n_layer(const T & hparams, long) {
    return hparams.n_layer;
}

// llama_context::gf_res_prev: the graphs that could run again, one or several. none does afterwards
template <typename T>
auto llama_kv_compat_reset(T & res, int) -> decltype(void(res->reset())) {
    if (res) {
        res->reset();
    }
}

template <typename T>
void llama_kv_compat_reset(T & all, long) {
    for (auto & res : all) {
        llama_kv_compat_reset(res, 0);
    }
}

// whether a state is left on the device
inline bool llama_kv_compat_is_on_device(uint32_t flags) {
#ifdef LLAMA_STATE_SEQ_FLAGS_ON_DEVICE
    return flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;
#else
    (void) flags;

    return false;
#endif
}

// llama_mul_mat_hadamard(): only where cells are rotated
template <typename T>
auto llama_kv_compat_hadamard(ggml_context * ctx, T * cur, ggml_tensor * rot, int) -> decltype(llama_mul_mat_hadamard(ctx, cur, rot)) {
    return llama_mul_mat_hadamard(ctx, cur, rot);
}

template <typename T>
T * llama_kv_compat_hadamard(ggml_context *, T * cur, ggml_tensor *, long) {
    return cur;
}
