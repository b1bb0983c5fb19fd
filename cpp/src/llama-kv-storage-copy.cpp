// Storage that grows by copy: the tensors have the rows [0, n) of each stream.
//
// Constraints
//   - One buffer per layer, and a layer's old buffer is freed before the next layer is allocated: the transient of a growth
//     is one layer, not old + new. At the start all layers of a device are in one buffer.
//   - All layers have the same number of rows when resize() returns: the row indices that the graphs write to
//     (set_input_k_idxs, set_input_v_idxs) are shared by all layers and contain it as a stride.
//   - A failed growth needs no memory to be undone: the layers that had already grown are laid out for the old size inside
//     their new, larger buffers. Only then they are moved to smaller ones, if these can be had.
//   - One block of rows is always beyond what can be used, unless all rows are there, see llama-kv-growth.h.
//
// Where the memory is plain host memory, a buffer is a range of pages of its own: new rows are zero without being written,
// take memory when they are used, and a buffer that goes gives it back at once. Such memory is promised and not there, so a
// growth first asks whether all of it can be had, as far as that is known (llama-kv-limits.h); a process that takes it
// meanwhile is not. The accounting counts what is promised as committed.

#include "llama-kv-storage.h"

#include "llama-kv-fault.h"
#include "llama-kv-limits.h"
#include "llama-kv-pages.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace {

// a tensor as blocks of which the first rows are live: one per stream, or for transposed V ne[0] per stream
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

// rows of stream s that are live in a tensor with n_rows rows
uint32_t n_live(const std::vector<uint32_t> & n_used, int64_t s, uint32_t n_rows) {
    return std::min(n_used.at(s), n_rows);
}

size_t n_bytes_live(const ggml_tensor * t, bool trans, const std::vector<uint32_t> & n_used) {
    const blocks b(t, trans);

    size_t res = 0;
    for (int64_t s = 0; s < b.n_stream; ++s) {
        res += b.n_per_stream*n_live(n_used, s, t->ne[1])*b.size_row;
    }

    return res;
}

// n bytes from one place to another on the same device, without the host where the backend can
void copy_bytes(ggml_context * ctx, ggml_tensor * src, size_t offs_src, ggml_tensor * dst, size_t offs_dst, size_t n) {
    const size_t size_el = ggml_row_size(src->type, src->ne[0]);

    ggml_tensor * view_src = ggml_view_1d(ctx, src, n/size_el*src->ne[0], offs_src);
    ggml_tensor * view_dst = ggml_view_1d(ctx, dst, n/size_el*src->ne[0], offs_dst);

    ggml_backend_view_init(view_src);
    ggml_backend_view_init(view_dst);

    ggml_backend_tensor_copy(view_src, view_dst);
}

// copy the live rows of src to dst, which is zero and has room for them
// ctx holds the temporary views: up to 2 per stream
void copy_from(ggml_context * ctx, ggml_tensor * src, ggml_tensor * dst, bool trans, const std::vector<uint32_t> & n_used) {
    const blocks b(src, trans);

    const uint32_t n_src = src->ne[1];
    const uint32_t n_dst = dst->ne[1];

    // transposed V on a device: ne[0] short blocks per stream. one transfer each way for the layer instead of one per block,
    // through the host. no copy of a whole cache: the next layer reuses the memory
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

void set_n_rows(ggml_tensor * t, uint32_t n_rows) {
    t->ne[1] = n_rows;
    t->nb[2] = t->nb[1]*t->ne[1];
    t->nb[3] = t->nb[2]*t->ne[2];
}

// the 2d view of stream s follows t
void set_stream_view(ggml_tensor * view, ggml_tensor * t, int64_t s) {
    set_n_rows(view, t->ne[1]);

    view->nb[1]     = t->nb[1];
    view->nb[2]     = view->nb[1]*view->ne[1];
    view->nb[3]     = view->nb[2];
    view->view_offs = s*t->nb[2];
    view->view_src  = t;
    view->buffer    = nullptr;
    view->data      = nullptr;
    view->extra     = nullptr;

    if (t->buffer) {
        ggml_backend_view_init(view);
    }
}

// t takes over the buffer, the data and the size of src
void adopt(ggml_tensor * t, const ggml_tensor * src) {
    set_n_rows(t, src->ne[1]);

    t->buffer = nullptr;
    t->data   = nullptr;
    t->extra  = nullptr;

    // initializes t in the buffer, as it did src
    ggml_backend_tensor_alloc(src->buffer, t, src->data);
}

// lay out t for n_rows < t->ne[1] inside its buffer
// the live rows move towards lower addresses, in ascending order: what is written was read before
void shrink_layout(ggml_tensor * t, bool trans, uint32_t n_rows, const std::vector<uint32_t> & n_used) {
    const blocks b(t, trans);

    const uint32_t n_old = t->ne[1];

    // on a device: one transfer each way, or in small pieces if there is no memory for that
    const bool is_host = ggml_backend_buffer_is_host(t->buffer);

    std::vector<char> copy;
    if (!is_host) {
        try {
            copy.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, copy.data(), 0, copy.size());
        } catch (const std::bad_alloc &) {
        }
    }

    char * data = is_host ? (char *) t->data : copy.empty() ? nullptr : copy.data();

    for (int64_t s = 0; s < b.n_stream; ++s) {
        const size_t size_live = n_live(n_used, s, n_rows)*b.size_row;
        const size_t size_full = n_rows*b.size_row;

        for (int64_t i = 0; i < b.n_per_stream; ++i) {
            const size_t offs_src = b.offset(s, i, n_old);
            const size_t offs_dst = b.offset(s, i, n_rows);

            if (data) {
                memmove(data + offs_dst, data + offs_src, size_live);
                memset (data + offs_dst + size_live, 0, size_full - size_live);
                continue;
            }

            char piece[4096];
            for (size_t offs = 0; offs < size_full; offs += sizeof(piece)) {
                const size_t size = std::min(sizeof(piece), size_full - offs);
                const size_t live = std::min(size, size_live - std::min(size_live, offs));

                memset(piece, 0, size);
                if (live > 0) {
                    ggml_backend_tensor_get(t, piece, offs_src + offs, live);
                }
                ggml_backend_tensor_set(t, piece, offs_dst + offs, size);
            }
        }
    }

    if (!copy.empty()) {
        ggml_backend_tensor_set(t, data, 0, b.offset(b.n_stream, 0, n_rows));
    }

    set_n_rows(t, n_rows);
}

