// Unit tests of the storage of the dynamic KV cache, by copy and in place
// They check the content after one growth, after several growths, and after a growth in which one allocation fails.

#include "../src/llama-kv-pages.h"
#include "../src/llama-kv-storage.h"

#include "test-kv-rows.h"
#include "test-kv.h"

#include "../ggml/src/ggml-backend-impl.h"
#include "../ggml/src/ggml-impl.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

//
// a buffer type of device memory: only transfer functions may access it, as on a GPU
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

static size_t n_dev_free = SIZE_MAX; // free memory of the device. SIZE_MAX: unknown

static void dev_memory(ggml_backend_dev_t, size_t * n_free, size_t * n_total) {
    *n_free  = n_dev_free == SIZE_MAX ? 0 : n_dev_free;
    *n_total = n_dev_free == SIZE_MAX ? 0 : size_t(1) << 30;
}

static size_t n_dev_tensor = SIZE_MAX; // maximum bytes of a tensor on the device

static bool dev_supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return ggml_nbytes(op) <= n_dev_tensor; }

static const char * dev_name(ggml_backend_buffer_type_t) { return "TEST"; }

static bool dev_is_host(ggml_backend_buffer_type_t) { return true; }

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

static ggml_backend_buffer_type_t dev_buft(bool is_host) {
    static ggml_backend_buffer_type bufts[2];
    static ggml_backend_device      dev;

    dev.iface.get_memory  = dev_memory;
    dev.iface.supports_op = dev_supports_op;

    for (int i = 0; i < 2; ++i) {
        bufts[i].iface.get_name      = dev_name;
        bufts[i].iface.alloc_buffer  = dev_alloc;
        bufts[i].iface.get_alignment = dev_alignment;
        bufts[i].iface.is_host       = i ? dev_is_host : nullptr;
        bufts[i].device              = &dev;
    }

    return &bufts[is_host];
}

// where the cache is: host memory in pages, host memory of another buffer type, or device memory
enum class place { pages, host, device };

struct config {
    ggml_type type_k;
    ggml_type type_v;
    bool      v_trans;
    bool      has_v;
    int64_t   n_stream;
    uint32_t  n_layer;
    place     where;
};

static constexpr int64_t  N_EMBD  = 64;
static constexpr uint32_t N_MAX   = 4096;
static constexpr uint32_t N_START = 512; // rows at the start, by copy

struct cache {
    explicit cache(const config & cfg) : cfg(cfg), storage(llama_kv_storage_create_copy(cfg.n_stream, N_MAX, 1, cfg.v_trans, bufs)) {
        ggml_init_params params = { size_t(2*(1 + cfg.n_stream)*cfg.n_layer)*ggml_tensor_overhead(), NULL, true };

        ggml_context * ctx = ggml_init(params);

        std::vector<llama_kv_storage::layer> layers;

        for (uint32_t il = 0; il < cfg.n_layer; ++il) {
            k.push_back(ggml_new_tensor_3d(ctx, cfg.type_k, N_EMBD, N_MAX, cfg.n_stream));
            v.push_back(cfg.has_v ? ggml_new_tensor_3d(ctx, cfg.type_v, N_EMBD, N_MAX, cfg.n_stream) : nullptr);

            ggml_format_name(k[il], "cache_k_l%u", il);

            k_stream.emplace_back();
            v_stream.emplace_back();
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                k_stream[il].push_back(ggml_view_2d(ctx, k[il], N_EMBD, N_MAX, k[il]->nb[1], s*k[il]->nb[2]));
                v_stream[il].push_back(v[il] ? ggml_view_2d(ctx, v[il], N_EMBD, N_MAX, v[il]->nb[1], s*v[il]->nb[2]) : nullptr);
            }

            layers.push_back({ k[il], v[il], k_stream[il], v_stream[il] });
        }

        buft = cfg.where == place::pages ? ggml_backend_cpu_buffer_type() : dev_buft(cfg.where == place::host);

