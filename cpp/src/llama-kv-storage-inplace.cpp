// Storage whose rows come and go in place. What grows is, per stream, a set of blocks of rows; holes in the middle are blocks
// that are not in it.
//
// LLAMA_KV_DYNAMIC_STORAGE=copy makes growth by copy the way everywhere.

#include "llama-kv-storage.h"

#include "llama-impl.h"
#include "llama-kv-fault.h"
#include "llama-kv-layout.h"
#include "llama-kv-pages.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <tuple>

namespace {

class storage_inplace : public llama_kv_storage {
public:
    storage_inplace(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, buffers_t & bufs) :
        llama_kv_storage(n_stream, { n_rows, n_pad, 0, true }), v_trans(v_trans), bufs(bufs) {
    }

    const char * name() const override {
        return "in place";
    }

    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers_ctx) override {
        GGML_ASSERT(buft == ggml_backend_cpu_buffer_type() && !buf);

        buf = llama_kv_pages_alloc(ctx);
        if (!buf) {
            return nullptr;
        }

        layers = layers_ctx;

        set_strips();

        if (!resize(start, {})) {
            for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
                t->buffer = nullptr;
                t->data   = nullptr;
            }
            ggml_backend_buffer_free(std::exchange(buf, nullptr));
            layers.clear();
            strips.clear();
            return nullptr;
        }

        LLAMA_LOG_INFO("%s: KV memory reserved = %8.2f MiB, committed = %8.2f MiB\n", __func__,
                llama_kv_pages_of(buf).size()/1024.0/1024.0, llama_kv_pages_of(buf).n_bytes_committed()/1024.0/1024.0);

