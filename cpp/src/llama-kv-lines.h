#pragma once

// Lines of the cells of a KV cache (see llama_kv_lines), and the functions that move their data
//
// To move cells, the storage calls a function that its caller passes to it (llama_kv_convert). For a change of type, this
// function converts the cells (llama-kv-convert.h).

#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

// lines of n elements in a tensor, or in memory with the layout of a tensor
//   K, and V with flash attention: a line is a row
//   transposed V:                  a line has one element of each of n rows
struct llama_kv_lines {
    ggml_tensor * t;

    size_t offs;   // offset of the first line, in bytes
    size_t stride; // distance of two lines, in bytes

    int64_t n;
    int64_t n_lines;

    // if the lines are rows of t: the indices of the rows, in any order. null: the lines follow one another from offs
    const int64_t * rows = nullptr;
};

// maximum number of elements that are converted at a time: 1 MiB of f32
static constexpr int64_t LLAMA_KV_CONVERT_ELEMENTS = 1 << 18;

// return the number of lines of n elements to convert at a time: about n_elements elements, but at least one line
// For a quantized type, these lines have a multiple of 256 bytes in total. So the next lines begin at a multiple of 256 bytes
// after the first line. The reason is that kernels that copy from a quantized type round the start address down to the
// alignment of the device (ggml-vulkan: minStorageBufferOffsetAlignment, at most 256).
int64_t llama_kv_n_lines(ggml_type type, int64_t n, int64_t n_elements);

// move the data of the lines `from` to the lines `to`, or convert the data if the types differ
// `from` and `to` have the same number of lines, and their lines have the same number n of elements. The number of lines is at
// most llama_kv_n_lines(type of `from`, n, LLAMA_KV_CONVERT_ELEMENTS).
// `from` and `to` may be in the same memory, if no line of `to` starts after the line of `from` with the same number. The function
// gives the same result as if it reads all lines of `from` before it writes.
using llama_kv_convert = std::function<void(const llama_kv_lines & from, const llama_kv_lines & to, bool is_v)>;

// call f(lines of src, the same lines of dst) for the rows [r0, r1) of stream s
// One call has at most llama_kv_n_lines() lines, which can be converted at a time. The calls are in ascending order of the
// lines. Both tensors have the same shape.
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
