// Checks flash attention on the CPU with pairs of types of K and V, against results in double precision.
//
// The test skips F16 with F16 and F32 with F32, for which upstream has fast paths. For all other pairs, upstream has only a
// slow path. Each case runs twice: with that slow path (use_ref), and with the fast paths of the patch cpu-flash-attn. The
// error of a fast path must not exceed the error of the slow path, nor the error that F32 arithmetic can have (max_nmse).
//
// For K in F32 with V of another type than F16, the patch keeps the slow path. There, the slow path already multiplies in F32,
// and its error is smaller than the error of the fast paths.
//
// Rows that no query sees contain NaN, because the memory of such rows may be unmapped in a KV cache.

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include "test-kv-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

// minimum number of queries (rows of Q) per stream from which on the fast path for prompts is used
static constexpr int64_t n_rows_tiled = 64;

// number of rows of K and V in a tile. The rows of a tile are read together
static constexpr int64_t n_kv_tile = 64;

// maximum normalized mean squared error: the square of a relative error of 1e-5, which F32 arithmetic can have
static constexpr double max_nmse = 1e-10;

enum mask_kind {
    MASK_NONE,
    MASK_CAUSAL,
    MASK_WINDOW, // a query sees only the last 96 positions
    MASK_HOLES,  // a third of the cells belongs to other sequences
    MASK_EMPTY,  // causal, but the first query sees no cell
};

struct test_shape {
    const char * name;

    int64_t DK;
    int64_t DV;
    int64_t n_head;
    int64_t n_gqa;    // number of heads that share a K head and a V head
    int64_t n_rows;   // queries of a stream
    int64_t n_kv;
    int64_t n_stream;

    mask_kind mask;

    float max_bias      = 0.0f;
    float logit_softcap = 0.0f;
    bool  has_sinks     = false;
    bool  is_mla        = false; // V is the first part of each row of K
    bool  is_per_head   = false; // each head has its own mask
};