        return buf;
    }

    bool has(uint32_t s, uint32_t i) const override {
        return cur.has(s, i);
    }

    uint32_t dummy_row() const override {
        return growth.n_max - 1;
    }

    // what is needed, and some more behind the last run of it in each stream
    llama_kv_rows next(const llama_kv_rows & need, bool ahead, size_t n_bytes_row) const override {
        (void) n_bytes_row; // no two caches have to take the same steps

        auto res = cur;
        res |= need;

        for (uint32_t s = 0; ahead && s < cur.n_stream(); ++s) {
            const auto runs = need.runs(s);
            if (!runs.empty()) {
                res.add(s, runs.back().first, growth.next(runs.back().first, runs.back().second));
            }
        }

        return res;
    }

    bool may_shrink(uint32_t n_used, uint32_t n_peak) const override {
        (void) n_peak;

        const uint32_t n_cur = cur.size();

        return all_streams().shrink(n_cur, n_used, n_cur) < n_cur;
    }

    llama_kv_rows rest(const llama_kv_rows & used, uint32_t n_peak) const override {
        (void) n_peak;

        auto res = start;
        res |= used;
        res &= cur; // what was given out but not committed stays so: such a row has nothing in it

        const uint32_t n_cur = cur.size();

        return all_streams().shrink(n_cur, res.size(), n_cur) < n_cur ? res : cur;
    }

    bool resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used) override {
        (void) n_used;

        if (!commit(llama_kv_pages_of(buf), rows, strips)) {
            return false;
        }

        cur = rows;

        llama_kv_pages_show(buf);

        return true;
    }

    size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const override {
        const size_t size_page = llama_kv_pages::page_size();

        // each tensor starts on a page of its own
        const auto n_pages = [&](const ggml_tensor * t, ggml_type type, bool trans) {
            const size_t size = trans ? ggml_type_size(type) : ggml_row_size(type, t->ne[0]);
            const size_t n    = trans ? t->ne[0] : 1;

            size_t res  = 0;
            size_t last = 0; // after the last page that was counted

            for (uint32_t s = 0; s < rows.n_stream(); ++s) {
                const auto runs = rows.runs(s);

                for (size_t j = 0; j < n; ++j) {
                    for (const auto & [i0, i1] : runs) {
                        const size_t offs = (s*n + j)*growth.n_max;
                        const size_t p0   = std::max(last, (offs + i0)*size/size_page);
                        const size_t p1   = ((offs + i1)*size - 1)/size_page + 1;

                        res += p1 > p0 ? p1 - p0 : 0;
                        last = std::max(last, p1);
                    }
                }
            }

            return res;
        };

        size_t res = 0;
        for (const auto & l : layers) {
            res += n_pages(l.k, type_k, false) + (l.v ? n_pages(l.v, type_v, v_trans) : 0);
        }

        return res*size_page;
    }

    bool clear(int32_t s) override {
        auto gone = cur.none();
        auto rest = cur;

        for (uint32_t i = 0; i < cur.n_stream(); ++i) {
            if (s < 0 || i == (uint32_t) s) {
                gone.add(i, 0, growth.n_max);
                rest.set_stream(i, start, i);
            }
        }
        rest &= cur;

        // what goes back is zero when it comes again. what shares a page with rows that stay does not go, be it freed before
        resize(rest, {});
        set_zero(gone);

        return true;
    }

    bool copy_stream(uint32_t ssrc, uint32_t sdst) override {
        // the static cache copies the whole stream: what is not there is zero, also in pages that it shares with what is copied
        auto gone = cur.none();
        auto here = cur.none();
        gone.add(sdst, 0, growth.n_max);
        here.set_stream(sdst, cur, ssrc);
        gone -= here;
        set_zero(gone);

        for (const auto & [i0, i1] : cur.runs(ssrc)) {
            for (const auto & t : strips) {
                for (size_t j = 0; j < t.n; ++j) {
                    memcpy(address(t, sdst, j, i0), address(t, ssrc, j, i0), (i1 - i0)*t.size);
                }
            }
        }

        return true;
    }

    // the same rows on other addresses. what was converted goes back before the next part is
    bool prepare_types(ggml_type type_k, ggml_type type_v, const std::vector<uint32_t> & n_used) override {
        ggml_init_params params = {
            /*.mem_size   =*/ 2*layers.size()*ggml_tensor_overhead(),
            /*.mem_buffer =*/ NULL,
            /*.no_alloc   =*/ true,
        };

        to_ctx.reset(llama_kv_fault_alloc() ? nullptr : ggml_init(params));
        if (!to_ctx) {
            return false;
        }

        bool is_larger = false;

        try {
            for (const auto & l : layers) {
                const auto add = [&](const ggml_tensor * t, ggml_type type) {
                    return t ? ggml_set_name(ggml_new_tensor_3d(to_ctx.get(), type, t->ne[0], t->ne[1], t->ne[2]), t->name) : nullptr;
                };

                to_layers.emplace_back(add(l.k, type_k), add(l.v, type_v));

                is_larger |= is_wider(l, type_k, type_v);
            }

            to_buf.reset(llama_kv_pages_alloc(to_ctx.get()));

            for (uint32_t s = 0; s < cur.n_stream(); ++s) {
                for (const auto & [i0, i1] : cur.runs(s)) {
                    to_runs.emplace_back(s, i0, std::max(i0, std::min(i1, n_used[s])));
                }
            }

            std::vector<strip> to_strips;
            for (const auto & [k, v] : to_layers) {
                add_strips(to_strips, k, v);
            }

            if (to_buf && (!is_larger || commit(llama_kv_pages_of(to_buf.get()), cur, to_strips))) {
                return true;
            }
        } catch (const std::bad_alloc &) {
        }

        forget_types();

        return false;
    }

    void set_types(const llama_kv_convert & convert, const std::vector<uint32_t> & n_used) override {
        (void) n_used; // to_runs

        is_moved = true;

        auto & pages_new = llama_kv_pages_of(to_buf.get());

        for (size_t i = 0; i < layers.size(); ++i) {
            convert_rows(convert, layers[i].k, to_layers[i].first, false);
            if (layers[i].v) {
                convert_rows(convert, layers[i].v, to_layers[i].second, true);
            }

            set_layout(layers[i], v_trans, [&](ggml_tensor * t, bool) { llama_kv_adopt(t, t == layers[i].k ? to_layers[i].first : to_layers[i].second); });
        }

        for (auto & [_, own] : bufs) {
            if (own.get() == buf) {
                own = std::move(to_buf);
                buf = own.get();
                break;
            }
        }

        set_strips();
        each(cur, strips, [&](const char * addr, size_t size) { pages_new.take(addr - pages_new.data(), size); });
        llama_kv_pages_show(buf);

        forget_types();
    }

    void forget_types() override {
        to_layers.clear();
        to_runs.clear();
        to_buf.reset();
        to_ctx.reset();
    }

