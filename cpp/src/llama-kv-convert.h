#pragma once

// Conversion of the cells of a KV cache to another type. A graph on the devices of the tensors reads rows of K and V, converts them to
// f32, rotates them if exactly one of both types uses a rotated basis, and writes them. So the backend rounds as it does when it
// writes to the cache, which can differ from ggml_quantize_chunk().
//
// The rotation is a Walsh-Hadamard matrix, which is its own inverse, on blocks of n_rot elements of a row (see llama_kv_cache).

#include "llama-kv-lines.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

struct llama_context;

// types that cells can have
bool llama_kv_is_type(int32_t type);

class llama_kv_converter {
public:
    explicit llama_kv_converter(llama_context & lctx) : lctx(lctx) {}

    // disable the abort callback: a cache is useless if half of its cells have another type
    class uninterrupted {
    public:
        uninterrupted(llama_context & lctx, ggml_abort_callback callback, void * data) : lctx(lctx), callback(callback), data(data) {
            set(nullptr, nullptr);
        }

        ~uninterrupted() {
            set(callback, data);
        }

        uninterrupted(const uninterrupted &) = delete;
        uninterrupted & operator=(const uninterrupted &) = delete;

    private:
        void set(ggml_abort_callback callback, void * data);

        llama_context & lctx;

        ggml_abort_callback callback;
        void *              data;
    };

    // convert no more at a time than the compute buffers have room for as they are now: it is not worth larger ones, that stay
    void fit();

    // the compute buffers for what run() is going to do, at most
    // type: that a tensor like it is converted to
    // returns false when there is no memory for it
    bool reserve(const ggml_tensor * like, ggml_type type, uint32_t n_rot);

    // n_rot: size of the blocks that are rotated. 0: none
    // matrix: n_rot*n_rot
    // no compute may be in flight that uses the lines, and none is afterwards
    void run(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot, const float * matrix);

    // check whether a graph could not be computed, or the memory for its result was lost. the cells are lost then
    bool has_failed() const { return is_failed; }
    void set_failed() { is_failed = true; }

private:
    ggml_cgraph * build(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot);

    bool compute(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot, const float * matrix);

    llama_context & lctx;

    int64_t n_elements = LLAMA_KV_CONVERT_ELEMENTS;

    // inputs of the graph
    ggml_tensor * rot  = nullptr;
    ggml_tensor * idxs = nullptr; // of the rows that are written

    bool is_failed = false;
};