static const test_shape shapes[] = {
    //                         DK   DV heads gqa rows   kv streams
    { "token, gqa 1",          64,  64,   3,   1,   1,  517, 1, MASK_NONE   },
    { "token, gqa 3",          64,  64,   9,   3,   1,  600, 1, MASK_CAUSAL },
    { "token, gqa 4",         128, 128,   8,   4,   1,  777, 1, MASK_HOLES  },
    { "token, gqa 8",         256, 256,   8,   8,   1,  512, 1, MASK_WINDOW },
    { "token, 130 heads",      64,  64, 130, 130,   1,  515, 1, MASK_CAUSAL },
    { "token, mla",           576, 512,   8,   8,   1,  530, 1, MASK_CAUSAL, 0.0f, 0.0f, false, true },
    { "token, alibi",          64,  64,  12,   3,   1,  600, 1, MASK_CAUSAL, 8.0f },
    { "token, soft cap",       64,  64,   4,   4,   1,  513, 1, MASK_HOLES,  0.0f, 5.0f },
    { "token, sinks",          64,  64,   8,   4,   1,  641, 1, MASK_CAUSAL, 0.0f, 0.0f, true },
    { "token, short",          64,  64,   4,   4,   1,   77, 1, MASK_CAUSAL },
    { "token, streams",        64,  64,   4,   4,   1,  600, 3, MASK_CAUSAL },
    { "token, masks",          64,  64,   8,   4,   1,  600, 1, MASK_HOLES,  0.0f, 0.0f, false, false, true },
    { "token, long V",         64, 128,   4,   2,   1,  600, 1, MASK_HOLES  },
    { "few rows, gqa 1",       64,  64,   3,   1,   7,  129, 1, MASK_NONE   },
    { "few rows, gqa 3",       64,  64,   9,   3,   2,  600, 1, MASK_CAUSAL },
    { "few rows, gqa 4",      128, 128,   8,   4,  63,  777, 1, MASK_HOLES  },
    { "few rows, gqa 8",      256, 256,   8,   8,   5,  512, 1, MASK_WINDOW },
    { "few rows, mla",        576, 512,   8,   8,   9,  130, 1, MASK_CAUSAL, 0.0f, 0.0f, false, true },
    { "few rows, alibi",       64,  64,  12,   3,  40,  140, 1, MASK_CAUSAL, 8.0f },
    { "few rows, soft cap",    64,  64,   4,   4,   3,  513, 1, MASK_HOLES,  0.0f, 5.0f },
    { "few rows, sinks",       64,  64,   8,   4,  33,  641, 1, MASK_CAUSAL, 0.0f, 0.0f, true },
    { "few rows, streams",     64,  64,   4,   2,   4,  200, 3, MASK_CAUSAL },
    { "few rows, chunk sinks", 64,  64,   4,   4,   3,  641, 1, MASK_CAUSAL, 0.0f, 0.0f, true }, // a chunk for each thread
    { "few rows, 10 tiles",    64,  64,  20,   2,  32,  650, 1, MASK_CAUSAL },                   // not a chunk for each thread
    { "few rows, 2 chunks",    64,  64,   2,   2,   2,  100, 1, MASK_CAUSAL },                   // fewer units than threads
    { "few rows, empty",       64,  64,   6,   3,   3,  300, 1, MASK_EMPTY  },
    { "few rows, masks",       64,  64,   8,   4,   3,  300, 1, MASK_HOLES,  0.0f, 0.0f, false, false, true },
    { "few rows, long V",      64, 128,   4,   2,   5,  300, 1, MASK_HOLES  },
    { "prompt, gqa 1",         64,  64,   3,   1,  64,  129, 1, MASK_NONE   },
    { "prompt, gqa 3",         64,  64,   9,   3,  70,  133, 1, MASK_CAUSAL },
    { "prompt, gqa 4",        128, 128,   4,   4,  65,  200, 1, MASK_HOLES  },
    { "prompt, gqa 8",        256, 256,   8,   8,  67,  300, 1, MASK_WINDOW },
    { "prompt, mla",          576, 512,   4,   4,  64,   97, 1, MASK_CAUSAL, 0.0f, 0.0f, false, true },
    { "prompt, alibi",         64,  64,  12,   3,  66,  140, 1, MASK_CAUSAL, 8.0f },
    { "prompt, soft cap",      64,  64,   4,   4,  64,  101, 1, MASK_HOLES,  0.0f, 5.0f },
    { "prompt, sinks",         64,  64,   8,   4, 129,  191, 1, MASK_CAUSAL, 0.0f, 0.0f, true },
    { "prompt, streams",       64,  64,   4,   2,  64,  130, 3, MASK_CAUSAL },
    { "prompt, empty",         64,  64,   6,   3,  65,  130, 1, MASK_EMPTY  },
    { "prompt, long V",        64, 128,   4,   2,  64,  130, 1, MASK_HOLES  },
};

// return random numbers that are the same on every platform, roughly normal with a standard deviation of 1
static float random_normal() {
    float sum = 0.0f;
    for (int i = 0; i < 3; ++i) {
        sum += (float) (random_bits() >> 40)/(float) (1 << 24) - 0.5f;
    }

    return 2.0f*sum;
}

// builds the operation on tensors with data, and computes its result in double precision
struct test_op {
    const test_shape & shape;

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;

    ggml_cgraph * gf   = nullptr;
    ggml_tensor * q    = nullptr;
    ggml_tensor * k    = nullptr;
    ggml_tensor * v    = nullptr;
    ggml_tensor * mask = nullptr;
    ggml_tensor * sink = nullptr;
    ggml_tensor * out  = nullptr;

    test_op(const test_shape & shape, ggml_type type_k, ggml_type type_v, ggml_backend_t backend) : shape(shape) {
        const ggml_init_params params = { 16*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));

