// unit tests of a change of types in the storage of the dynamic KV cache: every row of every layer and stream is what its bytes
// convert to, and nothing else is anything but zero, whether there is memory beside the cells, inside of them, or none at all

#include "../src/llama-kv-pages.h"
#include "../src/llama-kv-storage.h"

#include "test-kv-rows.h"
#include "test-kv.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

static constexpr int64_t  N_EMBD  = 64;
static constexpr uint32_t N_MAX   = 2048;
static constexpr uint32_t N_LAYER = 3;

enum class kind { fixed, copy, inplace };

struct config {
    kind    what;
    bool    v_trans;
    bool    has_v;
    int64_t n_stream;

    std::string name() const {
        return std::string(what == kind::fixed ? "fixed" : what == kind::copy ? "copy" : "in place") + (v_trans ? " transposed" : "") +
            (has_v ? "" : " without V") + " streams " + std::to_string(n_stream);
    }
};

struct cache {
    cache(const config & cfg, ggml_type type) : cfg(cfg) {
        switch (cfg.what) {
            case kind::fixed:   storage = llama_kv_storage::create_fixed  (cfg.n_stream, N_MAX,    cfg.v_trans, bufs); break;
            case kind::copy:    storage = llama_kv_storage::create_copy   (cfg.n_stream, N_MAX, 1, cfg.v_trans, bufs); break;
            case kind::inplace: storage = llama_kv_storage::create_inplace(cfg.n_stream, N_MAX, 1, cfg.v_trans, true, bufs); break;
        }

        ggml_context * ctx = ggml_init({ size_t(2*(1 + cfg.n_stream)*N_LAYER)*ggml_tensor_overhead(), NULL, true });

        for (uint32_t il = 0; il < N_LAYER; ++il) {
            llama_kv_storage::layer l;
            l.k = ggml_new_tensor_3d(ctx, type, N_EMBD, N_MAX, cfg.n_stream);
            l.v = cfg.has_v ? ggml_new_tensor_3d(ctx, type, N_EMBD, N_MAX, cfg.n_stream) : nullptr;
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                l.k_stream.push_back(ggml_view_2d(ctx, l.k, N_EMBD, N_MAX, l.k->nb[1], s*l.k->nb[2]));
                l.v_stream.push_back(l.v ? ggml_view_2d(ctx, l.v, N_EMBD, N_MAX, l.v->nb[1], s*l.v->nb[2]) : nullptr);
            }
            layers.push_back(l);
        }

        ggml_backend_buffer_t buf = storage->alloc(ctx, ggml_backend_cpu_buffer_type(), layers);
        ggml_backend_buffer_clear(buf, 0);
        bufs.emplace_back(ggml_context_ptr(ctx), ggml_backend_buffer_ptr(buf));
    }

    // f(name, tensor, transposed)
    template <typename F>
    void each(F && f) {
        for (uint32_t il = 0; il < N_LAYER; ++il) {
            f(il*2, layers[il].k, false);
            if (layers[il].v) {
                f(il*2 + 1, layers[il].v, cfg.v_trans);
            }
        }
    }

    // the bytes of row i of stream s, which are scattered where it is transposed
    static std::vector<char> row(const ggml_tensor * t, bool trans, int64_t s, int64_t i) {
        std::vector<char> res(ggml_row_size(t->type, N_EMBD));
        const size_t el = ggml_type_size(t->type);
        for (int64_t j = 0; trans && j < N_EMBD; ++j) {
            memcpy(&res[j*el], (const char *) t->data + ((s*N_EMBD + j)*t->ne[1] + i)*el, el);
        }
        if (!trans) {
            memcpy(res.data(), (const char *) t->data + (s*t->ne[1] + i)*res.size(), res.size());
        }
        return res;
    }

    bool is_hole(int64_t s, int64_t i) const {
        return cfg.what == kind::inplace && !storage->has(s, i);
    }

    void fill(const std::vector<uint32_t> & n_used) {
        each([&](int id, ggml_tensor * t, bool trans) {
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                for (int64_t i = 0; i < n_used[s]; ++i) {
                    if (is_hole(s, i)) {
                        continue;
                    }
                    std::vector<float> val(N_EMBD);
                    for (int64_t j = 0; j < N_EMBD; ++j) {
                        val[j] = 0.01f*((id*31 + s*17 + i*7 + j*3) % 211 - 100);
                    }
                    const auto bytes = converted((const char *) val.data(), N_EMBD, GGML_TYPE_F32, t->type);
                    const size_t el = ggml_type_size(t->type);
                    for (int64_t j = 0; trans && j < N_EMBD; ++j) {
                        memcpy((char *) t->data + ((s*N_EMBD + j)*t->ne[1] + i)*el, &bytes[j*el], el);
                    }
                    if (!trans) {
                        memcpy((char *) t->data + (s*t->ne[1] + i)*bytes.size(), bytes.data(), bytes.size());
                    }
                }
            }
        });
    }

    // the rows that are there, tensor by tensor
    std::vector<std::vector<char>> rows(const std::vector<uint32_t> & n_used) {
        std::vector<std::vector<char>> res;
        each([&](int, ggml_tensor * t, bool trans) {
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                for (int64_t i = 0; i < n_used[s]; ++i) {
                    if (!is_hole(s, i)) {
                        res.push_back(row(t, trans, s, i));
                    }
                }
            }
        });
        return res;
    }

    bool is_rest_zero(const std::vector<uint32_t> & n_used) {
        bool res = true;
        each([&](int, ggml_tensor * t, bool trans) {
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                for (int64_t i = 0; i < t->ne[1]; ++i) {
                    if (i < n_used[s] && !is_hole(s, i)) {
                        continue;
                    }
                    for (const char c : row(t, trans, s, i)) {
                        res = res && c == 0;
                    }
                }
            }
        });
        return res;
    }

    bool is_consistent(ggml_type type) {
        bool res = true;
        for (const auto & l : layers) {
            for (const auto & [t, views] : { std::make_pair(l.k, &l.k_stream), std::make_pair(l.v, &l.v_stream) }) {
                if (!t) {
                    continue;
                }
                res = res && t->type == type && t->nb[1] == ggml_row_size(type, N_EMBD) && ggml_is_contiguous(t) && t->ne[1] == storage->n_rows();
                for (int64_t s = 0; s < cfg.n_stream; ++s) {
                    const ggml_tensor * view = (*views)[s];
                    res = res && view->type == type && view->data == (char *) t->data + s*t->nb[2] && view->nb[1] == t->nb[1] && view->buffer == t->buffer;
                }
            }
        }
        return res;
    }

    size_t size_bufs() const {
        size_t res = 0;
        for (const auto & [_, buf] : bufs) {
            res += ggml_backend_buffer_get_size(buf.get());
        }
        return res;
    }

    config cfg;

    llama_kv_storage::buffers_t bufs;

    std::unique_ptr<llama_kv_storage> storage;

    std::vector<llama_kv_storage::layer> layers;
};

