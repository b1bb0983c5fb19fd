#include "llama-kv-storage.h"

#include "llama-impl.h"
#include "llama-kv-limits.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace {

// the blocks of a tensor, see the layout in the header
struct blocks {
    blocks(const ggml_tensor * t, bool trans) :
        n_per_stream(trans ? t->ne[0] : 1),
        n_stream(t->ne[2]),
        size_cell(trans ? ggml_type_size(t->type) : ggml_row_size(t->type, t->ne[0])) {
    }

    int64_t n_per_stream;
    int64_t n_stream;
    size_t  size_cell;

    // offset in bytes of block i of stream s in a tensor with n_cells cells
    size_t offset(int64_t s, int64_t i, uint32_t n_cells) const {
        return (s*n_per_stream + i)*n_cells*size_cell;
    }
};

// the streams of a tensor with n_cells cells, at most n_used[s] of them live
uint32_t n_live(const std::vector<uint32_t> & n_used, int64_t s, uint32_t n_cells) {
    return std::min(n_used.at(s), n_cells);
}

// bytes of the live cells of t
size_t n_bytes_live(const ggml_tensor * t, bool trans, const std::vector<uint32_t> & n_used) {
    const blocks b(t, trans);

    size_t res = 0;
    for (int64_t s = 0; s < b.n_stream; ++s) {
        res += b.n_per_stream*n_live(n_used, s, t->ne[1])*b.size_cell;
    }

    return res;
}

// copy the live cells of src to dst, which is zero and has room for them
// ctx holds the temporary views: up to 2 per stream
void copy_from(ggml_context * ctx, ggml_tensor * src, ggml_tensor * dst, bool trans, const std::vector<uint32_t> & n_used) {
    const blocks b(src, trans);

    const uint32_t n_src = src->ne[1];
    const uint32_t n_dst = dst->ne[1];

    if (ggml_backend_buffer_is_host(src->buffer) && ggml_backend_buffer_is_host(dst->buffer)) {
        for (int64_t s = 0; s < b.n_stream; ++s) {
            const size_t size = n_live(n_used, s, n_src)*b.size_cell;

            for (int64_t i = 0; i < b.n_per_stream; ++i) {
                memcpy((char *) dst->data + b.offset(s, i, n_dst), (const char *) src->data + b.offset(s, i, n_src), size);
            }
        }

        return;
    }

    if (!trans) {
        // one block per stream: device to device where the backend can
        for (int64_t s = 0; s < b.n_stream; ++s) {
            const int64_t n = n_live(n_used, s, n_src)*src->ne[0];
            if (n == 0) {
                continue;
            }

            ggml_tensor * view_src = ggml_view_1d(ctx, src, n, b.offset(s, 0, n_src));
            ggml_tensor * view_dst = ggml_view_1d(ctx, dst, n, b.offset(s, 0, n_dst));

            ggml_backend_view_init(view_src);
            ggml_backend_view_init(view_dst);

            ggml_backend_tensor_copy(view_src, view_dst);
        }

        return;
    }

    // transposed V on a device: n_embd_gqa short blocks per stream. one transfer each way for the layer instead of one per
    // block, through the host. no copy of a whole cache: the next layer reuses the memory
    std::vector<char> data_src(ggml_nbytes(src));
    std::vector<char> data_dst(ggml_nbytes(dst), 0);

    ggml_backend_tensor_get(src, data_src.data(), 0, data_src.size());

    for (int64_t s = 0; s < b.n_stream; ++s) {
        const size_t size = n_live(n_used, s, n_src)*b.size_cell;

        for (int64_t i = 0; i < b.n_per_stream; ++i) {
            memcpy(data_dst.data() + b.offset(s, i, n_dst), data_src.data() + b.offset(s, i, n_src), size);
        }
    }

    ggml_backend_tensor_set(dst, data_dst.data(), 0, data_dst.size());
}

void set_n_cells(ggml_tensor * t, uint32_t n_cells) {
    t->ne[1] = n_cells;
    t->nb[2] = t->nb[1]*t->ne[1];
    t->nb[3] = t->nb[2]*t->ne[2];
}

// point the 2d view of stream s at the current data of t
void set_stream_view(ggml_tensor * view, ggml_tensor * t, int64_t s) {
    set_n_cells(view, t->ne[1]);

    view->nb[1]     = t->nb[1];
    view->nb[2]     = view->nb[1]*view->ne[1];
    view->nb[3]     = view->nb[2];
    view->view_offs = s*t->nb[2];
    view->view_src  = t;
    view->buffer    = nullptr;
    view->data      = nullptr;
    view->extra     = nullptr;

    ggml_backend_view_init(view);
}

// t takes over the buffer, the data and the size of src
void adopt(ggml_tensor * t, const ggml_tensor * src) {
    set_n_cells(t, src->ne[1]);

    t->buffer = nullptr;
    t->data   = nullptr;
    t->extra  = nullptr;

    // initializes t in the buffer, as it did src
    ggml_backend_tensor_alloc(src->buffer, t, src->data);
}

