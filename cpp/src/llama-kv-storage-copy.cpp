// Storage that grows by copy. The tensors have the rows [0, n) of each stream.
//
// Constraints
//   - Each layer has its own buffer. The old buffer of a layer is freed before the next layer is allocated. So a growth needs
//     extra memory for one layer, not for the whole cache. At the start, all layers of a device are in one buffer.
//   - All layers have the same number of rows when try_resize() returns. The reason is that all layers share the row indices that
//     the graphs write to (set_input_k_idxs, set_input_v_idxs), and the indices depend on the number of rows.
//   - Undoing a failed growth needs no memory. The layers that have already grown change to the layout of the old size inside
//     their new, larger buffers. After that, they move to smaller buffers, if these can be allocated.
//   - A change to smaller types in pages of host memory moves no layer: the new rows overwrite the old rows, and the pages after
//     them are freed. Otherwise, a change of types moves the rows to a new buffer, as a growth does.
//   - The last block of rows is never used, unless all rows exist, see llama-kv-growth.h.
//
// In plain host memory, each buffer is a range of pages. New rows are zero without a write, and they use memory only after the
// first write. A freed buffer returns its memory at once. Because such memory is promised but not allocated, a growth first
// checks whether all of it is available, as far as that is known (llama-kv-limits.h). Another process can still allocate the
// memory after the check. The accounting counts promised memory as committed.

#include "llama-kv-storage.h"

#include "llama-impl.h"
#include "llama-kv-fault.h"
#include "llama-kv-layout.h"
#include "llama-kv-limits.h"
#include "llama-kv-pages.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <map>
#include <new>
#include <utility>

namespace {

class storage_copy : public llama_kv_storage {
public:
    storage_copy(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, buffers_t & bufs, bool is_fixed = false) :
        llama_kv_storage(n_stream, { n_rows, n_pad, 0, false, llama_kv_fault_step(LLAMA_KV_GROWTH_STEP_BYTES) }),
        v_trans(v_trans), is_fixed(is_fixed), bufs(bufs) {
        if (is_fixed) {
            start.add(0, n_rows);
        }
        cur = start;
    }

    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers_ctx) override {
        for (size_t i = 0; i < layers_ctx.size() && !is_fixed; ++i) {
            set_layout(layers_ctx[i], v_trans, [&](ggml_tensor * t, bool) { llama_kv_set_n_rows(t, n_rows()); });
        }

        ggml_backend_buffer_ptr res(llama_kv_alloc_zero(ctx, buft, !is_fixed));

        for (size_t i = 0; i < layers_ctx.size() && res; ++i) {
            layers.push_back({ layers_ctx[i], buft, ctx });
        }

        return res.release();
    }

    uint32_t n_rows() const override { return cur.end(); }

    bool has_size() const override { return true; }

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

    size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const override {
        size_t res = 0;
        for (const auto & own : layers) {
            res += in_pages(n_bytes_in(own.l.k, type_k, rows.end())) + in_pages(n_bytes_in(own.l.v, type_v, rows.end()));
        }

        return res;
    }