static void test_change(const config & cfg, ggml_type from, ggml_type to, bool has_memory) {
    const std::string what = cfg.name() + ": " + ggml_type_name(from) + " to " + ggml_type_name(to) + (has_memory ? "" : " without memory");

    set_fail("-1");

    cache c(cfg, from);

    // streams end at different rows. by copy all of them have as many, and in place there is a hole
    auto rows = c.storage->rows();
    if (cfg.what == kind::inplace) {
        for (int64_t s = 0; s < cfg.n_stream; ++s) {
            rows.add(s, 512, 700 + 100*s);
        }
    } else if (cfg.what == kind::copy) {
        rows.add(0, 1024);
    }
    check(c.storage->resize(rows, std::vector<uint32_t>(cfg.n_stream, 0)), what + ": rows");

    std::vector<uint32_t> n_used;
    for (int64_t s = 0; s < cfg.n_stream; ++s) {
        n_used.push_back(700 + 37*s);
    }
    c.fill(n_used);

    const auto before = c.rows(n_used);

    const size_t size_before = c.size_bufs();
    const bool   is_wider    = ggml_row_size(to, N_EMBD) > ggml_row_size(from, N_EMBD);

    if (!has_memory) {
        set_fail("1+");
    }

    const bool ok = c.storage->prepare_types(to, to, n_used);

    check(ok == (has_memory || (!is_wider && cfg.what != kind::inplace)), what + ": is prepared");

    if (!ok) {
        check(c.is_consistent(from) && c.rows(n_used) == before, what + ": nothing has changed");
        set_fail("-1");
        return;
    }

    c.storage->set_types(convert);

    set_fail("-1");

    check(c.is_consistent(to), what + ": tensors and views");
    check(c.storage->moved(), what + ": the graphs are told");

    const auto after = c.rows(n_used);

    size_t n_wrong = 0;
    for (size_t i = 0; i < before.size(); ++i) {
        n_wrong += after[i] != converted(before[i].data(), N_EMBD, from, to);
    }
    check(n_wrong == 0, what + ": rows");
    check(c.is_rest_zero(n_used), what + ": the rest");

    if (has_memory) {
        const double ratio = (double) ggml_row_size(to, N_EMBD)/ggml_row_size(from, N_EMBD);
        check(c.size_bufs() <= size_before*ratio + 2*N_LAYER*(1 + (cfg.v_trans ? N_EMBD : 2))*cfg.n_stream*llama_kv_pages_size_host(), what + ": memory");
        check(c.storage->n_bytes(c.storage->rows(), to, to) <= c.size_bufs() + 4096, what + ": bytes known before");
    }

    // and back, which loses what the type does
    check(c.storage->prepare_types(from, from, n_used), what + ": back is prepared");
    c.storage->set_types(convert);
    check(c.is_consistent(from) && c.is_rest_zero(n_used), what + ": back");

    const auto back = c.rows(n_used);
    for (size_t i = 0; i < before.size(); ++i) {
        n_wrong += back[i] != converted(after[i].data(), N_EMBD, to, from);
    }
    check(n_wrong == 0, what + ": rows back");

    // it grows on
    if (cfg.what != kind::fixed) {
        auto more = c.storage->rows();
        more.add(0, 1024, N_MAX);
        check(c.storage->resize(more, n_used) && c.rows(n_used) == back && c.is_rest_zero(n_used), what + ": grows on");
    }

    c.storage->forget_types();
}

int main() {
    ggml_time_init(); // on Windows there is no clock before it, and the storage looks at one

    for (const kind what : { kind::fixed, kind::copy, kind::inplace }) {
        for (const int64_t n_stream : { 1, 3 }) {
            for (const bool has_memory : { true, false }) {
                test_change({ what, true, true, n_stream }, GGML_TYPE_F32, GGML_TYPE_F16, has_memory);
                test_change({ what, true, true, n_stream }, GGML_TYPE_F16, GGML_TYPE_F32, has_memory);
                for (const bool has_v : { true, false }) {
                    test_change({ what, false, has_v, n_stream }, GGML_TYPE_F16,  GGML_TYPE_Q8_0, has_memory);
                    test_change({ what, false, has_v, n_stream }, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, has_memory);
                    test_change({ what, false, has_v, n_stream }, GGML_TYPE_Q8_0, GGML_TYPE_F16,  has_memory);
                }
            }
        }
    }

    return report();
}
