// Unit tests of storage in place in device memory (ggml-pages.h), on fake devices
// They check which rows are mapped and unmapped, that every byte is kept, and the behaviour without enough memory.

#include "../src/llama-kv-storage.h"

#include "../tools/kv-check/fake-device.h"
#include "test-kv-rows.h"
#include "test-kv.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

static constexpr size_t   PAGE   = 4096;
static constexpr int64_t  N_EMBD = 64;
static constexpr uint32_t N_MAX  = 4096;
static constexpr size_t   LARGE  = size_t(64) << 20;

// return 1 + the last row of a stream
static uint32_t end_of(const llama_kv_rows & rows, uint32_t s) {
    uint32_t res = 0;
    rows.each_run(s, [&](uint32_t, uint32_t i1) { res = i1; });
    return res;
}

static size_t n_bytes_free(ggml_backend_dev_t dev) {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    return free;
}

// allocate all memory of a device except n_bytes
static ggml_backend_buffer_ptr take_all_but(ggml_backend_dev_t dev, size_t n_bytes) {
    return ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), n_bytes_free(dev) - n_bytes));
}

// a cache with one layer on each of the devices, in this order
struct cache {
    cache(const std::vector<ggml_backend_dev_t> & devs, ggml_type type, int64_t n_stream, int64_t n_embd_k = N_EMBD) :
        storage(llama_kv_storage_create_inplace(n_stream, N_MAX, 1, false, false, bufs)) {
        std::map<ggml_backend_dev_t, std::pair<ggml_context_ptr, std::vector<llama_kv_storage::layer>>> parts;

        for (ggml_backend_dev_t dev : devs) {
            auto & part = parts[dev];
            if (!part.first) {
                part.first.reset(ggml_init({ devs.size()*size_t(2*(1 + n_stream))*ggml_tensor_overhead(), nullptr, true }));
            }

            ggml_context * ctx = part.first.get();

            llama_kv_storage::layer l;
            const auto add = [&](std::vector<ggml_tensor *> & views, int64_t n_embd) {
                ggml_tensor * t = ggml_new_tensor_3d(ctx, type, n_embd, N_MAX, n_stream);
                for (int64_t s = 0; s < n_stream; ++s) {
                    views.push_back(ggml_view_2d(ctx, t, n_embd, N_MAX, t->nb[1], s*t->nb[2]));
                }
                return t;
            };
            l.k = add(l.k_stream, n_embd_k);
            l.v = add(l.v_stream, 2*N_EMBD);

            layers.push_back(l);
            part.second.push_back(l);
        }

        for (auto & [dev, part] : parts) {
            auto & [ctx, layers_dev] = part;
            ggml_backend_buffer_ptr buf(storage->alloc(ctx.get(), ggml_backend_dev_buffer_type(dev), layers_dev));
            if (!buf) {
                is_there = false;
                ctx_left = std::move(ctx);
                return;
            }
            ggml_backend_buffer_clear(buf.get(), 0); // as the constructor of llama_kv_cache does
            bufs.emplace_back(std::move(ctx), std::move(buf));
        }
    }

    size_t n_bytes() const {
        return storage->n_bytes(storage->rows(), layers[0].k->type, layers[0].v->type);
    }

    size_t size_bufs() const {
        size_t res = 0;
        for (const auto & [_, buf] : bufs) {
            res += ggml_backend_buffer_get_size(buf.get());
        }
        return res;
    }

    // call f(tensor, id) for K and V of each layer. f may access mapped rows by pointer, because a fake device has host memory
    template <typename F>
    void each(F && f) {
        int id = 0;
        for (const auto & l : layers) {
            f(l.k, id++);
            f(l.v, id++);
        }
    }

    static char * row(ggml_tensor * t, int64_t s, int64_t i) {
        return (char *) t->data + s*t->nb[2] + i*t->nb[1];
    }

    // return the content that fill() writes to a row. There are 211 different contents for each type and size of a row
    static const std::vector<char> & pattern(const ggml_tensor * t, int id, int64_t s, int64_t i, int version) {
        static std::map<std::tuple<ggml_type, int64_t, int>, std::vector<char>> rows;

        const int phase = (id*31 + s*17 + i*7 + version*5) % 211;

        auto & res = rows[{ t->type, t->ne[0], phase }];
        if (res.empty()) {
            std::vector<float> x(t->ne[0]);
            for (size_t j = 0; j < x.size(); ++j) {
                x[j] = 0.01f*(int((phase + j*3) % 211) - 100);
            }
            res = converted((const char *) x.data(), x.size(), GGML_TYPE_F32, t->type);
        }
        return res;
    }

