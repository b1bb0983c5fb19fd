// Storage whose rows come and go in place. What grows is, per stream, a set of blocks of rows; holes in the middle are blocks
// that are not in it.
//
// LLAMA_KV_DYNAMIC_STORAGE=copy makes growth by copy the way everywhere.

#include "llama-kv-storage.h"

#include "llama-impl.h"
#include "llama-kv-pages.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>

namespace {

class storage_inplace : public llama_kv_storage {
public:
    storage_inplace(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans) :
        llama_kv_storage(n_stream, { n_rows, n_pad, 0, true }), v_trans(v_trans) {
    }

    const char * name() const override {
        return "in place";
    }

    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers) override {
        GGML_ASSERT(buft == ggml_backend_cpu_buffer_type() && !buf);

        buf = llama_kv_pages_alloc(ctx);
        if (!buf) {
            return nullptr;
        }

        for (const auto & l : layers) {
            strips.push_back({ (char *) l.k->data, ggml_row_size(l.k->type, l.k->ne[0]), 1 });
            if (l.v) {
                strips.push_back({ (char *) l.v->data,
                    v_trans ? ggml_type_size(l.v->type) : ggml_row_size(l.v->type, l.v->ne[0]), v_trans ? (size_t) l.v->ne[0] : 1 });
            }
        }

        for (const auto & t : strips) {
            growth.n_bytes_cell += t.n*t.size;
        }

        if (!resize(start, {})) {
            for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
                t->buffer = nullptr;
                t->data   = nullptr;
            }
            ggml_backend_buffer_free(std::exchange(buf, nullptr));
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

        auto & pages = llama_kv_pages_of(buf);

        auto set = pages.make_set();

        each(rows, [&](const char * addr, size_t size) {
            pages.add(set, addr - pages.data(), size);
        });

        if (!pages.assign(set)) {
            return false;
        }

        cur = rows;

        llama_kv_pages_show(buf);

        return true;
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

    // f(address, size in bytes) of the rows in every tensor
    template <typename F>
    void each(const llama_kv_rows & rows, F && f) const {
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

    // also rows that are not there: they can share pages with some that are
    void set_zero(const llama_kv_rows & rows) {
        auto & pages = llama_kv_pages_of(buf);

        each(rows, [&](const char * addr, size_t size) {
            pages.set_zero(addr - pages.data(), size);
        });
    }

    // what goes back is judged over all streams
    llama_kv_growth all_streams() const {
        return { growth.n_max*cur.n_stream(), growth.n_pad, 0, true };
    }

    ggml_backend_buffer_t buf = nullptr;

    std::vector<strip> strips;

    const bool v_trans;
};

} // namespace

std::unique_ptr<llama_kv_storage> llama_kv_storage::create_inplace(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans) {
    return std::make_unique<storage_inplace>(n_stream, n_rows, n_pad, v_trans);
}
