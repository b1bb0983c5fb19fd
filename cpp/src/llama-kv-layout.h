#pragma once

// Functions that change or describe the layout of the rows of a K or V tensor (see llama-kv-storage.h)
//
// They work on any backend, because they use the interface of the tensor's buffer. They finish their work before they return.
//
// n_used: number of live rows of each stream. they are the first rows of the stream and contain data. all later rows are zero
// trans:  the tensor is transposed V

#include "llama-kv-rows.h"

#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

// copy the live rows of src to dst. Before the call, all bytes of dst are zero, and dst has room for the live rows
// ctx: holds temporary views, up to 2 per stream
// throws std::bad_alloc. the live rows in src have not changed then
void llama_kv_copy_from(ggml_context * ctx, ggml_tensor * src, ggml_tensor * dst, bool trans, const std::vector<uint32_t> & n_used);

// change the layout of t to n_rows rows inside its buffer, with zeros after the live rows. n_rows is at most t->ne[1]
// The function works without additional memory. On a device, it is slower if there is no host memory for a copy.
void llama_kv_shrink_layout(ggml_tensor * t, bool trans, uint32_t n_rows, const std::vector<uint32_t> & n_used);

// call f(offset, size) for each range of the first n_bytes bytes of t that contains no live row, in ascending order
// rows: existing rows. a row that does not exist is not live. unlike above, a row that is not live can contain anything
template <typename F>
void llama_kv_each_gap(const ggml_tensor * t, bool trans, const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, size_t n_bytes, F && f) {
    const int64_t n_strips = trans ? t->ne[0] : 1; // strips of a stream, see llama-kv-region.h
    const size_t  size_row = trans ? ggml_type_size(t->type) : ggml_row_size(t->type, t->ne[0]);

    size_t end = 0; // after the last live row

    for (int64_t i = 0; i < t->ne[2]*n_strips; ++i) {
        const uint32_t s = i/n_strips;

        rows.each_run(s, [&](uint32_t i0, uint32_t i1) {
            const uint32_t i_end = std::min(i1, n_used[s]);
            if (i0 >= i_end) {
                return;
            }

            const size_t begin = (i*t->ne[1] + i0)*size_row;
            if (begin > end) {
                f(end, begin - end);
            }
            end = (i*t->ne[1] + i_end)*size_row;
        });
    }

    if (n_bytes > end) {
        f(end, n_bytes - end);
    }
}

// set the number of rows and the strides of a tensor that will be allocated or filled next
void llama_kv_set_n_rows(ggml_tensor * t, uint32_t n_rows);

// set the type and the strides of a tensor, for the same number of rows
void llama_kv_set_type(ggml_tensor * t, ggml_type type);

// update the size, the type and the address of the 2d view of stream s, after t has changed
void llama_kv_set_stream_view(ggml_tensor * view, ggml_tensor * t, int64_t s);

// set the buffer, the data, the size and the type of t to those of src
void llama_kv_adopt(ggml_tensor * t, const ggml_tensor * src);