    void fill(int64_t s, int64_t i0, int64_t i1, int version = 0) {
        each([&](ggml_tensor * t, int id) {
            for (int64_t i = i0; i < i1; ++i) {
                const auto & data = pattern(t, id, s, i, version);
                memcpy(row(t, s, i), data.data(), data.size());
            }
        });
    }

    bool is_filled(int64_t s, int64_t i0, int64_t i1, int version = 0) {
        bool res = true;
        each([&](ggml_tensor * t, int id) {
            for (int64_t i = i0; i < i1 && res; ++i) {
                const auto & data = pattern(t, id, s, i, version);
                res = memcmp(row(t, s, i), data.data(), data.size()) == 0;
            }
        });
        return res;
    }

    bool is_zero(int64_t s, int64_t i0, int64_t i1) {
        bool res = true;
        each([&](ggml_tensor * t, int) {
            for (int64_t i = i0; i < i1; ++i) {
                for (size_t ib = 0; ib < t->nb[1]; ++ib) {
                    res = res && row(t, s, i)[ib] == 0;
                }
            }
        });
        return res;
    }

    llama_kv_storage::buffers_t bufs;

    std::unique_ptr<llama_kv_storage> storage;

    std::vector<llama_kv_storage::layer> layers;

    bool is_there = true;

    ggml_context_ptr ctx_left; // owns the tensors for which there was no memory
};

static llama_kv_rows rows_of(const cache & c, const std::vector<uint32_t> & n) {
    auto res = c.storage->rows().none();
    for (uint32_t s = 0; s < n.size(); ++s) {
        res.add(s, 0, n[s]);
    }
    return res;
}

static void test_rows() {
    ggml_backend_dev_t dev = fake_device_add(LARGE, PAGE);

    const size_t n_free = n_bytes_free(dev);
    {
        cache c({ dev, dev, dev }, GGML_TYPE_F16, 2);
        check(c.is_there && c.storage->reads_below() && c.storage->n_rows() == N_MAX, "rows: all addresses are there");
        check(c.storage->rows().size() == 2*256 && c.storage->rows().n_block() == 256, "rows: the start");
        check(n_free - n_bytes_free(dev) == c.n_bytes() && c.size_bufs() == c.n_bytes(), "rows: the memory of the start");

        const void * data = c.layers[1].v->data;

        auto need = c.storage->rows().none();
        need.add(1, 0, 700);
        const auto least = c.storage->next(need, false, 0);
        check(least == rows_of(c, { 256, 768 }), "rows: what is needed");

        check(c.storage->try_resize(least, {}) && !c.storage->moved() && c.storage->n_bytes_copied() == 0 && c.layers[1].v->data == data, "rows: nothing moves");
        check(n_free - n_bytes_free(dev) == c.n_bytes() && c.size_bufs() == c.n_bytes(), "rows: the memory");
        check(c.is_zero(1, 0, 768), "rows: zeros");

        c.fill(1, 0, 700);
        c.fill(0, 0, 256, 1);

        auto same = c.storage->rows();
        same.set_stream(0, c.storage->rows(), 1);
        check(c.storage->try_resize(same, {}) && c.storage->copy_stream(1, 0), "rows: a stream is copied");
        check(memcmp(cache::row(c.layers[2].v, 0, 0), cache::row(c.layers[2].v, 1, 0), 700*c.layers[2].v->nb[1]) == 0 && c.is_zero(0, 700, 768), "rows: the copy");

        check(c.storage->clear(0) && c.is_zero(0, 0, 256) && !c.storage->has(0, 256) && c.is_filled(1, 0, 700), "rows: a stream is cleared");

        // rest() keeps as many rows of stream 0 as of stream 1, which is the longest stream, because stream 0 had that many
        // before
        check(c.storage->try_resize(rows_of(c, { 2048, N_MAX }), {}), "rows: more");
        auto used = c.storage->rows().none();
        used.add(1, 600, 700);
        check(c.storage->rest(used, 0) == rows_of(c, { 768, 768 }), "rows: what stays has no holes");
        check(c.storage->try_resize(c.storage->rest(used, 0), {}) && c.is_filled(1, 0, 700), "rows: gives back");

        check(c.storage->clear(-1) && c.storage->rows() == rows_of(c, { 256, 256 }) && c.is_zero(0, 0, 256) && c.is_zero(1, 0, 256), "rows: cleared");
        check(n_free - n_bytes_free(dev) == c.n_bytes(), "rows: the memory at the end");
    }
    check(n_bytes_free(dev) == n_free, "rows: all memory is back");
}

