#pragma once

// The cells of a KV cache in another type: rows of K and V tensors are read, made f32, rotated where one of both types is stored
// in a rotated basis and the other is not, and written, by a graph on the devices that have them. So they are rounded as the
// backend rounds what it writes to the cache, which need not be what ggml_quantize_chunk() does.
//
// The rotation is a Walsh-Hadamard matrix, which is its own inverse, on blocks of n_rot elements of a row (see llama_kv_cache).

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

struct llama_context;

// types that cells can have
bool llama_kv_is_type(int32_t type);

// lines of n elements in a tensor, or in what is laid out like one
//   K, and V with flash attention: a line is a row
//   transposed V: a line has an element of each of so many rows
struct llama_kv_lines {
    ggml_tensor * t;

    size_t offs;   // of the first, in bytes
    size_t stride; // from one to the next, in bytes

    int64_t n;
    int64_t n_lines;

    // where they are rows of t: these, in any order. null: one after the other
    const int64_t * rows = nullptr;
};

// elements that are converted at a time, at most: 1 MiB of f32
static constexpr int64_t LLAMA_KV_CONVERT_ELEMENTS = 1 << 18;

// lines of n elements of a type that are converted at a time: n_elements, or as few more as it takes
//   a part of quantized rows begins a multiple of 256 bytes behind the first row: kernels that copy from such a type can read it
//   from where the last multiple of the device's alignment is (ggml-vulkan: minStorageBufferOffsetAlignment, which is up to 256)
int64_t llama_kv_n_lines(ggml_type type, int64_t n, int64_t n_elements);

// move the data of the first lines to the second ones, which have the same numbers, and no more than
// llama_kv_n_lines() of LLAMA_KV_CONVERT_ELEMENTS elements. both may be in the same memory, as long as a line does not start behind
// where it was: all of the first lines are read before the second ones are written
using llama_kv_convert = std::function<void(const llama_kv_lines & from, const llama_kv_lines & to, bool is_v)>;

class llama_kv_converter {
public:
    explicit llama_kv_converter(llama_context & lctx) : lctx(lctx) {}

    // nobody interrupts it: half of the cells in another type are of no use
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

    // a graph could not be computed, or the memory for its result is gone: what was to be converted is lost
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

// f(lines of src, the same of dst): the rows [r0, r1) of stream s, a part that can be converted at a time after the other, in
// ascending order. both tensors have the same shape
template <typename F>
void llama_kv_each_lines(ggml_tensor * src, ggml_tensor * dst, bool trans, int64_t s, int64_t r0, int64_t r1, F && f) {
    const int64_t n     = trans ? r1 - r0 : src->ne[0];
    const int64_t l0    = trans ? s*src->ne[0]       : s*src->ne[1] + r0;
    const int64_t l1    = trans ? (s + 1)*src->ne[0] : s*src->ne[1] + r1;

    if (n <= 0) {
        return;
    }

    const int64_t n_max = llama_kv_n_lines(src->type, n, LLAMA_KV_CONVERT_ELEMENTS);

    for (int64_t l = l0; l < l1; l += n_max) {
        const auto lines_of = [&](ggml_tensor * t) -> llama_kv_lines {
            const size_t stride = ggml_row_size(t->type, trans ? t->ne[1] : t->ne[0]);

            return { t, l*stride + (trans ? r0*ggml_type_size(t->type) : 0), stride, n, std::min(n_max, l1 - l) };
        };

        f(lines_of(src), lines_of(dst));
    }
}