    bool try_resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used) override {
        const uint32_t n_old = n_rows();
        const uint32_t n_new = rows.end();

        if (n_new == n_old) {
            return true;
        }

        if (n_new > n_old && !has_memory(n_new, n_used)) {
            return false;
        }

        is_moved = true; // also if the function fails, because a layer may have a new buffer

        for (size_t i = 0; i < layers.size(); ++i) {
            if (move_layer(layers[i], n_new, n_used)) {
                continue;
            }

            if (n_new < n_old) {
                shrink_layer(layers[i], n_new, n_used);
                continue;
            }

            for (size_t j = 0; j < i; ++j) {
                shrink_layer(layers[j], n_old, n_used);
            }

            // move the layers to smaller buffers again, as long as these can be allocated
            for (size_t j = 0; j < i && move_layer(layers[j], n_old, n_used); ++j) {}
            return false;
        }

        cur = rows;

        release_created();

        return true;
    }

    bool prepare_types(ggml_type type_k, ggml_type type_v, const std::vector<uint32_t> & n_used) override {
        next_k    = type_k;
        next_v    = type_v;
        next_wide = any([&](const own_layer & own) { return is_wider(own.l, type_k, type_v); });
        try {
            next_n_used = n_used;
            bufs.reserve(bufs.size() + layers.size()); // move_in() must not throw

            // The first buffer contains several layers, and is freed when the last of them has its own buffer. So either all
            // layers get their buffers in advance, or none does. If none does, a layer exists twice for a moment. On a device,
            // the second copy may use the memory that the margin keeps free, because no batch runs at that time.
            const auto must_leave = [&](const own_layer & own) { return is_created(own) && !stays(own); };

            bool has_all = (next_wide || any(must_leave)) && has_memory_beside(type_k, type_v);

            for (size_t i = 0; i < layers.size() && has_all; ++i) {
                new_layers.push_back(stays(layers[i]) ? new_layer() : make_layer(layers[i], n_rows(), type_k, type_v, n_used));
                has_all = stays(layers[i]) || new_layers.back().buf != nullptr;
            }
            if (!has_all) {
                forget_types();
            }

            return has_all || !next_wide;
        } catch (const std::bad_alloc &) {
            forget_types();
            return false;
        }
    }

    bool set_types(const llama_kv_convert & convert) override {
        const auto & n_used = next_n_used;
        is_moved = true;

        for (size_t i = 0; i < layers.size(); ++i) {
            auto & own = layers[i];

            new_layer to = !new_layers.empty() ? std::move(new_layers[i]) :
                is_created(own) || stays(own) ? new_layer() : make_layer(own, n_rows(), next_k, next_v, n_used);

            if (to.buf) {
                convert_rows(convert, own.l.k, to.k, false, n_used);
                if (own.l.v) {
                    convert_rows(convert, own.l.v, to.v, true, n_used);
                }

                move_in(own, to);
                continue;
            }

            // convert inside of the buffer. New rows are not larger, so the first r + 1 new rows end no later than the first r + 1
            // old rows
            set_layout(own.l, v_trans, [&](ggml_tensor * t, bool trans) {
                ggml_tensor dst = *t;
                llama_kv_set_type(&dst, t == own.l.k ? next_k : next_v);
                if (dst.type == t->type) {
                    return;
                }

                convert_rows(convert, t, &dst, t == own.l.v, n_used);

                const size_t n_bytes_old = in_pages(ggml_nbytes(t));

                llama_kv_set_type(t, dst.type);

                llama_kv_pages * pages = llama_kv_pages_of_host(t->buffer);
                if (!pages) {
                    llama_kv_shrink_layout(t, trans, n_rows(), n_used);
                    ggml_backend_buffer_init_tensor(t->buffer, t); // initialize the bytes after the tensor that kernels read
                    return;
                }

                const size_t offset = (char *) t->data - pages->data();
                llama_kv_each_gap(t, trans, cur, n_used, n_bytes_old, [&](size_t offs, size_t size) { pages->vacate(offset + offs, size); });
                llama_kv_paged_buffer::shrink(t->buffer, n_bytes_old - in_pages(ggml_nbytes(t)));
            });
        }

        forget_types();
        release_created();

        return true;
    }

    void forget_types() override { new_layers.clear(); }