        const int64_t n_head_kv = shape.n_head/shape.n_gqa;

        // as in a KV cache, the heads of a cell are next to each other
        auto new_tensor = [&](ggml_type type, int64_t n_embd, int64_t n_head, int64_t n) {
            return ggml_permute(ctx.get(), ggml_new_tensor_4d(ctx.get(), type, n_embd, n_head, n, shape.n_stream), 0, 2, 1, 3);
        };

        q = new_tensor(GGML_TYPE_F32, shape.DK, shape.n_head, shape.n_rows);
        k = new_tensor(type_k,        shape.DK, n_head_kv,    shape.n_kv);
        v = shape.is_mla
            ? ggml_view_4d(ctx.get(), k, shape.DV, k->ne[1], k->ne[2], k->ne[3], k->nb[1], k->nb[2], k->nb[3], 0)
            : new_tensor(type_v, shape.DV, n_head_kv, shape.n_kv);

        if (shape.mask != MASK_NONE) {
            mask = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, shape.n_kv, shape.n_rows, shape.is_per_head ? shape.n_head : 1, shape.n_stream);
        }
        if (shape.has_sinks) {
            sink = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, shape.n_head);
        }

        out = ggml_flash_attn_ext(ctx.get(), q, k, v, mask, scale(), shape.max_bias, shape.logit_softcap);
        ggml_flash_attn_ext_add_sinks(out, sink);

        gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, out);

        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

        fill(q);
        fill(k);
        if (!shape.is_mla) {
            fill(v);
        }
        if (sink) {
            fill(sink);
        }
        if (mask) {
            fill_mask();
        }
    }

    // return a scale with which the logits have a standard deviation of 2
    float scale() const {
        return 2.0f/std::sqrt((float) shape.DK);
    }

    void fill(ggml_tensor * t) {
        std::vector<float> data(ggml_nelements(t));
        for (auto & x : data) {
            x = random_normal();
        }

        // the tensors are permuted, but their memory is contiguous
        ggml_quantize_chunk(t->type, data.data(), t->data, 0, ggml_nelements(t)/t->ne[0], t->ne[0], nullptr);
    }

    void fill_mask() {
        auto * data = (ggml_fp16_t *) mask->data;

        for (int64_t s = 0; s < shape.n_stream; ++s) {
            std::vector<bool> is_seen(shape.n_kv);
            for (int64_t h = 0; h < mask->ne[2]; ++h) {
                std::vector<bool> is_hole(shape.n_kv);
                for (int64_t j = 0; j < shape.n_kv; ++j) {
                    is_hole[j] = shape.mask == MASK_HOLES && random_normal() < -0.43f;
                }

                for (int64_t i = 0; i < shape.n_rows; ++i) {
                    // the cells after the last position are not used
                    const int64_t pos = shape.n_kv - shape.n_rows - 3 + i;

                    for (int64_t j = 0; j < shape.n_kv; ++j) {
                        const bool is_visible = j <= pos && !is_hole[j] && (shape.mask != MASK_WINDOW || pos - j < 96) &&
                            (shape.mask != MASK_EMPTY || i > 0);
                        const float bias = shape.max_bias > 0.0f ? (float) (j - pos) : 0.0f;

                        *data++ = ggml_fp32_to_fp16(is_visible ? bias : -INFINITY);

                        is_seen[j] = is_seen[j] || is_visible;
                    }
                }
            }

            for (int64_t j = 0; j < shape.n_kv; ++j) {
                const auto j0 = is_seen.begin() + j/n_kv_tile*n_kv_tile;
                const auto j1 = is_seen.begin() + std::min((j/n_kv_tile + 1)*n_kv_tile, shape.n_kv);

                // The F16 paths skip rows that no query sees, and tiles of such rows. So set these rows to NaN.
                if (!is_seen[j] && (shape.n_rows < n_rows_tiled || std::find(j0, j1, true) == j1)) {
                    set_nan(k, j, s);
                    set_nan(v, j, s);
                }
            }
        }
    }

    static void set_nan(ggml_tensor * t, int64_t j, int64_t s) {
        for (int64_t h = 0; h < t->ne[2]; ++h) {
            memset((char *) t->data + j*t->nb[1] + h*t->nb[2] + s*t->nb[3], 0xff, ggml_row_size(t->type, t->ne[0]));
        }
    }

    static std::vector<float> get_row(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
        const char * data = (const char *) t->data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3];

        std::vector<float> res(t->ne[0]);
        if (t->type == GGML_TYPE_F32) {
            memcpy(res.data(), data, res.size()*sizeof(float));
        } else {
            ggml_get_type_traits(t->type)->to_float(data, res.data(), t->ne[0]);
        }

        return res;
    }

    // return the ALiBi slope of a head
    double slope(int64_t h) const {
        if (shape.max_bias == 0.0f) {
            return 1.0;
        }

        const int64_t n = 1ll << (int64_t) std::floor(std::log2(shape.n_head));

        return h < n ? std::pow(2.0, -shape.max_bias*(h + 1)/n) : std::pow(2.0, -shape.max_bias/2*(2*(h - n) + 1)/n);
    }

    std::vector<double> reference() const {
        std::vector<double> res;

        for (int64_t s = 0; s < shape.n_stream; ++s) {
            std::vector<std::vector<float>> k_rows;
            std::vector<std::vector<float>> v_rows;
            for (int64_t h = 0; h < k->ne[2]; ++h) {
                for (int64_t j = 0; j < shape.n_kv; ++j) {
                    k_rows.push_back(get_row(k, j, h, s));
                    v_rows.push_back(get_row(v, j, h, s));
                }
            }

            for (int64_t i = 0; i < shape.n_rows; ++i) {
                for (int64_t h = 0; h < shape.n_head; ++h) {
                    const auto q_row = get_row(q, i, h, s);

                    const auto * m = mask ? (const ggml_fp16_t *) ((const char *) mask->data + i*mask->nb[1] + h%mask->ne[2]*mask->nb[2] + s*mask->nb[3]) : nullptr;
                    const auto * k0 = k_rows.data() + h/shape.n_gqa*shape.n_kv;
                    const auto * v0 = v_rows.data() + h/shape.n_gqa*shape.n_kv;

                    std::vector<double> logits(shape.n_kv, -INFINITY);

                    double max = sink ? ((const float *) sink->data)[h] : -INFINITY;
                    for (int64_t j = 0; j < shape.n_kv; ++j) {
                        const double bias = m ? slope(h)*ggml_fp16_to_fp32(m[j]) : 0.0;
                        if (bias == -INFINITY) {
                            continue;
                        }

                        // Use eight separate sums, which the compiler can vectorize. It may not change the order of the
                        // additions of one sum.
                        double sums[8] = {};
                        for (int64_t d = 0; d < shape.DK; d += 8) {
                            for (int64_t i = 0; i < 8; ++i) {
                                sums[i] += (double) q_row[d + i]*k0[j][d + i];
                            }
                        }
                        double dot = scale()*std::accumulate(sums, sums + 8, 0.0);

                        if (shape.logit_softcap > 0.0f) {
                            dot = shape.logit_softcap*std::tanh(dot/shape.logit_softcap);
                        }

                        logits[j] = dot + bias;
                        max = std::max(max, logits[j]);
                    }

                    double sum = sink ? std::exp(((const float *) sink->data)[h] - max) : 0.0;

                    std::vector<double> row(shape.DV);
                    for (int64_t j = 0; j < shape.n_kv; ++j) {
                        if (logits[j] == -INFINITY) {
                            continue;
                        }

                        const double w = std::exp(logits[j] - max);
                        for (int64_t d = 0; d < shape.DV; ++d) {
                            row[d] += w*v0[j][d];
                        }
                        sum += w;
                    }

                    for (const double x : row) {
                        res.push_back(sum == 0.0 ? 0.0 : x/sum);
                    }
                }
            }
        }

        return res;
    }

    std::vector<float> compute(ggml_backend_t backend) const {
        check(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS, std::string(shape.name) + ": computes");

        const auto * data = (const float *) out->data;

        return std::vector<float>(data, data + ggml_nelements(out));
    }
};

