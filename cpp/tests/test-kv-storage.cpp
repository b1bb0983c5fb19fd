// unit tests of the storage of the dynamic KV cache: what is kept by a growth, by a series of growths and by a growth that
// fails at any of its allocations

#include "../src/llama-kv-storage.h"

#include "test-kv.h"

#include "../ggml/src/ggml-backend-impl.h"
#include "../ggml/src/ggml-impl.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

//
// a buffer type whose memory is not host memory, as that of a GPU: only the transfer functions reach it
//

static size_t n_transfers = 0;

static void   dev_free (ggml_backend_buffer_t buf)                { ggml_aligned_free(buf->context, buf->size); }
static void * dev_base (ggml_backend_buffer_t buf)                { return buf->context; }
static void   dev_clear(ggml_backend_buffer_t buf, uint8_t value) { memset(buf->context, value, buf->size); }

static void dev_set(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    n_transfers++;
    memcpy((char *) t->data + offset, data, size);
}

static void dev_get(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    n_transfers++;
    memcpy(data, (const char *) t->data + offset, size);
}

static const char * dev_name(ggml_backend_buffer_type_t) { return "TEST"; }

static size_t dev_alignment(ggml_backend_buffer_type_t) { return 64; }

static ggml_backend_buffer_t dev_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = dev_free;
    iface.get_base    = dev_base;
    iface.set_tensor  = dev_set;
    iface.get_tensor  = dev_get;
    iface.clear       = dev_clear;

    return ggml_backend_buffer_init(buft, iface, ggml_aligned_malloc(size), size);
}

static ggml_backend_buffer_type_t dev_buft() {
    static ggml_backend_buffer_type buft = [] {
        ggml_backend_buffer_type res = {};
        res.iface.get_name      = dev_name;
        res.iface.alloc_buffer  = dev_alloc;
        res.iface.get_alignment = dev_alignment;
        return res;
    }();

    return &buft;
}

// where a cache is: plain host memory, host memory in pages that come and go, a device
enum class place { host, pages, device };

struct config {
    ggml_type type_k;
    ggml_type type_v;
    bool      v_trans;
    bool      has_v;
    int64_t   n_stream;
    uint32_t  n_layer;
    place     where;
};

static constexpr int64_t N_EMBD = 64;

struct cache {
    cache(const config & cfg, uint32_t n_cells) : cfg(cfg) {
        ggml_init_params params = { size_t(2*(1 + cfg.n_stream)*cfg.n_layer)*ggml_tensor_overhead(), NULL, true };

        ggml_context * ctx = ggml_init(params);

        for (uint32_t il = 0; il < cfg.n_layer; ++il) {
            k.push_back(ggml_new_tensor_3d(ctx, cfg.type_k, N_EMBD, n_cells, cfg.n_stream));
            v.push_back(cfg.has_v ? ggml_new_tensor_3d(ctx, cfg.type_v, N_EMBD, n_cells, cfg.n_stream) : nullptr);

            ggml_format_name(k[il], "cache_k_l%u", il);

            k_stream.emplace_back();
            v_stream.emplace_back();
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                k_stream[il].push_back(ggml_view_2d(ctx, k[il], N_EMBD, n_cells, k[il]->nb[1], s*k[il]->nb[2]));
                v_stream[il].push_back(v[il] ? ggml_view_2d(ctx, v[il], N_EMBD, n_cells, v[il]->nb[1], s*v[il]->nb[2]) : nullptr);
            }
        }

        std::unique_ptr<llama_kv_pages> created;

        ggml_backend_buffer_t buf = cfg.where == place::pages ? llama_kv_pages_alloc(ctx, created) :
            ggml_backend_alloc_ctx_tensors_from_buft(ctx, cfg.where == place::device ? dev_buft() : ggml_backend_cpu_buffer_type());
        ggml_backend_buffer_clear(buf, 0);
        buft = ggml_backend_buffer_get_type(buf);
        bufs.emplace_back(ggml_context_ptr(ctx), ggml_backend_buffer_ptr(buf));