// not every backend implements memset_tensor
void set_zero(ggml_tensor * t, size_t offset, size_t size) {
    if (ggml_backend_buffer_is_host(t->buffer)) {
        memset((char *) t->data + offset, 0, size);
        return;
    }

    static const char zeros[4096] = {};
    for (size_t offs = 0; offs < size; offs += sizeof(zeros)) {
        ggml_backend_tensor_set(t, zeros, offset + offs, std::min(sizeof(zeros), size - offs));
    }
}

// lay out t for n_cells < t->ne[1] inside its buffer
// the live cells move towards lower addresses, in ascending order: what is written was read before
void shrink_layout(ggml_tensor * t, bool trans, uint32_t n_cells, const std::vector<uint32_t> & n_used) {
    const blocks b(t, trans);

    const uint32_t n_old = t->ne[1];

    static constexpr size_t SIZE_CHUNK = 1024*1024;
    char chunk_small[4096];
    std::vector<char> chunk_large;

    const bool is_host = ggml_backend_buffer_is_host(t->buffer);

    for (int64_t s = 0; s < b.n_stream; ++s) {
        const size_t size_live = n_live(n_used, s, n_cells)*b.size_cell;
        const size_t size_full = n_cells*b.size_cell;

        for (int64_t i = 0; i < b.n_per_stream; ++i) {
            const size_t offs_src = b.offset(s, i, n_old);
            const size_t offs_dst = b.offset(s, i, n_cells);

            if (is_host) {
                memmove((char *) t->data + offs_dst, (const char *) t->data + offs_src, size_live);
            } else if (offs_src != offs_dst) {
                char * chunk      = chunk_small;
                size_t size_chunk = sizeof(chunk_small);
                if (size_live > size_chunk) {
                    // a larger chunk is faster, but this runs when memory is short
                    try {
                        chunk_large.resize(SIZE_CHUNK);
                        chunk      = chunk_large.data();
                        size_chunk = chunk_large.size();
                    } catch (const std::bad_alloc &) {
                    }
                }

                for (size_t offs = 0; offs < size_live; offs += size_chunk) {
                    const size_t size = std::min(size_chunk, size_live - offs);

                    ggml_backend_tensor_get(t, chunk, offs_src + offs, size);
                    ggml_backend_tensor_set(t, chunk, offs_dst + offs, size);
                }
            }

            set_zero(t, offs_dst + size_live, size_full - size_live);
        }
    }

    set_n_cells(t, n_cells);
}

} // namespace

llama_kv_storage::llama_kv_storage(buffers_t & bufs, uint32_t n_cells, bool v_trans) :
    bufs(bufs), n_created(bufs.size()), n_cells_cur(n_cells), v_trans(v_trans) {
}

void llama_kv_storage::add_layer(
        ggml_tensor * k,
        ggml_tensor * v,
        const std::vector<ggml_tensor *> & k_stream,
        const std::vector<ggml_tensor *> & v_stream,
        const llama_kv_pages * created) {
    GGML_ASSERT(k && k->ne[1] == n_cells_cur && ggml_is_contiguous(k));
    GGML_ASSERT(!v || (v->ne[1] == n_cells_cur && ggml_is_contiguous(v)));
    GGML_ASSERT((int64_t) k_stream.size() == k->ne[2]);

    layers.push_back({ k, v, k_stream, v_stream, ggml_backend_buffer_get_type(k->buffer), created && created->contains(k->data) });
}

void llama_kv_storage::own(std::unique_ptr<llama_kv_pages> pages) {
    created = std::move(pages);
}

uint32_t llama_kv_storage::n_cells() const {
    return n_cells_cur;
}

size_t llama_kv_storage::n_bytes_copied() const {
    return n_copied;
}

bool llama_kv_storage::try_resize(uint32_t n_cells, const std::vector<uint32_t> & n_used) {
    GGML_ASSERT(n_cells > n_cells_cur);

    if (n_bytes_promised(n_cells, n_used) > llama_kv_limits_available()) {
        return false;
    }

    for (size_t i = 0; i < layers.size(); ++i) {
        if (llama_kv_limits_fail_alloc() || !move_layer(layers[i], n_cells, n_used)) {
            for (size_t j = 0; j < i; ++j) {
                undo_layer(layers[j], n_cells_cur, n_used);
            }

            // give back what the larger buffers hold
            for (size_t j = 0; j < i; ++j) {
                if (llama_kv_limits_fail_alloc() || !move_layer(layers[j], n_cells_cur, n_used)) {
                    break;
                }
            }

            return false;
        }
    }

    release_created();

    n_cells_cur = n_cells;

    return true;
}

void llama_kv_storage::shrink(uint32_t n_cells, const std::vector<uint32_t> & n_used) {
    GGML_ASSERT(n_cells < n_cells_cur);

    for (auto & l : layers) {
        if (llama_kv_limits_fail_alloc() || !move_layer(l, n_cells, n_used)) {
            undo_layer(l, n_cells, n_used);
        }
    }

    release_created();

    n_cells_cur = n_cells;
}