static double nmse(const std::vector<float> & res, const std::vector<double> & expected) {
    double err = 0.0;
    double sum = 0.0;
    for (size_t i = 0; i < res.size(); ++i) {
        err += (res[i] - expected[i])*(res[i] - expected[i]);
        sum += expected[i]*expected[i];
    }

    return err/sum;
}

struct cpu_backend {
    ggml_backend_ptr backend;

    ggml_backend_set_n_threads_t set_n_threads = nullptr;

    void (*set_use_ref)(ggml_backend_t, bool) = nullptr;

    cpu_backend() {
        ggml_backend_load_all();

        backend.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));

        auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));

        set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
        set_use_ref   = (void (*)(ggml_backend_t, bool)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_set_use_ref");
    }
};

// the largest errors of a pair of types
struct test_errors {
    double old_max   = 0.0;
    double new_max   = 0.0;
    double ratio_max = 0.0;
};

static void test(
        const cpu_backend & cpu, const test_shape & shape, ggml_type type_k, ggml_type type_v, const std::vector<int> & threads,
        test_errors & errors) {
    const test_op op(shape, type_k, type_v, cpu.backend.get());

    const auto expected = op.reference();

    for (const int n_threads : threads) {
        const std::string name = std::string(shape.name) + ", " + ggml_type_name(type_k) + " and " + ggml_type_name(type_v) +
            ", " + std::to_string(n_threads) + " threads";

        cpu.set_n_threads(cpu.backend.get(), n_threads);

        cpu.set_use_ref(cpu.backend.get(), true);
        const auto res_old = op.compute(cpu.backend.get());

        cpu.set_use_ref(cpu.backend.get(), false);
        const auto res_new = op.compute(cpu.backend.get());

        const double err_old = nmse(res_old, expected);
        const double err_new = nmse(res_new, expected);

        // the condition is such that a NaN fails
        check(err_new <= max_nmse, name + ": the error is " + std::to_string(err_new/max_nmse) + " of the limit");
        check(err_new <= err_old, name + ": the error is " + std::to_string(err_new/err_old) + " of the old one");

        errors.old_max   = std::max(errors.old_max,   err_old);
        errors.new_max   = std::max(errors.new_max,   err_new);
        errors.ratio_max = std::max(errors.ratio_max, err_new/err_old);
    }
}

int main() {
    const cpu_backend cpu;
    check(cpu.set_use_ref && cpu.set_n_threads, "the CPU backend has a reference path");

    printf("%-16s %12s %12s %12s\n", "types", "old nmse", "new nmse", "worst ratio");

    for (const auto type_k : types) {
        for (const auto type_v : types) {
            // for these types, upstream has fast paths
            if (type_k == type_v && (type_k == GGML_TYPE_F16 || type_k == GGML_TYPE_F32)) {
                continue;
            }

            test_errors errors;
            int n_threads = 0;
            for (const auto & shape : shapes) {
                if (type_k == type_v) {
                    test(cpu, shape, type_k, type_v, { 1, 2, 3 }, errors);
                } else if (!shape.is_mla) {
                    n_threads = n_threads%3 + 1;
                    test(cpu, shape, type_k, type_v, { n_threads }, errors);
                }
            }

            const auto name = std::string(ggml_type_name(type_k)) + "/" + ggml_type_name(type_v);
            printf("%-16s %12.2e %12.2e %12.2e\n", name.c_str(), errors.old_max, errors.new_max, errors.ratio_max);
        }
    }

    return report();
}