// set random sizes on two devices, of which one often has too little memory. A change succeeds completely, or changes nothing
static void test_random() {
    for (const size_t n_mib : { 1, 2, 4 }) {
        ggml_backend_dev_t large = fake_device_add(LARGE, PAGE);
        ggml_backend_dev_t small = fake_device_add(n_mib << 20, PAGE);

        cache c({ large, small, large, small }, GGML_TYPE_Q8_0, 2);
        check(c.is_there, "random: the start");

        std::mt19937 rng(n_mib);

        uint32_t n_filled[2] = { 0, 0 };
        int      n_full      = 0;

        for (int i = 0; i < 1000; ++i) {
            const std::string what = "random: " + std::to_string(n_mib) + " MiB, step " + std::to_string(i);

            std::vector<uint32_t> n = { 1 + uint32_t(rng() % N_MAX), 1 + uint32_t(rng() % N_MAX) };
            if (rng() % 2) {
                n = { n[0]/8 + 1, n[1]/8 + 1 };
            }

            const auto rows   = rows_of(c, n);
            const auto before = c.storage->rows();

            if (c.storage->try_resize(rows, {})) {
                check(c.storage->rows() == rows, what + ": rows");
                for (int s = 0; s < 2; ++s) {
                    n_filled[s] = std::min(n_filled[s], (n[s] + 255)/256*256);
                }
            } else {
                check(c.storage->rows() == before, what + ": nothing has changed");
                n_full++;
            }

            check(2*LARGE + (n_mib << 20) - LARGE - n_bytes_free(large) - n_bytes_free(small) == c.n_bytes(), what + ": memory");

            for (int s = 0; s < 2; ++s) {
                const uint32_t n_there = end_of(c.storage->rows(), s);

                check(c.is_filled(s, n_filled[s] > 20 ? n_filled[s] - 20 : 0, n_filled[s]), what + ": what was there");
                c.fill(s, n_filled[s], n_there);
                n_filled[s] = n_there;
            }
        }

        check(n_mib == 4 ? n_full == 0 : n_full > 0 && n_full < 1000, "random: full " + std::to_string(n_full) + " times of 1000");
    }
}

// test that the bytes after the last row exist for kernels that use a single head of K as a row
// Such a kernel reads bytes after the head (padding). A kernel that uses all heads of a cell as one row reads no bytes after
// that row here.
static void test_heads() {
    ggml_backend_dev_t dev = fake_device_add(LARGE, PAGE);

    cache c({ dev, dev }, GGML_TYPE_Q8_0, 1, 512);

    const ggml_tensor * k = c.layers[0].k;
    check(ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(dev), k) == ggml_nbytes(k) && 256*k->nb[1] % PAGE == 0, "heads: the rows end with a page");

    ggml_tensor head = *c.layers[0].k_stream[0];
    head.ne[0] = 64;
    head.ne[1] = 1;
    const size_t n_bytes_padding = ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(dev), &head) - ggml_nbytes(&head);

    const volatile char * end = (const char *) k->data + 256*k->nb[1];
    check(n_bytes_padding > 0 && end[n_bytes_padding - 1] == 0, "heads: what is read behind the last one is there");
}

static void test_start_fails() {
    ggml_backend_dev_t dev = fake_device_add(16*PAGE, PAGE);
    {
        cache c({ dev }, GGML_TYPE_F16, 1);
        check(!c.is_there && c.layers[0].k->buffer == nullptr && c.layers[0].k_stream[0]->data == nullptr, "too small: no start");
    }
    check(n_bytes_free(dev) == 16*PAGE, "too small: nothing stays");
}

enum class memory { plenty, least, less, none, stolen };