        storage = std::make_unique<llama_kv_storage>(bufs, n_cells, cfg.v_trans);
        for (uint32_t il = 0; il < cfg.n_layer; ++il) {
            storage->add_layer(k[il], v[il], k_stream[il], v_stream[il], created.get());
        }
        storage->own(std::move(created));
    }

    // offset of byte ib of cell i in stream s. a transposed cell has one element in each of N_EMBD blocks
    static size_t offset(const ggml_tensor * t, bool trans, int64_t s, uint32_t i, size_t ib) {
        const size_t n_cells = t->ne[1];
        if (!trans) {
            const size_t row = ggml_row_size(t->type, N_EMBD);
            return (s*n_cells + i)*row + ib;
        }
        const size_t el = ggml_type_size(t->type);
        return ((s*N_EMBD + ib/el)*n_cells + i)*el + ib % el;
    }

    static unsigned char pattern(uint32_t il, bool is_v, int64_t s, uint32_t i, size_t ib) {
        return (unsigned char) (1 + (il*131 + is_v*57 + s*89 + i*7 + ib*13) % 255);
    }

    template <typename F>
    void each(uint32_t i0, uint32_t i1, int64_t s, F && f) {
        for (uint32_t il = 0; il < cfg.n_layer; ++il) {
            for (int is_v = 0; is_v < 2; ++is_v) {
                ggml_tensor * t = is_v ? v[il] : k[il];
                if (!t) {
                    continue;
                }
                const bool trans = is_v && cfg.v_trans;
                for (uint32_t i = i0; i < i1; ++i) {
                    for (size_t ib = 0; ib < ggml_row_size(t->type, N_EMBD); ++ib) {
                        f(((unsigned char *) t->data)[offset(t, trans, s, i, ib)], pattern(il, is_v, s, i, ib));
                    }
                }
            }
        }
    }

    void fill(int64_t s, uint32_t i0, uint32_t i1) {
        each(i0, i1, s, [](unsigned char & b, unsigned char p) { b = p; });
    }

    size_t n_wrong(int64_t s, uint32_t n_used) {
        size_t res = 0;
        each(0, n_used, s, [&](unsigned char & b, unsigned char p) { res += b != p; });
        each(n_used, storage->n_cells(), s, [&](unsigned char & b, unsigned char) { res += b != 0; });
        return res;
    }

    // the tensors, their views and the buffers agree
    bool consistent() const {
        for (uint32_t il = 0; il < cfg.n_layer; ++il) {
            for (const auto & [t, views] : { std::make_pair(k[il], &k_stream[il]), std::make_pair(v[il], &v_stream[il]) }) {
                if (!t) {
                    continue;
                }
                if (t->ne[1] != storage->n_cells() || !ggml_is_contiguous(t)) {
                    return false;
                }
                // where it was, and under its name: states on a device and the split modes go by it
                if (ggml_backend_buffer_get_type(t->buffer) != buft) {
                    return false;
                }
                if (t == k[il] && t->name != "cache_k_l" + std::to_string(il)) {
                    return false;
                }
                if ((char *) t->data < (char *) ggml_backend_buffer_get_base(t->buffer) ||
                    (char *) t->data + ggml_nbytes(t) > (char *) ggml_backend_buffer_get_base(t->buffer) + ggml_backend_buffer_get_size(t->buffer)) {
                    return false;
                }
                bool known = false;
                for (const auto & [ctx, buf] : bufs) {
                    known = known || buf.get() == t->buffer;
                }
                if (!known) {
                    return false;
                }
                for (int64_t s = 0; s < cfg.n_stream; ++s) {
                    const ggml_tensor * view = (*views)[s];
                    if (view->data != (char *) t->data + s*t->nb[2] || view->ne[1] != t->ne[1] || view->nb[1] != t->nb[1] || view->buffer != t->buffer) {
                        return false;
                    }
                }
            }
        }
        return true;
    }

    size_t size_bufs() const {
        size_t res = 0;
        for (const auto & [ctx, buf] : bufs) {
            if (!buf) {
                return 0;
            }
            res += ggml_backend_buffer_get_size(buf.get());
        }
        return res;
    }

    config cfg;

    ggml_backend_buffer_type_t buft;

    std::vector<ggml_tensor *> k;
    std::vector<ggml_tensor *> v;

    std::vector<std::vector<ggml_tensor *>> k_stream;
    std::vector<std::vector<ggml_tensor *>> v_stream;

    llama_kv_storage::buffers_t bufs;

    std::unique_ptr<llama_kv_storage> storage;
};

