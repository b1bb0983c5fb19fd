#pragma once

// Conversion of the cells of a KV cache to another type
//
// A graph on the devices of the tensors reads rows of K or V, converts them to f32, and writes them in the new type. The writing
// backend rounds in the same way as when a batch writes to the cache. This can differ from ggml_quantize_chunk().
//
// If exactly one of the old and the new type stores the cells in a rotated basis, the graph also rotates the rows. The rotation
// is a Walsh-Hadamard matrix, which is its own inverse. It is applied to blocks of n_rot elements of a row (see llama_kv_cache).

#include "llama-kv-lines.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

struct llama_context;

// check whether K and V of a cell can have this type
bool llama_kv_is_type(int32_t type);

class llama_kv_converter {
public:
    explicit llama_kv_converter(llama_context & lctx) : lctx(lctx) {}

    // disable the abort callback while an object of this class exists
    // An abort in the middle of a change of type would leave a cache with cells of both types, which is useless.
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

    // limit the elements that run() converts at a time, so that the existing compute buffers have room for them
    // Larger compute buffers would make the conversion faster, but they would stay allocated after the conversion.
    void fit();

    // allocate compute buffers for the largest graph that run() will need
    // like:  a tensor of the cache in its old type
    // type:  the new type
    // n_rot: number of elements of a rotated block. 0: no rotation
    // returns false if there is not enough memory
    bool reserve(const ggml_tensor * like, ggml_type type, uint32_t n_rot);

    // convert the lines of `from` to the type of `to`, and write them to the lines of `to`
    // n_rot:  number of elements of a rotated block. 0: no rotation
    // matrix: rotation matrix of n_rot*n_rot elements
    // No computation that uses the lines may be in flight. After the call, no computation is in flight.
    void run(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot, const float * matrix);

    // check whether a conversion has failed, and so all cells are lost. There are two reasons: the device could not compute a
    // graph, or the memory for the converted cells was lost
    bool has_failed() const { return is_failed; }
    void set_failed() { is_failed = true; }

private:
    ggml_cgraph * build(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot);

    bool compute(const llama_kv_lines & from, const llama_kv_lines & to, uint32_t n_rot, const float * matrix);

    llama_context & lctx;

    int64_t n_elements = LLAMA_KV_CONVERT_ELEMENTS;

    // inputs of the graph that build() has built
    ggml_tensor * rot  = nullptr;
    ggml_tensor * idxs = nullptr; // indices of the rows that are written. null: the lines are not whole rows

    bool is_failed = false;
};