        // allocate and clear, as the constructor of llama_kv_cache does
        ggml_backend_buffer_t buf = storage->alloc(ctx, buft, layers);
        ggml_backend_buffer_clear(buf, 0);
        bufs.emplace_back(ggml_context_ptr(ctx), ggml_backend_buffer_ptr(buf));
    }

    bool resize(uint32_t n_cells, const std::vector<uint32_t> & n_used) {
        auto rows = storage->rows().none();
        rows.add(0, n_cells);
        return storage->try_resize(rows, n_used);
    }

    // clear the cache, as llama_kv_cache::clear() does
    void clear() {
        if (!storage->clear(-1)) {
            for (const auto & [_, buf] : bufs) {
                ggml_backend_buffer_clear(buf.get(), 0);
            }
        }
    }

    static unsigned char pattern(uint32_t il, bool is_v, int64_t s, uint32_t i, size_t ib) {
        return (unsigned char) (1 + (il*131 + is_v*57 + s*89 + i*7 + ib*13) % 255);
    }

    // call f(byte, pattern) for each byte of the cells [i0, i1) of a stream
    // A cell of transposed V has one element in each of N_EMBD strips. A strip contains the same element of all cells of the
    // stream.
    template <typename F>
    void each(uint32_t i0, uint32_t i1, int64_t s, F && f) {
        for (uint32_t il = 0; il < cfg.n_layer; ++il) {
            for (int is_v = 0; is_v < 2; ++is_v) {
                ggml_tensor * t = is_v ? v[il] : k[il];
                if (!t) {
                    continue;
                }
                const size_t n_cells = t->ne[1];
                const size_t n_row   = ggml_row_size(t->type, N_EMBD);
                const size_t n_el    = ggml_type_size(t->type);
                const bool   trans   = is_v && cfg.v_trans;

                auto * data = (unsigned char *) t->data + s*n_cells*n_row;
                for (uint32_t i = i0; i < i1; ++i) {
                    for (size_t ib = 0; ib < n_row; ++ib) {
                        f(data[trans ? (ib/n_el*n_cells + i)*n_el + ib % n_el : i*n_row + ib], pattern(il, is_v, s, i, ib));
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
        each(n_used, storage->n_rows(), s, [&](unsigned char & b, unsigned char) { res += b != 0; });
        return res;
    }

    // return true if the tensors, their views and the buffers are consistent with each other
    bool consistent() const {
        for (uint32_t il = 0; il < cfg.n_layer; ++il) {
            for (const auto & [t, views] : { std::make_pair(k[il], &k_stream[il]), std::make_pair(v[il], &v_stream[il]) }) {
                if (!t) {
                    continue;
                }
                if (t->ne[1] != storage->n_rows() || !ggml_is_contiguous(t)) {
                    return false;
                }
                // A growth must keep the buffer type and the names of the tensors. States in device memory and the split modes
                // (`--split-mode`) depend on them.
                if (ggml_backend_buffer_get_type(t->buffer) != buft) {
                    return false;
                }
                if (t == k[il] && t->name != "cache_k_l" + std::to_string(il)) {
                    return false;
                }
                // a buffer in pages reports the size of the pages that are in use, and its addresses can be more
                const char *           base  = (const char *) ggml_backend_buffer_get_base(t->buffer);
                const llama_kv_pages * pages = llama_kv_pages_of_host(t->buffer);
                if ((const char *) t->data < base ||
                    (const char *) t->data + ggml_nbytes(t) > base + (pages ? pages->size() : ggml_backend_buffer_get_size(t->buffer))) {
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

// bytes by which buffers can be larger than their tensors. In pages, K and V each start on a new page
static size_t size_slack(const config & cfg) {
    return (cfg.where == place::pages ? 2 : 1)*4096*cfg.n_layer;
}

static std::string describe(const config & cfg) {
    return std::string(ggml_type_name(cfg.type_k)) + "/" + (cfg.has_v ? ggml_type_name(cfg.type_v) : "none") +
        (cfg.v_trans ? " transposed" : "") + " streams " + std::to_string(cfg.n_stream) + " layers " + std::to_string(cfg.n_layer) +
        (cfg.where == place::device ? " device" : cfg.where == place::pages ? " pages" : " host");
}

// return the number of used cells of each stream. Each stream has 17 fewer than the stream before
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
    cache c(cfg);

    const size_t n_bytes_cell = ggml_row_size(cfg.type_k, N_EMBD) + (cfg.has_v ? ggml_row_size(cfg.type_v, N_EMBD) : 0);

    std::vector<uint32_t> n_done(cfg.n_stream, 0);

    for (const auto & [n_used, n_cells] : { std::make_pair(256u, 768u), std::make_pair(300u, 1024u), std::make_pair(1024u, 1280u) }) {
        const auto n = used(cfg, n_used);
        for (int64_t s = 0; s < cfg.n_stream; ++s) {
            c.fill(s, n_done[s], n[s]);
        }
        n_done = n;

        const std::string what = describe(cfg) + " to " + std::to_string(n_cells);

        n_transfers = 0;
        check(c.resize(n_cells, n), what + ": grows");

        // on a device, a growth makes one read and one write per stream and tensor, whatever the number of rows. On the host,
        // it makes none
        check(n_transfers <= (size_t) (cfg.where == place::device ? 4*cfg.n_stream*cfg.n_layer : 0), what + ": transfers");
        check(c.storage->n_rows() == n_cells, what + ": size");
        check_data(c, n, what);

        // the buffers of earlier sizes must be freed
        check(c.size_bufs() < (n_cells + 64)*n_bytes_cell*cfg.n_layer*cfg.n_stream + size_slack(cfg), what + ": buffers");
    }

    c.clear();
    check_data(c, std::vector<uint32_t>(cfg.n_stream, 0), describe(cfg) + " cleared");
}

// let each allocation of a growth fail, and then grow successfully
static void test_fail(const config & cfg, int * n_alloc) {
    // Allocations are counted from the start of the process. *n_alloc is the number of the last allocation so far.
    for (uint32_t i_fail = 0; i_fail < cfg.n_layer; ++i_fail) {
        for (const bool first : { true, false }) {
            cache c(cfg);

            const std::string what = describe(cfg) + (first ? " first" : " second") + " growth fails at layer " + std::to_string(i_fail);

            uint32_t n_cells = N_START;
            set_fail("-1");
            if (!first) {
                check(c.resize(2*N_START, used(cfg, 256)), what + ": grows");
                *n_alloc += cfg.n_layer;
                n_cells = 2*N_START;
            }

            const auto n = used(cfg, n_cells - 3);
            for (int64_t s = 0; s < cfg.n_stream; ++s) {
                c.fill(s, 0, n[s]);
            }

            const size_t size = c.size_bufs();

            set_fail(std::to_string(*n_alloc + i_fail + 1).c_str());
            check(!c.resize(2*n_cells, n), what + ": fails");
            *n_alloc += 2*i_fail + 1; // the layers that had grown, the allocation that failed, and the same layers again during the undo

            check(c.storage->n_rows() == n_cells, what + ": keeps its size");

            // After the undo, each layer that had grown has its own buffer of the old size. The first buffer, which all layers
            // share, can still exist.
            check(c.size_bufs() <= size + i_fail*size/cfg.n_layer + size_slack(cfg), what + ": gives back");
            check_data(c, n, what);

            set_fail("-1");
            check(c.resize(2*n_cells, n), what + ": grows later");
            *n_alloc += cfg.n_layer;
            check_data(c, n, what + ", grown later");
        }
    }
}

// test a device with too little memory. No allocation may be tried, because it would take memory from others
static void test_device_is_full() {
    const config cfg = { GGML_TYPE_F16, GGML_TYPE_F16, false, true, 1, 3, place::device };

    cache c(cfg);

    const auto   n      = used(cfg, 256);
    const size_t n_row  = 2*ggml_row_size(GGML_TYPE_F16, N_EMBD)*cfg.n_layer;
    const size_t margin = (size_t(1) << 30)/64;

    c.fill(0, 0, 256);

    // the first growth: all layers share a buffer, which is freed only when the last layer has its own
    n_dev_free = margin + 1024*n_row - 1;
    n_transfers = 0;
    check(!c.resize(1024, n) && n_transfers == 0 && !c.storage->moved(), "device is full: first growth");
    n_dev_free++;
    check(c.resize(1024, n), "device has room: first growth");

    n_dev_free = margin + 1024*n_row + 1024*n_row/3 - 1;
    check(!c.resize(2048, n), "device is full: one layer is there twice");
    n_dev_free++;
    check(c.resize(2048, n), "device has room: one layer is there twice");

    n_dev_free = 0;
    check(c.resize(512, n), "device is full: to give back needs nothing");
    check_data(c, n, "device is full");

    n_dev_free = SIZE_MAX;
}

// test a device that limits the size of a tensor. A growth beyond the limit must be refused, because the scheduler would end the
// process
static void test_device_takes_no_larger_tensor() {
    const config cfg = { GGML_TYPE_F16, GGML_TYPE_F16, false, true, 3, 2, place::device };

    cache c(cfg);

    const auto n = used(cfg, 256);

    for (int64_t s = 0; s < cfg.n_stream; ++s) {
        c.fill(s, 0, n[s]);
    }

    n_dev_tensor = 1024*cfg.n_stream*ggml_row_size(GGML_TYPE_F16, N_EMBD);
    check(!c.resize(1280, n) && !c.storage->moved(), "a tensor is too large: nothing is tried");
    check(c.resize(1024, n), "a tensor is as large as the device takes one");
    check_data(c, n, "a tensor is as large as the device takes one");

    n_dev_tensor = SIZE_MAX;
}

// test that a change of types leaves memory for other allocations
// A change to wider types is refused. After a change to narrower types, all cells stay in the first buffer, which all layers
// share. The reason is that this buffer could be freed only after the last layer has moved to a new buffer.
static void test_types_on_a_full_device() {
    const config cfg = { GGML_TYPE_F16, GGML_TYPE_F16, false, true, 1, 3, place::device };

    const auto   n_bytes = [&](ggml_type type) { return N_START*2*ggml_row_size(type, N_EMBD)*cfg.n_layer; };
    const size_t margin  = (size_t(1) << 30)/64;
    const auto   n       = used(cfg, 256);

    for (const size_t n_lacks : { 1, 0 }) {
        const std::string what = n_lacks ? "types, device is full" : "types, device has room";

        cache wide(cfg);
        wide.fill(0, 0, 256);

        const size_t size = wide.size_bufs();

        n_dev_free = margin + n_bytes(GGML_TYPE_F32) - n_lacks;
        check(wide.storage->prepare_types(GGML_TYPE_F32, GGML_TYPE_F32, n) == !n_lacks, what + ": wider");
        wide.storage->forget_types();
        check(wide.size_bufs() == size && !wide.storage->moved(), what + ": nothing has changed");
        check_data(wide, n, what);

        cache c(cfg);

        n_dev_free = margin + n_bytes(GGML_TYPE_Q8_0) - n_lacks;
        check(c.storage->prepare_types(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, n) && c.storage->set_types(convert), what + ": narrower");
        check(c.consistent() && c.k[2]->type == GGML_TYPE_Q8_0, what + ": tensors, views and buffers agree");
        check(n_lacks ? c.size_bufs() == size : c.size_bufs() <= n_bytes(GGML_TYPE_Q8_0) + size_slack(cfg), what + ": memory");

        n_dev_free = SIZE_MAX;
    }

    // if each layer has a buffer of its own, each layer frees more than it allocates
    cache c(cfg);
    check(c.resize(1024, n), "types, device is full: grown");
    const size_t size = c.size_bufs();

    n_dev_free = 0;
    check(c.storage->prepare_types(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, n) && c.storage->set_types(convert), "types, device is full: narrower, grown");
    check(c.consistent() && c.size_bufs() < size, "types, device is full: memory, grown");
    n_dev_free = SIZE_MAX;
}

// change one layer in pages of host memory and one layer on a device to narrower types
static void test_types_mixed() {
    llama_kv_storage::buffers_t bufs;

    const auto storage = llama_kv_storage_create_copy(1, N_MAX, 1, false, bufs);

    std::vector<ggml_tensor *> all;
    for (ggml_backend_buffer_type_t buft : { ggml_backend_cpu_buffer_type(), dev_buft(false) }) {
        ggml_context_ptr ctx(ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }));

        ggml_tensor * k = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, N_EMBD, N_MAX, 1);
        all.push_back(k);

        ggml_backend_buffer_ptr buf(storage->alloc(ctx.get(), buft, { { k, nullptr, { ggml_view_2d(ctx.get(), k, N_EMBD, N_MAX, k->nb[1], 0) }, {} } }));
        memset(k->data, 0x11, 300*k->nb[1]);
        bufs.emplace_back(std::move(ctx), std::move(buf));
    }

    const std::vector<char> row((const char *) all[0]->data, (const char *) all[0]->data + all[0]->nb[1]);
    const auto              row_new = converted(row.data(), N_EMBD, GGML_TYPE_F16, GGML_TYPE_Q8_0);
    const void *            data    = all[0]->data;
    const size_t            size    = ggml_backend_buffer_get_size(bufs[0].second.get());

    check(storage->prepare_types(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, { 300 }) && storage->set_types(convert), "types, mixed");

    for (const ggml_tensor * k : all) {
        bool right = k->type == GGML_TYPE_Q8_0;
        for (size_t i = 0; i < N_START; ++i) {
            const char * at = (const char *) k->data + i*k->nb[1];
            right = right && (i < 300 ? memcmp(at, row_new.data(), row_new.size()) == 0 : std::all_of(at, at + k->nb[1], [](char c) { return c == 0; }));
        }
        check(right, "types, mixed: rows");
    }

    check(all[0]->data == data && ggml_backend_buffer_get_size(bufs[0].second.get()) < size, "types, mixed: the host's rows stay, and pages are freed");
    check(bufs.size() == 3 && bufs[2].second.get() == all[1]->buffer && ggml_backend_buffer_get_size(bufs[1].second.get()) == 0,
            "types, mixed: the device's rows move, and their first buffer is freed");
}

// change to narrower types while each allocation fails once. Either all layers leave the first buffer, which they share, or none
// does. In pages of host memory, no layer leaves its buffer
static void test_types_fail(const config & cfg, int * n_alloc) {
    if (cfg.v_trans || ggml_is_quantized(cfg.type_v) || cfg.where == place::pages) {
        return;
    }

    for (uint32_t i_fail = 1; i_fail <= cfg.n_layer; ++i_fail) {
        const std::string what = describe(cfg) + " narrower, layer " + std::to_string(i_fail) + " fails";

        cache c(cfg);

        const size_t size = c.size_bufs();

        set_fail(std::to_string(*n_alloc + i_fail).c_str());
        check(c.storage->prepare_types(GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, used(cfg, 256)) && c.storage->set_types(convert), what);
        *n_alloc += i_fail;

        check(c.consistent() && c.k[0]->type == GGML_TYPE_Q4_0 && c.size_bufs() == size, what + ": memory");
    }
}

// free rows while each allocation of a smaller buffer fails once
static void test_shrink(const config & cfg, int * n_alloc) {
    for (uint32_t i_fail = 0; i_fail <= cfg.n_layer; ++i_fail) {
        cache c(cfg);

        const std::string what = describe(cfg) + " shrinks, layer " + std::to_string(i_fail) + " fails";

        set_fail("-1");
        check(c.resize(2048, used(cfg, 256)), what + ": grows");
        *n_alloc += cfg.n_layer;

        const auto n = used(cfg, 300);
        for (int64_t s = 0; s < cfg.n_stream; ++s) {
            c.fill(s, 0, 1000); // also fill rows that will be freed
        }

        const size_t size = c.size_bufs();

        set_fail(std::to_string(*n_alloc + i_fail + 1).c_str());
        check(c.resize(1024, n), what + ": gives back");
        *n_alloc += cfg.n_layer;

        check(c.storage->n_rows() == 1024, what + ": size");
        check_data(c, n, what);
        check(c.size_bufs() < size || cfg.n_layer == 1, what + ": buffers");

        set_fail("-1");
        check(c.resize(2048, n), what + ": grows again");
        *n_alloc += cfg.n_layer;
        check_data(c, n, what + ", grown again");
    }
}

// commit and free rows in place, as the cache does: with holes, in several streams, and with a commit that fails
static void test_inplace(bool v_trans) {
    const std::string what = v_trans ? "in place, transposed" : "in place";

    ggml_context_ptr ctx { ggml_init({ 6*ggml_tensor_overhead(), NULL, true }) };

    llama_kv_storage::layer l;
    l.k = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, N_EMBD, N_MAX, 2);
    l.v = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, N_EMBD, N_MAX, 2);

    llama_kv_storage::buffers_t bufs;

    const auto storage = llama_kv_storage_create_inplace(2, N_MAX, 1, v_trans, true, bufs);
    const ggml_backend_buffer_ptr buf { storage->alloc(ctx.get(), ggml_backend_cpu_buffer_type(), { l }) };
    check(buf != nullptr && storage->n_rows() == N_MAX && storage->can_grow(), what + ": all addresses are there");
    check(storage->rows().size() == 2*256 && storage->has(1, 255) && !storage->has(1, 256), what + ": the start");

    const void * data = l.k->data;

    auto need = storage->rows().none();
    need.add(0, 300, 400);
    need.add(1, 2000, 2001);

    const size_t n_bytes = ggml_backend_buffer_get_size(buf.get());
    const auto   least   = storage->next(need, false, 0);
    check(least.has(0, 399) && least.has(1, 2000) && !least.has(0, 500) && !least.has(1, 300), what + ": what is needed");
    check(storage->next(need, true, 0).size() > least.size(), what + ": and more");

    set_fail("-1");
    check(storage->try_resize(least, {}), what + ": grows");
    check(l.k->data == data && !storage->moved() && storage->n_bytes_copied() == 0, what + ": nothing moves");
    check(ggml_backend_buffer_get_size(buf.get()) > n_bytes, what + ": the buffer shows what is committed");

    const auto cell = [&](const ggml_tensor * t, uint32_t s, uint32_t i) {
        return (uint16_t *) t->data + (t == l.v && v_trans ? (int64_t) s*N_EMBD*N_MAX + i : ((int64_t) s*N_MAX + i)*N_EMBD);
    };
    const auto set = [&](uint32_t s, uint32_t i, uint16_t x) {
        *cell(l.k, s, i) = x;
        *cell(l.v, s, i) = x;
    };
    const auto is = [&](uint32_t s, uint32_t i, uint16_t x) {
        return *cell(l.k, s, i) == x && *cell(l.v, s, i) == x;
    };

    set(0, 0, 1);
    set(0, 399, 2);
    set(1, 10, 3);
    set(1, 2000, 4);

    // copy all of stream 0 to stream 1. Rows that existed only in stream 1 must be zero after that
    auto same = storage->rows();
    same.set_stream(1, storage->rows(), 0);
    check(storage->try_resize(same, {}) && storage->copy_stream(0, 1), what + ": copies a stream");
    check(is(1, 0, 1) && is(1, 399, 2) && is(1, 10, 0) && is(1, 2000, 0), what + ": the copy");

    // free rows in the middle
    auto rest = storage->rows().none();
    rest.add(0, 384, 400);
    rest = storage->rest(rest, 0);
    check(rest == storage->rows(), what + ": not for so little");
    auto many = storage->rows();
    many.add(0, N_MAX);
    check(storage->try_resize(many, {}), what + ": grows to all");
    rest = storage->rows().none();
    rest.add(0, 384, 400);
    rest = storage->rest(rest, 0);
    check(storage->may_shrink(16, 0) && rest.has(0, 399) && rest.has(0, 255) && !rest.has(0, 256) && !rest.has(1, 399), what + ": what stays");
    check(storage->try_resize(rest, {}) && is(0, 0, 1) && is(0, 399, 2) && *cell(l.k, 1, 399) == 0, what + ": a hole");

    check(storage->clear(1) && is(1, 0, 0) && is(0, 0, 1) && is(0, 399, 2), what + ": clears a stream");
    check(storage->clear(-1) && is(0, 0, 0) && is(0, 399, 0) && storage->rows().size() == 2*256, what + ": clears all");

    storage->pin();
    set_fail("");
}

// let a commit fail. Nothing may change
static void test_inplace_fails() {
    ggml_context_ptr ctx { ggml_init({ 6*ggml_tensor_overhead(), NULL, true }) };

    llama_kv_storage::layer l;
    l.k = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, N_EMBD, N_MAX, 1);
    l.v = nullptr;

    llama_kv_storage::buffers_t bufs;

    const auto storage = llama_kv_storage_create_inplace(1, N_MAX, 1, false, true, bufs);
    const ggml_backend_buffer_ptr buf { storage->alloc(ctx.get(), ggml_backend_cpu_buffer_type(), { l }) };

    const auto   before = storage->rows();
    const size_t size   = ggml_backend_buffer_get_size(buf.get());

    auto rows = before;
    rows.add(0, N_MAX);

    set_fail("0+");
    check(!storage->try_resize(rows, {}), "in place fails");
    check(storage->rows() == before && ggml_backend_buffer_get_size(buf.get()) == size, "in place fails: nothing has changed");
    check(storage->try_resize(before, {}), "in place fails: what is there needs no memory");
    set_fail("");
    check(storage->try_resize(rows, {}), "in place fails: grows later");
}

int main() {
    ggml_time_init(); // on Windows, the clock that the storage uses must be initialized

    std::vector<config> configs;

    for (const place where : { place::pages, place::host, place::device }) {
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  false, true,  1, 3, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  true,  true,  1, 3, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  false, true,  4, 2, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  true,  true,  4, 2, where });
        configs.push_back({ GGML_TYPE_F32,  GGML_TYPE_BF16, true,  true,  2, 1, where });
        configs.push_back({ GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, false, true,  2, 2, where });
        configs.push_back({ GGML_TYPE_F16,  GGML_TYPE_F16,  false, false, 3, 2, where });
    }

    int n_alloc = 0;

    set_fail("-1"); // count the allocations, but let none fail

    for (const auto & cfg : configs) {
        test_fail(cfg, &n_alloc);
    }

    for (const auto & cfg : configs) {
        test_shrink(cfg, &n_alloc);
    }

    for (const auto & cfg : configs) {
        test_types_fail(cfg, &n_alloc);
    }

    set_fail("");

    for (const auto & cfg : configs) {
        test_grow(cfg);
    }

    test_device_is_full();
    test_device_takes_no_larger_tensor();
    test_types_on_a_full_device();
    test_types_mixed();
    test_inplace(false);
    test_inplace(true);
    test_inplace_fails();

    return report();
}