// what buffers may have beyond their tensors: in pages, K and V each start on one of their own
static size_t size_slack(const config & cfg) {
    return (cfg.where == place::pages ? 2 : 1)*4096*cfg.n_layer;
}

static std::string describe(const config & cfg) {
    return std::string(ggml_type_name(cfg.type_k)) + "/" + (cfg.has_v ? ggml_type_name(cfg.type_v) : "none") +
        (cfg.v_trans ? " transposed" : "") + " streams " + std::to_string(cfg.n_stream) + " layers " + std::to_string(cfg.n_layer) +
        (cfg.where == place::device ? " device" : cfg.where == place::pages ? " pages" : " host");
}

// streams are filled to different depths
static std::vector<uint32_t> used(const config & cfg, uint32_t n) {
    std::vector<uint32_t> res;
    for (int64_t s = 0; s < cfg.n_stream; ++s) {
        res.push_back(n - s*17);
    }
    return res;
}

static void check_data(cache & c, const std::vector<uint32_t> & n_used, const std::string & what) {
    check(c.consistent(), what + ": tensors, views and buffers agree");
    for (int64_t s = 0; s < c.cfg.n_stream; ++s) {
        check(c.n_wrong(s, n_used[s]) == 0, what + ": data of stream " + std::to_string(s));
    }
}

static void test_grow(const config & cfg) {
    cache c(cfg, 256);

    const size_t n_bytes_cell = ggml_row_size(cfg.type_k, N_EMBD) + (cfg.has_v ? ggml_row_size(cfg.type_v, N_EMBD) : 0);

    std::vector<uint32_t> n_done(cfg.n_stream, 0);

    for (const auto & [n_used, n_cells] : { std::make_pair(256u, 512u), std::make_pair(300u, 1024u), std::make_pair(1024u, 1280u) }) {
        const auto n = used(cfg, n_used);
        for (int64_t s = 0; s < cfg.n_stream; ++s) {
            c.fill(s, n_done[s], n[s]);
        }
        n_done = n;

        const std::string what = describe(cfg) + " to " + std::to_string(n_cells);

        n_transfers = 0;
        check(c.storage->try_resize(n_cells, n), what + ": grows");

        // a get and a set per stream and tensor, whatever the number of rows. none on the host
        check(n_transfers <= (size_t) (cfg.where == place::device ? 4*cfg.n_stream*cfg.n_layer : 0), what + ": transfers");
        check(c.storage->n_cells() == n_cells, what + ": size");
        check_data(c, n, what);

        // nothing of the previous sizes is left over
        check(c.size_bufs() < (n_cells + 64)*n_bytes_cell*cfg.n_layer*cfg.n_stream + size_slack(cfg), what + ": buffers");
    }

    c.storage->clear();
    check_data(c, std::vector<uint32_t>(cfg.n_stream, 0), describe(cfg) + " cleared");
}

