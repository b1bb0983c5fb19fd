#pragma once

// Lines of the cells of a KV cache, and the functions that move their data to other lines. The storage moves cells with a function
// of its caller: a change of type converts the cells in this function (llama-kv-convert.h)

#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

// lines of n elements in a tensor, or in memory with the layout of a tensor
//   K, and V with flash attention: a line is a row
//   transposed V: a line has an element of each of n rows
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

// return the number of lines of n elements to convert at once: about n_elements in total, rounded up
//   a part of quantized rows begins at a multiple of 256 bytes after the first row: kernels that copy from such a type read it from
//   the last multiple of the device's alignment (ggml-vulkan: minStorageBufferOffsetAlignment, at most 256)
int64_t llama_kv_n_lines(ggml_type type, int64_t n, int64_t n_elements);

// move the data of the first lines to the second ones, which have the same numbers, and no more than
// llama_kv_n_lines() of LLAMA_KV_CONVERT_ELEMENTS elements. both may be in the same memory, as long as a line does not start behind
// where it was: all of the first lines are read before the second ones are written
using llama_kv_convert = std::function<void(const llama_kv_lines & from, const llama_kv_lines & to, bool is_v)>;

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
