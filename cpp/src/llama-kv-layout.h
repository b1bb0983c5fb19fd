#pragma once

// The rows of a K or V tensor (see llama-kv-storage.h) whose number changes, on any backend: all functions use the interface of the
// tensor's buffer and finish their work before they return
//
// n_used: live rows of each stream. all rows after them are zero

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// copy the live rows of src to dst, which is zero and has room for them
// ctx holds the temporary views: up to 2 per stream
// throws std::bad_alloc, with the live rows in src as they were
void llama_kv_copy_from(ggml_context * ctx, ggml_tensor * src, ggml_tensor * dst, bool trans, const std::vector<uint32_t> & n_used);

// lay out t for n_rows <= t->ne[1] inside its buffer, with zeros behind the live rows. needs no memory, but is slow on a device if
// there is none
void llama_kv_shrink_layout(ggml_tensor * t, bool trans, uint32_t n_rows, const std::vector<uint32_t> & n_used);

// set only the size, for a tensor that is allocated or filled next
void llama_kv_set_n_rows(ggml_tensor * t, uint32_t n_rows);

// the type alone, for the same number of rows
void llama_kv_set_type(ggml_tensor * t, ggml_type type);

// the 2d view of stream s follows t
void llama_kv_set_stream_view(ggml_tensor * view, ggml_tensor * t, int64_t s);

// give t the buffer, the data, the size and the type of src
void llama_kv_adopt(ggml_tensor * t, const ggml_tensor * src);