private:
    // of a tensor
    struct strip {
        char * data;
        size_t size; // bytes of a row in a strip
        size_t n;    // strips of a stream
    };

    char * address(const strip & t, uint32_t s, size_t j, uint32_t i) const {
        return t.data + ((s*t.n + j)*growth.n_max + i)*t.size;
    }

    void add_strips(std::vector<strip> & res, const ggml_tensor * k, const ggml_tensor * v) const {
        res.push_back({ (char *) k->data, ggml_row_size(k->type, k->ne[0]), 1 });
        if (v) {
            res.push_back({ (char *) v->data,
                v_trans ? ggml_type_size(v->type) : ggml_row_size(v->type, v->ne[0]), v_trans ? (size_t) v->ne[0] : 1 });
        }
    }

    void set_strips() {
        strips.clear();
        for (const auto & l : layers) {
            add_strips(strips, l.k, l.v);
        }

        growth.n_bytes_cell = 0;
        for (const auto & t : strips) {
            growth.n_bytes_cell += t.n*t.size;
        }
    }

    // f(address, size in bytes) of the rows in every tensor
    template <typename F>
    void each(const llama_kv_rows & rows, const std::vector<strip> & strips, F && f) const {
        for (uint32_t s = 0; s < rows.n_stream(); ++s) {
            for (const auto & [i0, i1] : rows.runs(s)) {
                for (const auto & t : strips) {
                    for (size_t j = 0; j < t.n; ++j) {
                        f(address(t, s, j, i0), (i1 - i0)*t.size);
                    }
                }
            }
        }
    }

    bool commit(llama_kv_pages & pages, const llama_kv_rows & rows, const std::vector<strip> & strips) const {
        auto set = pages.make_set();

        each(rows, strips, [&](const char * addr, size_t size) {
            pages.add(set, addr - pages.data(), size);
        });

        return pages.assign(set);
    }

    void convert_rows(const llama_kv_convert & convert, ggml_tensor * src, ggml_tensor * dst, bool is_v) {
        auto & pages_old = llama_kv_pages_of(buf);
        auto & pages_new = llama_kv_pages_of(to_buf.get());

        for (const auto & [s, i0, i1] : to_runs) {
            llama_kv_each_lines(src, dst, is_v && v_trans, s, i0, i1, [&](const llama_kv_lines & from, const llama_kv_lines & to) {
                const auto each_range = [](const llama_kv_pages & pages, const llama_kv_lines & lines, auto && f) {
                    const size_t size   = lines.n/ggml_blck_size(lines.t->type)*ggml_type_size(lines.t->type);
                    const size_t offset = (const char *) lines.t->data - pages.data() + lines.offs;

                    if (size == lines.stride) {
                        f(offset, size*lines.n_lines);
                    } else {
                        for (int64_t l = 0; l < lines.n_lines; ++l) {
                            f(offset + l*lines.stride, size);
                        }
                    }
                };

                each_range(pages_new, to, [&](size_t offset, size_t size) { pages_new.take(offset, size); });
                convert(from, to, is_v);
                each_range(pages_old, from, [&](size_t offset, size_t size) { pages_old.give(offset, size); });
            });
        }
    }

    // also rows that are not there: they can share pages with some that are
    void set_zero(const llama_kv_rows & rows) {
        auto & pages = llama_kv_pages_of(buf);

        each(rows, strips, [&](const char * addr, size_t size) {
            pages.set_zero(addr - pages.data(), size);
        });
    }

    // what goes back is judged over all streams
    llama_kv_growth all_streams() const {
        return { growth.n_max*cur.n_stream(), growth.n_pad, 0, true };
    }

    const bool v_trans;

    buffers_t & bufs;

    ggml_backend_buffer_t buf = nullptr; // one of bufs, once they have it

    std::vector<layer> layers;
    std::vector<strip> strips;

    // by prepare_types()
    ggml_context_ptr        to_ctx;
    ggml_backend_buffer_ptr to_buf;

    std::vector<std::pair<ggml_tensor *, ggml_tensor *>> to_layers; // K and V
    std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> to_runs; // stream, rows that hold something
};

} // namespace

std::unique_ptr<llama_kv_storage> llama_kv_storage::create_inplace(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, buffers_t & bufs) {
    return std::make_unique<storage_inplace>(n_stream, n_rows, n_pad, v_trans, bufs);
}