private:
    struct own_layer {
        layer l;

        ggml_backend_buffer_type_t buft; // buffer type that the layer was created with

        const ggml_context * ctx; // context of the tensors. the layer's first buffer is beside it in bufs

        int32_t i_buf = -1; // index in bufs of the layer's own buffer. -1: the layer is still in the first buffer
    };

    static bool is_created(const own_layer & own) { return own.i_buf < 0; }

    // check whether the rows of the layer change to the next types inside of their buffer, although there may be memory for a copy
    // In pages of host memory, this is faster than a copy, which needs new pages, and it frees the same pages.
    bool stays(const own_layer & own) const { return !next_wide && llama_kv_pages_of_host(own.l.k->buffer); }

    // return the bytes of the pages of a tensor of n bytes in host memory
    static size_t in_pages(size_t n) { return GGML_PAD(n, llama_kv_pages_size_host()); }

    template <typename F>
    bool any(F && f) const { return std::any_of(layers.begin(), layers.end(), f); }

    void convert_rows(const llama_kv_convert & convert, ggml_tensor * src, ggml_tensor * dst, bool is_v, const std::vector<uint32_t> & n_used) const {
        for (int64_t s = 0; s < src->ne[2]; ++s) {
            llama_kv_each_lines(src, dst, is_v && v_trans, s, 0, std::min(n_used[s], n_rows()),
                    [&](const llama_kv_lines & from, const llama_kv_lines & to) { convert(from, to, is_v); });
        }
    }

    llama_kv_rows prefix(uint32_t n) const {
        auto res = cur.none();
        res.add(0, n);
        return res;
    }

    static size_t n_bytes_live_of(const ggml_tensor * k, const ggml_tensor * v, const std::vector<uint32_t> & n_used) {
        size_t n = 0;
        for (const uint32_t n_cur : n_used) {
            n += std::min<size_t>(n_cur, k->ne[1]);
        }

        return n*(k->nb[1] + (v ? v->nb[1] : 0));
    }

    static size_t n_bytes_in(const ggml_tensor * t, ggml_type type, size_t n) {
        return t ? ggml_row_size(type, t->ne[0])*n*t->ne[2] : 0;
    }

    static size_t n_bytes_of(const layer & l, uint32_t n) {
        return (l.k->nb[1]*l.k->ne[2] + (l.v ? l.v->nb[1]*l.v->ne[2] : 0))*n;
    }

    // check whether the device supports a tensor of n rows, because a device can limit the size of a tensor (Vulkan)
    // Without the check, the scheduler would end the process, because no backend supports the operation.
    static bool is_supported(const ggml_tensor * t, ggml_backend_buffer_type_t buft, uint32_t n) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
        if (!t || !dev) {
            return true;
        }

        ggml_tensor probe = *t;
        llama_kv_set_n_rows(&probe, n);

        // the second condition: the device does not even support the current tensor, so the size is not the reason
        const bool res = ggml_backend_dev_supports_op(dev, &probe) || !ggml_backend_dev_supports_op(dev, t);
        if (!res) {
            LLAMA_LOG_WARN("%s: %s takes no tensor of %.2f MiB\n", __func__, ggml_backend_buft_name(buft), ggml_nbytes(&probe)/1024.0/1024.0);
        }

        return res;
    }

    // check whether there is memory for n rows, as far as that is known
    bool has_memory(uint32_t n, const std::vector<uint32_t> & n_used) const {
        if (any([&](const own_layer & own) { return !is_supported(own.l.k, own.buft, n) || !is_supported(own.l.v, own.buft, n); })) {
            return false;
        }

        // for each buffer type: the additional bytes after the growth, and the bytes of the largest old buffer
        std::map<ggml_backend_buffer_type_t, std::pair<size_t, size_t>> all;

        for (const auto & own : layers) {
            // n_back: bytes that are free again after the layer has moved
            //   host memory:          the bytes of the live rows, because host memory is allocated on the first write
            //   device, own buffer:   the bytes of the old buffer, which is freed when the layer has its larger buffer
            //   device, first buffer: 0. this buffer contains several layers, and is freed only when the last of them has moved
            const bool   is_host = ggml_backend_buft_is_host(own.buft);
            const size_t n_back  = is_host ? n_bytes_live_of(own.l.k, own.l.v, n_used) : is_created(own) ? 0 : n_bytes_of(own.l, n_rows());

            auto & [more, last] = all[own.buft];

            more += n_bytes_of(own.l, n) - std::min(n_bytes_of(own.l, n), n_back);
            last  = std::max(last, is_host ? 0 : n_back);
        }

        return std::all_of(all.begin(), all.end(), [](const auto & part) { return llama_kv_limits_have(part.first, part.second.first + part.second.second); });
    }

    // check whether devices have memory for all layers in these types in addition to the current layers. make_layer() checks host
    // memory
    bool has_memory_beside(ggml_type type_k, ggml_type type_v) const {
        std::map<ggml_backend_buffer_type_t, size_t> all;

        for (const auto & own : layers) {
            all[own.buft] += n_bytes_in(own.l.k, type_k, n_rows()) + n_bytes_in(own.l.v, type_v, n_rows());
        }

        return std::all_of(all.begin(), all.end(), [](const auto & part) {
            return ggml_backend_buft_is_host(part.first) || llama_kv_limits_have(part.first, part.second);
        });
    }

    // a zeroed buffer of its own for a layer of n rows. buf is null if there is no memory
    struct new_layer {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;

        ggml_tensor * k;
        ggml_tensor * v;
    };

    new_layer make_layer(const own_layer & own, uint32_t n, ggml_type type_k, ggml_type type_v, const std::vector<uint32_t> & n_used) const try {
        const layer & l = own.l;

        new_layer res = {};

        res.ctx.reset(llama_kv_fault_alloc() ? nullptr : ggml_init({ size_t(2 + 4*l.k->ne[2])*ggml_tensor_overhead(), nullptr, true }));
        if (!res.ctx) {
            return {};
        }

        const auto new_tensor = [&](const ggml_tensor * t, ggml_type type) {
            return t ? ggml_set_name(ggml_new_tensor_3d(res.ctx.get(), type, t->ne[0], n, t->ne[2]), t->name) : nullptr;
        };

        res.k = new_tensor(l.k, type_k);
        res.v = new_tensor(l.v, type_v);

        // the pages that are written exist twice until the old buffer is freed
        if (ggml_backend_buft_is_host(own.buft) && !llama_kv_limits_allow(n_bytes_live_of(res.k, res.v, n_used))) {
            return {};
        }

        res.buf.reset(llama_kv_alloc_zero(res.ctx.get(), own.buft));

        return res;
    } catch (const std::bad_alloc &) {
        return {};
    }

    // use the new buffer for the rows of the layer from now on. If the layer already had its own buffer, free that buffer
    // If the layer was in the first buffer, and this buffer is host memory with pages, free the pages of the layer there.
    void move_in(own_layer & own, new_layer & to) {
        const bool was_created = is_created(own);
        if (was_created) {
            bufs.emplace_back(ggml_context_ptr(), ggml_backend_buffer_ptr());
            own.i_buf = bufs.size() - 1;
        }

        // nothing below throws

        set_layout(own.l, v_trans, [&](ggml_tensor * t, bool) {
            llama_kv_pages * pages = was_created ? llama_kv_pages_of_host(t->buffer) : nullptr;
            if (pages) {
                const size_t n_bytes = in_pages(ggml_nbytes(t));

                pages->vacate((char *) t->data - pages->data(), n_bytes);
                llama_kv_paged_buffer::shrink(t->buffer, n_bytes);
            }

            llama_kv_adopt(t, t == own.l.k ? to.k : to.v);
        });

        bufs[own.i_buf].second = std::move(to.buf);
    }

    // move a layer to a buffer of its own with n rows. returns false if there is no memory
    bool move_layer(own_layer & own, uint32_t n, const std::vector<uint32_t> & n_used) try {
        const layer & l = own.l;

        new_layer to = make_layer(own, n, l.k->type, l.v ? l.v->type : l.k->type, n_used);
        if (!to.buf) {
            return false;
        }

        llama_kv_copy_from(to.ctx.get(), l.k, to.k, false, n_used);
        if (to.v) {
            llama_kv_copy_from(to.ctx.get(), l.v, to.v, v_trans, n_used);
        }
        n_copied += n_bytes_live_of(l.k, l.v, n_used);

        move_in(own, to);

        return true;
    } catch (const std::bad_alloc &) {
        return false;
    }

    // free the buffers that layers were created in, if no layer uses them any more
    // The ggml contexts own the tensor objects and stay. Each of them needs a buffer, so it gets an empty one.
    void release_created() try {
        for (auto & entry : bufs) {
            auto & buf = entry.second;

            const bool is_used  = any([&](const own_layer & own) { return is_created(own) && own.ctx == entry.first.get(); });
            const bool is_empty = ggml_backend_buffer_get_size(buf.get()) == 0 && !llama_kv_pages_of_host(buf.get());

            if (entry.first && !is_used && !is_empty) {
                buf.reset(ggml_backend_buft_alloc_buffer(ggml_backend_buffer_get_type(buf.get()), 0));
            }
        }
    } catch (const std::bad_alloc &) { // the next try_resize() tries again
    }

    // change a layer to n rows inside of its current buffer
    void shrink_layer(own_layer & own, uint32_t n, const std::vector<uint32_t> & n_used) const {
        set_layout(own.l, v_trans, [&](ggml_tensor * t, bool trans) { llama_kv_shrink_layout(t, trans, n, n_used); });
    }

    const bool v_trans;
    const bool is_fixed;

    buffers_t & bufs;

    std::vector<own_layer> layers;

    // data from prepare_types() for set_types()
    ggml_type             next_k = GGML_TYPE_COUNT;
    ggml_type             next_v = GGML_TYPE_COUNT;
    bool                  next_wide = false; // the next types make a row larger
    std::vector<uint32_t> next_n_used;
    std::vector<new_layer> new_layers; // for all layers, or empty
};

} // namespace

std::unique_ptr<llama_kv_storage> llama_kv_storage_create_copy(
        uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, llama_kv_storage::buffers_t & bufs) {
    return std::make_unique<storage_copy>(n_stream, n_rows, n_pad, v_trans, bufs);
}

std::unique_ptr<llama_kv_storage> llama_kv_storage_create_fixed(
        uint32_t n_stream, uint32_t n_rows, bool v_trans, llama_kv_storage::buffers_t & bufs) {
    return std::make_unique<storage_copy>(n_stream, n_rows, 1, v_trans, bufs, true);
}