static void test_types(ggml_type from, ggml_type to, int64_t n_stream, memory how) {
    const char * names[] = { "plenty", "least", "less", "none", "stolen" };
    const std::string what = std::string("types: ") + ggml_type_name(from) + " to " + ggml_type_name(to) + ", " + std::to_string(n_stream) + " streams, " + names[int(how)];

    ggml_backend_dev_t dev = fake_device_add(LARGE, PAGE);

    cache c({ dev, dev, dev }, from, n_stream);

    std::vector<uint32_t> n_used;
    for (int64_t s = 0; s < n_stream; ++s) {
        n_used.push_back(3000 + 300*s);
    }
    check(c.storage->try_resize(rows_of(c, n_used), {}), what + ": rows");
    for (int64_t s = 0; s < n_stream; ++s) {
        c.fill(s, 0, n_used[s]);
    }

    const auto   rows     = c.storage->rows();
    const bool   is_wider = ggml_row_size(to, N_EMBD) > ggml_row_size(from, N_EMBD);
    const size_t n_before = n_bytes_free(dev);

    // the least memory for a change of types: two pages, one page per stream, and the rows that are converted in one step
    // (2048 rows of V)
    const size_t n_least = PAGE*(2 + n_stream) + ggml_row_size(to, LLAMA_KV_CONVERT_ELEMENTS);

    ggml_backend_buffer_ptr others;
    if (how != memory::plenty) {
        others = take_all_but(dev, how == memory::none ? 0 : how == memory::less ? n_least - PAGE : n_least);
    }

    const bool ok = c.storage->prepare_types(to, to, n_used);
    check(ok == (how == memory::plenty || (how != memory::none && how != memory::less && !is_wider)), what + ": is prepared");

    if (!ok) {
        bool same = c.layers[0].k->type == from;
        for (int64_t s = 0; s < n_stream; ++s) {
            same = same && c.is_filled(s, 0, n_used[s]);
        }
        others.reset();
        check(same && n_bytes_free(dev) == n_before, what + ": nothing has changed");
        return;
    }

    std::vector<ggml_backend_buffer_ptr> stolen; // buffers that occupy the memory as soon as some is freed

    const bool done = c.storage->set_types([&](const llama_kv_lines & a, const llama_kv_lines & b, bool is_v) {
        convert(a, b, is_v);
        if (how == memory::stolen) {
            stolen.push_back(take_all_but(dev, 0));
        }
    });

    check(c.storage->moved(), what + ": the graphs are told");

    if (how == memory::stolen) {
        check(!done && c.storage->rows().size() == 0 && c.layers[2].v->type == to && c.n_bytes() == 0, what + ": all is lost, and known to be");
        return;
    }

    check(done && c.storage->rows() == rows, what + ": the same rows");
    check(c.layers[2].v->type == to && c.layers[2].v_stream[n_stream - 1]->nb[1] == ggml_row_size(to, 2*N_EMBD), what + ": tensors and views");

    bool right = true;
    c.each([&](ggml_tensor * t, int id) {
        ggml_tensor as = *t;
        as.type = from;
        for (int64_t s = 0; s < n_stream; ++s) {
            for (int64_t i = 0; i < n_used[s]; ++i) {
                const auto data = converted(cache::pattern(&as, id, s, i, 0).data(), t->ne[0], from, to);
                right = right && memcmp(cache::row(t, s, i), data.data(), data.size()) == 0;
            }
        }
    });
    check(right, what + ": rows");
    for (int64_t s = 0; s < n_stream; ++s) {
        check(c.is_zero(s, n_used[s], end_of(rows, s)), what + ": the rest");
    }

    others.reset();
    check(LARGE - n_bytes_free(dev) == c.n_bytes() && c.size_bufs() == c.n_bytes(), what + ": memory");
    check(c.storage->try_resize(rows_of(c, std::vector<uint32_t>(n_stream, N_MAX)), {}), what + ": grows on");
}

int main() {
    ggml_time_init(); // on Windows, the clock that the storage uses must be initialized

#ifdef _WIN32
    _putenv_s("LLAMA_KV_DYNAMIC_MARGIN", "0");
#else
    setenv("LLAMA_KV_DYNAMIC_MARGIN", "0", 1);
#endif

    test_rows();
    test_random();
    test_heads();
    test_start_fails();

    for (const int64_t n_stream : { 1, 3 }) {
        for (const memory how : { memory::plenty, memory::least, memory::less, memory::none }) {
            test_types(GGML_TYPE_F16,  GGML_TYPE_Q8_0, n_stream, how);
            test_types(GGML_TYPE_F32,  GGML_TYPE_F16,  n_stream, how);
            test_types(GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, n_stream, how);
            test_types(GGML_TYPE_Q8_0, GGML_TYPE_F16,  n_stream, how);
        }
    }

    // narrower types, while other programs allocate the device memory that set_types() frees: set_types() fails, and all rows
    // are lost
    test_types(GGML_TYPE_F16,  GGML_TYPE_Q8_0, 3, memory::stolen);
    test_types(GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, 3, memory::stolen);

    return report();
}
