#pragma once

// A cache on any kind of storage, for tests of the behaviour that all storages share. For storage in device memory, the tests
// use host memory that the storage treats as device memory

#include "../src/llama-kv-storage.h"

#include "test-kv-rows.h"
#include "test-kv.h"

#include "../ggml/src/ggml-backend-impl.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

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
    bool    is_device = false; // the storage treats the memory as device memory

    std::string name() const {
        return std::string(what == kind::fixed ? "fixed" : what == kind::copy ? "copy" : "in place") + (is_device ? " on a device" : "") + (v_trans ? " transposed" : "") +
            (has_v ? "" : " without V") + " streams " + std::to_string(n_stream);
    }
};

struct cache {
    cache(const config & cfg, ggml_type type) : cfg(cfg) {
        switch (cfg.what) {
            case kind::fixed:   storage = llama_kv_storage_create_fixed  (cfg.n_stream, N_MAX,    cfg.v_trans, bufs); break;
            case kind::copy:    storage = llama_kv_storage_create_copy   (cfg.n_stream, N_MAX, 1, cfg.v_trans, bufs); break;
            case kind::inplace: storage = llama_kv_storage_create_inplace(cfg.n_stream, N_MAX, 1, cfg.v_trans, true, bufs); break;
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

        static ggml_backend_buffer_type device = *ggml_backend_cpu_buffer_type();
        device.iface.is_host = nullptr;

        ggml_backend_buffer_t buf = storage->alloc(ctx, cfg.is_device ? &device : ggml_backend_cpu_buffer_type(), layers);
        ggml_backend_buffer_clear(buf, 0);
        bufs.emplace_back(ggml_context_ptr(ctx), ggml_backend_buffer_ptr(buf));
    }

    // call f(id, tensor, is_transposed) for K and V of each layer
    template <typename F>
    void each(F && f) {
        for (uint32_t il = 0; il < N_LAYER; ++il) {
            f(il*2, layers[il].k, false);
            if (layers[il].v) {
                f(il*2 + 1, layers[il].v, cfg.v_trans);
            }
        }
    }

    // return the bytes of row i of stream s. If the tensor is transposed, collect one element from each of the N_EMBD strips
    // of the stream
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

    // return the rows that are in use, tensor by tensor
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
