#pragma once

// Functions that change the number of rows of a K or V tensor (see llama-kv-storage.h)
//
// They work on any backend, because they use the interface of the tensor's buffer. They finish their work before they return.
//
// n_used: number of live rows of each stream. they are the first rows of the stream and contain data. all later rows are zero
// trans:  the tensor is transposed V

#include "ggml.h"

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

// set the number of rows and the strides of a tensor that will be allocated or filled next
void llama_kv_set_n_rows(ggml_tensor * t, uint32_t n_rows);

// set the type and the strides of a tensor, for the same number of rows
void llama_kv_set_type(ggml_tensor * t, ggml_type type);

// update the size, the type and the address of the 2d view of stream s, after t has changed
void llama_kv_set_stream_view(ggml_tensor * view, ggml_tensor * t, int64_t s);

// set the buffer, the data, the size and the type of t to those of src
void llama_kv_adopt(ggml_tensor * t, const ggml_tensor * src);
