#include "llama-kv-layout.h"

#include "llama-kv-limits.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

namespace {

// the blocks of a tensor, which llama-kv-region.h calls strips. A block has n_rows adjacent rows, and the first rows are live
// A stream has one block. In transposed V, a stream has ne[0] blocks, and each block has one element of each row.
struct blocks {
    blocks(const ggml_tensor * t, bool trans) :
        n_per_stream(trans ? t->ne[0] : 1),
        n_stream(t->ne[2]),
        size_row(trans ? ggml_type_size(t->type) : ggml_row_size(t->type, t->ne[0])) {
    }

    int64_t n_per_stream;
    int64_t n_stream;
    size_t  size_row; // bytes

    // offset in bytes of block i of stream s in a tensor with n_rows rows
    size_t offset(int64_t s, int64_t i, uint32_t n_rows) const {
        return (s*n_per_stream + i)*n_rows*size_row;
    }
};

// return the number of live rows of stream s in a tensor with n_rows rows
uint32_t n_live(const std::vector<uint32_t> & n_used, int64_t s, uint32_t n_rows) {
    return std::min(n_used.at(s), n_rows);
}

// copy n bytes on the same device, without the host if the backend can do that
void copy_bytes(ggml_context * ctx, ggml_tensor * src, size_t offs_src, ggml_tensor * dst, size_t offs_dst, size_t n) {
    const size_t size_el = ggml_row_size(src->type, src->ne[0]);

    ggml_tensor * view_src = ggml_view_1d(ctx, src, n/size_el*src->ne[0], offs_src);
    ggml_tensor * view_dst = ggml_view_1d(ctx, dst, n/size_el*src->ne[0], offs_dst);

    ggml_backend_view_init(view_src);
    ggml_backend_view_init(view_dst);

    ggml_backend_tensor_copy(view_src, view_dst);
}

} // namespace

void llama_kv_copy_from(ggml_context * ctx, ggml_tensor * src, ggml_tensor * dst, bool trans, const std::vector<uint32_t> & n_used) {
    const blocks b(src, trans);

    const uint32_t n_src = src->ne[1];
    const uint32_t n_dst = dst->ne[1];

    // On a device, transposed V has ne[0] short blocks per stream, and copying each block needs a transfer of its own. So read
    // the whole V tensor of the layer into host memory with one transfer, and write the new tensor with a second transfer. The
    // host memory holds V of only one layer at a time.
    const bool is_host = ggml_backend_buffer_is_host(src->buffer) && ggml_backend_buffer_is_host(dst->buffer);
    const bool is_via  = !is_host && trans;

    std::vector<char> data_src(is_via ? ggml_nbytes(src) : 0);
    std::vector<char> data_dst(is_via ? ggml_nbytes(dst) : 0);

    if (is_via) {
        ggml_backend_tensor_get(src, data_src.data(), 0, data_src.size());
    }

    const char * from = is_via ? data_src.data() : (const char *) src->data;
    char       * to   = is_via ? data_dst.data() : (char *)       dst->data;

    for (int64_t s = 0; s < b.n_stream; ++s) {
        const size_t size = n_live(n_used, s, n_src)*b.size_row;

        for (int64_t i = 0; i < b.n_per_stream && size > 0; ++i) {
            if (is_host || is_via) {
                memcpy(to + b.offset(s, i, n_dst), from + b.offset(s, i, n_src), size);
            } else {
                copy_bytes(ctx, src, b.offset(s, i, n_src), dst, b.offset(s, i, n_dst), size);
            }
        }
    }

    if (is_via) {
        ggml_backend_tensor_set(dst, data_dst.data(), 0, data_dst.size());
    }
}

void llama_kv_set_n_rows(ggml_tensor * t, uint32_t n_rows) {
    t->ne[1] = n_rows;
    t->nb[2] = t->nb[1]*t->ne[1];
    t->nb[3] = t->nb[2]*t->ne[2];
}

void llama_kv_set_type(ggml_tensor * t, ggml_type type) {
    t->type  = type;
    t->nb[0] = ggml_type_size(type);
    t->nb[1] = ggml_row_size(type, t->ne[0]);

    llama_kv_set_n_rows(t, t->ne[1]);
}

void llama_kv_set_stream_view(ggml_tensor * view, ggml_tensor * t, int64_t s) {
    view->ne[1] = t->ne[1];
    llama_kv_set_type(view, t->type);

    view->view_offs = s*t->nb[2];
    view->view_src  = t;
    view->buffer    = nullptr;
    view->data      = nullptr;
    view->extra     = nullptr;

    if (t->buffer) {
        ggml_backend_view_init(view);
    }
}

void llama_kv_adopt(ggml_tensor * t, const ggml_tensor * src) {
    t->ne[1] = src->ne[1];
    llama_kv_set_type(t, src->type);

    t->buffer = nullptr;
    t->data   = nullptr;
    t->extra  = nullptr;

    // this also initializes t in the buffer, as src was initialized
    ggml_backend_tensor_alloc(src->buffer, t, src->data);
}

// move the live rows towards lower addresses, in ascending order, so that each byte is read before it is overwritten
void llama_kv_shrink_layout(ggml_tensor * t, bool trans, uint32_t n_rows, const std::vector<uint32_t> & n_used) {
    const blocks b(t, trans);

    const uint32_t n_old = t->ne[1];

    // On a device, the rows move through the host. If rows move, transfer the whole tensor to the host and back at once, if there
    // is host memory for that. Otherwise, transfer small pieces.
    const bool is_host = ggml_backend_buffer_is_host(t->buffer);

    const std::unique_ptr<char[]> copy(is_host || n_rows == n_old || !llama_kv_limits_allow(ggml_nbytes(t)) ? nullptr : new (std::nothrow) char[ggml_nbytes(t)]);

    char * all = is_host ? (char *) t->data : copy.get();
    char   piece[1 << 14];

    if (copy) {
        ggml_backend_tensor_get(t, all, 0, ggml_nbytes(t));
    }

    for (int64_t s = 0; s < b.n_stream; ++s) {
        const size_t size_live = n_live(n_used, s, n_rows)*b.size_row;
        const size_t size_full = n_rows*b.size_row;

        for (int64_t i = 0; i < b.n_per_stream; ++i) {
            const size_t offs_src = b.offset(s, i, n_old);
            const size_t offs_dst = b.offset(s, i, n_rows);

            if (all) {
                memmove(all + offs_dst, all + offs_src, size_live);
                memset(all + offs_dst + size_live, 0, size_full - size_live);
                continue;
            }

            for (size_t offs = offs_src == offs_dst ? size_live : 0; offs < size_full; offs += sizeof(piece)) {
                const size_t n    = std::min(sizeof(piece), size_full - offs);
                const size_t live = std::min(n, size_live - std::min(size_live, offs));

                if (live > 0) {
                    ggml_backend_tensor_get(t, piece, offs_src + offs, live);
                }
                memset(piece + live, 0, n - live);
                ggml_backend_tensor_set(t, piece, offs_dst + offs, n);
            }
        }
    }

    if (copy) {
        ggml_backend_tensor_set(t, all, 0, b.offset(b.n_stream, 0, n_rows));
    }

    llama_kv_set_n_rows(t, n_rows);
}