class storage_copy : public llama_kv_storage {
public:
    storage_copy(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, buffers_t & bufs) :
        llama_kv_storage(n_stream, { n_rows, n_pad, 0, false, llama_kv_fault_step(LLAMA_KV_GROWTH_STEP_BYTES) }),
        v_trans(v_trans), bufs(bufs) {
        cur = start;
    }

    const char * name() const override {
        return "by copy";
    }

    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers_ctx) override {
        for (const auto & l : layers_ctx) {
            set_layout(l, [&](ggml_tensor * t, bool) { set_n_rows(t, n_rows()); });
        }

        ggml_backend_buffer_t res = alloc_buffer(ctx, buft);

        for (size_t i = 0; i < layers_ctx.size() && res; ++i) {
            layers.push_back({ layers_ctx[i], buft });
        }

        return res;
    }

    uint32_t n_rows() const override {
        return cur.end();
    }

    bool has(uint32_t s, uint32_t i) const override {
        (void) s;

        return i < growth.usable(n_rows());
    }

    llama_kv_rows next(const llama_kv_rows & need, bool ahead, size_t n_bytes_row) const override {
        llama_kv_growth policy = growth;
        policy.n_bytes_cell = n_bytes_row;

        return prefix(std::max(n_rows(), ahead ? policy.next(n_rows(), need.end()) : policy.smallest(need.end())));
    }

    bool may_shrink(uint32_t n_used, uint32_t n_peak) const override {
        return growth.shrink(n_rows(), n_used/cur.n_stream(), n_peak) < n_rows();
    }

    llama_kv_rows rest(const llama_kv_rows & used, uint32_t n_peak) const override {
        return prefix(growth.shrink(n_rows(), used.end(), n_peak));
    }

    bool resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used) override {
        const uint32_t n_old = n_rows();
        const uint32_t n_new = rows.end();

        if (n_new == n_old) {
            return true;
        }

        if (n_new > n_old && n_bytes_promised(n_new, n_used) > llama_kv_limits_available()) {
            return false;
        }

        is_moved = true; // also when it fails: a layer may have a new buffer

        for (size_t i = 0; i < layers.size(); ++i) {
            if (!llama_kv_fault_alloc() && move_layer(layers[i], n_new, n_used)) {
                continue;
            }

            if (n_new < n_old) {
                shrink_layer(layers[i], n_new, n_used);
                continue;
            }

            for (size_t j = 0; j < i; ++j) {
                shrink_layer(layers[j], n_old, n_used);
            }

            // give back what the larger buffers hold
            for (size_t j = 0; j < i; ++j) {
                if (llama_kv_fault_alloc() || !move_layer(layers[j], n_old, n_used)) {
                    break;
                }
            }

            return false;
        }

        release_created();

        cur = rows;

        return true;
    }