size_t llama_kv_storage::n_bytes_promised(uint32_t n_cells, const std::vector<uint32_t> & n_used) const {
    size_t res = 0;

    for (const auto & l : layers) {
        if (ggml_backend_buft_is_host(l.buft)) {
            res += l.k->nb[1]*n_cells*l.k->ne[2] - n_bytes_live(l.k, false, n_used);
            if (l.v) {
                res += l.v->nb[1]*n_cells*l.v->ne[2] - n_bytes_live(l.v, v_trans, n_used);
            }
        }
    }

    return res;
}

void llama_kv_storage::clear() {
    for (size_t i = 0; i < bufs.size(); ++i) {
        const auto l = std::find_if(layers.begin(), layers.end(), [i](const layer & l) { return l.ibuf == (int32_t) i; });

        if (l != layers.end() && l->pages) {
            l->pages->clear();
        } else if (bufs[i].second) {
            ggml_backend_buffer_clear(bufs[i].second.get(), 0);
        }
    }
}

bool llama_kv_storage::move_layer(layer & l, uint32_t n_cells, const std::vector<uint32_t> & n_used) try {
    ggml_init_params params = {
        /*.mem_size   =*/ size_t(2 + 4*l.k->ne[2])*ggml_tensor_overhead(),
        /*.mem_buffer =*/ NULL,
        /*.no_alloc   =*/ true,
    };

    ggml_context_ptr ctx { ggml_init(params) };
    if (!ctx) {
        return false;
    }

    ggml_tensor * k = ggml_new_tensor_3d(ctx.get(), l.k->type, l.k->ne[0], n_cells, l.k->ne[2]);
    ggml_set_name(k, l.k->name);

    ggml_tensor * v = nullptr;
    if (l.v) {
        v = ggml_new_tensor_3d(ctx.get(), l.v->type, l.v->ne[0], n_cells, l.v->ne[2]);
        ggml_set_name(v, l.v->name);
    }

    // what is written is there twice for a while
    if (ggml_backend_buft_is_host(l.buft)) {
        const size_t n_bytes = n_bytes_live(l.k, false, n_used) + (l.v ? n_bytes_live(l.v, v_trans, n_used) : 0);

        if (n_bytes > llama_kv_limits_available()) {
            return false;
        }
    }

    std::unique_ptr<llama_kv_pages> pages;
    ggml_backend_buffer_ptr buf;

    if (l.has_pages) {
        buf.reset(llama_kv_pages_alloc(ctx.get(), pages));
    } else {
        buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), l.buft));
        if (buf) {
            ggml_backend_buffer_clear(buf.get(), 0);
        }
    }

    if (!buf) {
        return false;
    }

    copy_from(ctx.get(), l.k, k, false, n_used);
    n_copied += n_bytes_live(l.k, false, n_used);

    if (v) {
        copy_from(ctx.get(), l.v, v, v_trans, n_used);
        n_copied += n_bytes_live(l.v, v_trans, n_used);
    }

    if (l.ibuf < 0) {
        bufs.emplace_back(ggml_context_ptr(), ggml_backend_buffer_ptr());
        l.ibuf = (int32_t) bufs.size() - 1;
    }

    // nothing below throws

    adopt(l.k, k);
    for (size_t s = 0; s < l.k_stream.size(); ++s) {
        set_stream_view(l.k_stream[s], l.k, s);
    }

    if (v) {
        adopt(l.v, v);
        for (size_t s = 0; s < l.v_stream.size(); ++s) {
            set_stream_view(l.v_stream[s], l.v, s);
        }
    }

    // frees the previous buffer of the layer
    bufs[l.ibuf].second = std::move(buf);
    l.pages = std::move(pages);

    return true;
} catch (const std::bad_alloc &) {
    return false;
}

void llama_kv_storage::undo_layer(layer & l, uint32_t n_cells, const std::vector<uint32_t> & n_used) {
    shrink_layout(l.k, false, n_cells, n_used);
    for (size_t s = 0; s < l.k_stream.size(); ++s) {
        set_stream_view(l.k_stream[s], l.k, s);
    }

    if (l.v) {
        shrink_layout(l.v, v_trans, n_cells, n_used);
        for (size_t s = 0; s < l.v_stream.size(); ++s) {
            set_stream_view(l.v_stream[s], l.v, s);
        }
    }
}

void llama_kv_storage::release_created() {
    if (created_released || layers.empty()) {
        return;
    }

    created_released = true;

    // the contexts own the tensor objects and have to stay, and every context in bufs has to have a buffer: give each one
    // that of a layer on the same device
    for (size_t i = 0; i < n_created; ++i) {
        const ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(bufs[i].second.get());

        for (auto & l : layers) {
            if (l.ibuf >= (int32_t) n_created && l.buft == buft) {
                bufs[i].second = std::move(bufs[l.ibuf].second);

                // the last entry takes the freed place
                const int32_t ilast = (int32_t) bufs.size() - 1;
                for (auto & o : layers) {
                    if (o.ibuf == ilast) {
                        o.ibuf = l.ibuf;
                        break;
                    }
                }
                std::swap(bufs[l.ibuf], bufs[ilast]);
                bufs.pop_back();

                l.ibuf = (int32_t) i;
                break;
            }
        }
    }

    created.reset();
}