// fail each allocation of a growth, then grow for real
static void test_fail(const config & cfg, int * n_alloc) {
    // allocations are counted over the process, so that the next one has a known number
    for (uint32_t i_fail = 0; i_fail < cfg.n_layer; ++i_fail) {
        for (const bool first : { true, false }) {
            cache c(cfg, 256);

            const std::string what = describe(cfg) + (first ? " first" : " second") + " growth fails at layer " + std::to_string(i_fail);

            uint32_t n_cells = 256;
            set_fail("-1");
            if (!first) {
                check(c.storage->try_resize(512, used(cfg, 0 + 256)), what + ": grows");
                *n_alloc += cfg.n_layer;
                n_cells = 512;
            }

            const auto n = used(cfg, n_cells - 3);
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                c.fill(s, 0, n[s]);
            }

            const size_t size = c.size_bufs();

            set_fail(std::to_string(*n_alloc + i_fail + 1).c_str());
            check(!c.storage->try_resize(2*n_cells, n), what + ": fails");
            *n_alloc += 2*i_fail + 1; // the layers that had grown, and the same ones to go back

            check(c.storage->n_cells() == n_cells, what + ": keeps its size");

            // the layers that had grown have a buffer of the old size, beside the first one for all layers
            check(c.size_bufs() <= size + i_fail*size/cfg.n_layer + size_slack(cfg), what + ": gives back");
            check_data(c, n, what);

            set_fail("-1");
            check(c.storage->try_resize(2*n_cells, n), what + ": grows later");
            *n_alloc += cfg.n_layer;
            check_data(c, n, what + ", grown later");
        }
    }
}

// give memory back, with each of the allocations for the smaller buffers failing
static void test_shrink(const config & cfg, int * n_alloc) {
    for (uint32_t i_fail = 0; i_fail <= cfg.n_layer; ++i_fail) {
        cache c(cfg, 256);

        const std::string what = describe(cfg) + " shrinks, layer " + std::to_string(i_fail) + " fails";

        set_fail("-1");
        check(c.storage->try_resize(1024, used(cfg, 256)), what + ": grows");
        *n_alloc += cfg.n_layer;

        const auto n = used(cfg, 300);
        for (int64_t s = 0; s < cfg.n_stream; ++s) {
            c.fill(s, 0, 1000); // more than what stays
        }

        const size_t size = c.size_bufs();

        set_fail(std::to_string(*n_alloc + i_fail + 1).c_str());
        c.storage->shrink(512, n);
        *n_alloc += cfg.n_layer;

        check(c.storage->n_cells() == 512, what + ": size");
        check_data(c, n, what);
        check(c.size_bufs() < size || cfg.n_layer == 1, what + ": buffers");

        set_fail("-1");
        check(c.storage->try_resize(1024, n), what + ": grows again");
        *n_alloc += cfg.n_layer;
        check_data(c, n, what + ", grown again");
    }
}

static void test_empty() {
    llama_kv_storage::buffers_t bufs;
    llama_kv_storage storage(bufs, 256, false);
    check(storage.try_resize(512, { 0 }),                "no layers: grows");
    check(storage.n_cells() == 512 && bufs.empty(),      "no layers: size");
}

int main() {
    std::vector<config> configs;

    for (const place where : { place::host, place::pages, place::device }) {
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  false, true,  1, 3, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  true,  true,  1, 3, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  false, true,  4, 2, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  true,  true,  4, 2, where });
        configs.push_back({ GGML_TYPE_F32,  GGML_TYPE_BF16, true,  true,  2, 1, where });
        configs.push_back({ GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, false, true,  2, 2, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  false, false, 3, 2, where });
    }

    int n_alloc = 0;

    set_fail("-1"); // count, but do not fail

    for (const auto & cfg : configs) {
        test_fail(cfg, &n_alloc);
    }

    for (const auto & cfg : configs) {
        test_shrink(cfg, &n_alloc);
    }

    set_fail("");

    for (const auto & cfg : configs) {
        test_grow(cfg);
    }

    test_empty();

    return report();
}