private:
    struct own_layer {
        layer l;

        ggml_backend_buffer_type_t buft; // that it was created with

        int32_t i_buf = -1; // of its own buffer, in bufs. -1: still in the one that it was created in
    };

    llama_kv_rows prefix(uint32_t n) const {
        auto res = cur.none();
        res.add(0, n);
        return res;
    }

    // f(tensor, whether it is transposed), and the views follow
    template <typename F>
    void set_layout(const layer & l, F && f) const {
        f(l.k, false);
        for (size_t s = 0; s < l.k_stream.size(); ++s) {
            set_stream_view(l.k_stream[s], l.k, s);
        }

        if (l.v) {
            f(l.v, v_trans);
            for (size_t s = 0; s < l.v_stream.size(); ++s) {
                set_stream_view(l.v_stream[s], l.v, s);
            }
        }
    }

    // zero
    static ggml_backend_buffer_t alloc_buffer(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
        if (buft == ggml_backend_cpu_buffer_type()) {
            return llama_kv_pages_alloc(ctx);
        }

        ggml_backend_buffer_t res = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
        if (res) {
            ggml_backend_buffer_clear(res, 0);
        }

        return res;
    }

    size_t n_bytes_live_of(const layer & l, const std::vector<uint32_t> & n_used) const {
        return n_bytes_live(l.k, false, n_used) + (l.v ? n_bytes_live(l.v, v_trans, n_used) : 0);
    }

    // bytes of host memory that n rows would take beyond what the live ones take now
    size_t n_bytes_promised(uint32_t n, const std::vector<uint32_t> & n_used) const {
        size_t res = 0;

        for (const auto & [l, buft, _] : layers) {
            if (ggml_backend_buft_is_host(buft)) {
                res += l.k->nb[1]*n*l.k->ne[2] + (l.v ? l.v->nb[1]*n*l.v->ne[2] : 0) - n_bytes_live_of(l, n_used);
            }
        }

        return res;
    }

    // to a buffer of its own with n rows
    bool move_layer(own_layer & own, uint32_t n, const std::vector<uint32_t> & n_used) try {
        const layer & l = own.l;

        ggml_init_params params = {
            /*.mem_size   =*/ size_t(2 + 4*l.k->ne[2])*ggml_tensor_overhead(),
            /*.mem_buffer =*/ NULL,
            /*.no_alloc   =*/ true,
        };

        ggml_context_ptr ctx { ggml_init(params) };
        if (!ctx) {
            return false;
        }

        const auto new_tensor = [&](const ggml_tensor * t) {
            return t ? ggml_set_name(ggml_new_tensor_3d(ctx.get(), t->type, t->ne[0], n, t->ne[2]), t->name) : nullptr;
        };

        ggml_tensor * k = new_tensor(l.k);
        ggml_tensor * v = new_tensor(l.v);

        // what is written is there twice for a while
        if (ggml_backend_buft_is_host(own.buft) && n_bytes_live_of(l, n_used) > llama_kv_limits_available()) {
            return false;
        }

        ggml_backend_buffer_ptr buf { alloc_buffer(ctx.get(), own.buft) };
        if (!buf) {
            return false;
        }

        copy_from(ctx.get(), l.k, k, false, n_used);
        if (v) {
            copy_from(ctx.get(), l.v, v, v_trans, n_used);
        }
        n_copied += n_bytes_live_of(l, n_used);

        if (own.i_buf < 0) {
            bufs.emplace_back(ggml_context_ptr(), ggml_backend_buffer_ptr());
            own.i_buf = bufs.size() - 1;
        }

        // nothing below throws

        set_layout(l, [&](ggml_tensor * t, bool) { adopt(t, t == l.k ? k : v); });

        bufs[own.i_buf].second = std::move(buf); // frees the previous one

        return true;
    } catch (const std::bad_alloc &) {
        return false;
    }

    // the buffers that layers were created in. the contexts own the tensor objects and stay, each with a buffer
    void release_created() {
        if (!std::all_of(layers.begin(), layers.end(), [](const own_layer & own) { return own.i_buf >= 0; })) {
            return;
        }

        for (auto & [ctx, buf] : bufs) {
            if (ctx && ggml_backend_buffer_get_size(buf.get()) > 0) {
                buf.reset(ggml_backend_buft_alloc_buffer(ggml_backend_buffer_get_type(buf.get()), 0));
            }
        }
    }

    // inside the buffer that it has
    void shrink_layer(own_layer & own, uint32_t n, const std::vector<uint32_t> & n_used) const {
        set_layout(own.l, [&](ggml_tensor * t, bool trans) { shrink_layout(t, trans, n, n_used); });
    }

    const bool v_trans;

    buffers_t & bufs;

    std::vector<own_layer> layers;
};

} // namespace

std::unique_ptr<llama_kv_storage> llama_kv_storage::create_copy(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, buffers_t & bufs) {
    return std::make_unique<storage_copy>(n_stream, n_rows, n_pad, v_trans, bufs);
}
