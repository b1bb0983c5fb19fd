#include "fattn-convert.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "ops.h"
#include "quants.h"
#include "simd-gemm.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

// The operation: its tensors and parameters
struct ggml_fa_op {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;

    int64_t DK;
    int64_t DV;
    int64_t n_head;

    float scale;
    float max_bias;
    float logit_softcap;

    uint32_t n_head_log2;

    float m0;
    float m1;

    ggml_to_float_t k_to_float;
    ggml_to_float_t v_to_float;

    ggml_fa_op(const ggml_tensor * dst) {
        q     = dst->src[0];
        k     = dst->src[1];
        v     = dst->src[2];
        mask  = dst->src[3];
        sinks = dst->src[4];

        DK     = k->ne[0];
        DV     = v->ne[0];
        n_head = q->ne[2];

        scale         = ggml_get_op_params_f32(dst, 0);
        max_bias      = ggml_get_op_params_f32(dst, 1);
        logit_softcap = ggml_get_op_params_f32(dst, 2);

        if (logit_softcap != 0) {
            scale /= logit_softcap;
        }

        n_head_log2 = 1u << (uint32_t) floor(log2(n_head));

        m0 = powf(2.0f, -(max_bias       ) / n_head_log2);
        m1 = powf(2.0f, -(max_bias / 2.0f) / n_head_log2);

        k_to_float = ggml_cpu_get_to_float(k->type);
        v_to_float = ggml_cpu_get_to_float(v->type);

        GGML_ASSERT(k_to_float && "fattn: unsupported K-type");
        GGML_ASSERT(v_to_float && "fattn: unsupported V-type");
    }

    // the ALiBi slope of a head
    float slope(uint32_t h) const {
        return (max_bias > 0.0f) ? h < n_head_log2 ? powf(m0, h + 1) : powf(m1, 2*(h - n_head_log2) + 1) : 1.0f;
    }

    // scale products of Q and K, and apply the soft cap
    void scale_scores(int n_kv, float * kq) const {
        ggml_vec_scale_f32(n_kv, kq, scale);

        if (logit_softcap != 0.0f) {
            ggml_vec_tanh_f32(n_kv, kq, kq);
            ggml_vec_scale_f32(n_kv, kq, logit_softcap);
        }
    }

    // VKQ += KQ * V for n queries and the first n_kv of kv_tile_size rows of V. V32 has room for kv_tile_size rows
    void add_v(float * VKQ, const float * KQ, float * V32, const char * v_head, const int64_t * rows, int n, int n_kv, int kv_tile_size) const {
        for (int tk = 0; tk < n_kv; ++tk) {
            v_to_float(v_head + rows[tk]*v->nb[1], V32 + tk * DV, DV);
        }
        memset(V32 + n_kv * DV, 0, (kv_tile_size - n_kv) * DV * sizeof(float));
        simd_gemm(VKQ, KQ, V32, n, kv_tile_size, DV);
    }
};

// Turns the first n_kv of kv_tile_size scores of a tile into weights, sets the other weights to 0, and adapts the sum and the output
// of the previous tiles to the new maximum
static void ggml_flash_attn_ext_soft_max_tile(float * kq, int n_kv, int kv_tile_size, float * VKQ, int64_t DV, float & M, float & S) {
    for (int tk = n_kv; tk < kv_tile_size; ++tk) {
        kq[tk] = -INFINITY;
    }

    float tile_max;
    ggml_vec_max_f32(kv_tile_size, &tile_max, kq);

    if (tile_max == -INFINITY) {
        memset(kq, 0, kv_tile_size * sizeof(float));
        return;
    }

    if (tile_max > M) {
        const float ms = expf(M - tile_max);
        ggml_vec_scale_f32(DV, VKQ, ms);
        S *= ms;
        M  = tile_max;
    }

    S += ggml_vec_soft_max_f32(kv_tile_size, kq, kq, M);
}

// Writes M, S and VKQ of a query to partial. If there is a sink, adds it to the sum, and adapts the output to the new maximum
static void ggml_flash_attn_ext_write_partial(float * partial, const float * sink, float * VKQ, int64_t DV, float M, float S) {
    if (sink) {
        const float s = *sink;

        float ms = 1.0f;
        float vs = 1.0f;

        if (s > M) {
            ms = expf(M - s);
            M  = s;
            ggml_vec_scale_f32(DV, VKQ, ms);
        } else {
            vs = expf(s - M);
        }

        S = S*ms + vs;
    }

    partial[0] = M;
    partial[1] = S;
    memcpy(partial + 2, VKQ, DV * sizeof(float));
}

void ggml_fa_pack_k(float * K_rows, int n_rows, float * K_f32, int64_t DK) {
    static constexpr int K_PACK_SZ  = ggml_fa_tile_config::K_PACK;
    static constexpr int KV_TILE_SZ = ggml_fa_tile_config::KV;

    memset(K_rows + n_rows * DK, 0, (K_PACK_SZ - n_rows) * DK * sizeof(float));
    for (int64_t dk = 0; dk < DK; ++dk) {
        for (int tp = 0; tp < K_PACK_SZ; ++tp) {
            K_f32[dk * KV_TILE_SZ + tp] = K_rows[tp * DK + dk];
        }
    }
}

bool ggml_fa_is_converted(const ggml_tensor * dst) {
    const ggml_type type_k = dst->src[1]->type;
    const ggml_type type_v = dst->src[2]->type;

    if (type_k == type_v) {
        return type_k != GGML_TYPE_F32 && type_k != GGML_TYPE_F16;
    }

    // for K in F32, the path that reads one row at a time has the smallest error, except for V in F16, which it sums in F16
    return type_k != GGML_TYPE_F32 || type_v == GGML_TYPE_F16;
}

size_t ggml_fa_convert_work_size(const ggml_tensor * dst, int n_tasks) {
    if (!ggml_fa_is_converted(dst)) {
        return 0;
    }

    const int64_t neq1 = dst->src[0]->ne[1];
    const int64_t neq2 = dst->src[0]->ne[2];
    const int64_t DK   = dst->src[1]->ne[0];
    const int64_t DV   = dst->src[2]->ne[0];

    // with a single row of Q, also the scratch and the partials of the path that splits the KV range
    const int64_t split = DK + 2*DV + neq2*(2 + DV) + GGML_FA_SPLIT_SCRATCH(DK, DV);

    // with few rows of Q, the scratch of a tile, and the results of all units
    const int64_t few = GGML_FA_SCRATCH(DK, DV) + GGML_FA_MAX_UNITS*std::min((int64_t) GGML_FA_TILE_Q, neq1*neq2)*(2 + DV);

    const int64_t n_floats = neq1 >= GGML_FA_TILE_Q ? 0 : neq1 == 1 ? std::max(split, few) : few;

    return sizeof(float)*(n_tasks*(n_floats + CACHE_LINE_SIZE_F32) + CACHE_LINE_SIZE_F32);
}

// Division of flash attention among threads, for fewer query rows than a tile, with K and V that are converted to F32
//
// A query is a row of Q for one head. A tile has the queries that share a K head and a V head, so that each row of K and V
// is converted once for all of them. With few tiles, the KV range is also split into chunks. A unit of work is one tile and one
// chunk. It has one partial result per query, for later reduction.
struct ggml_fa_few_rows_tiles {
    int64_t n_head_group; // heads that share a K head and a V head
    int64_t n_query;      // queries of a group in one stream
    int64_t n_group;      // groups of heads
    int64_t n_tile_group; // tiles of a group in one stream
    int64_t n_tile;       // all tiles
    int64_t n_chunk;      // chunks of the KV range
    int64_t chunk_size;   // KV rows of a chunk
    bool    is_many;      // there are enough tiles for all threads, and their work can differ

    static constexpr int64_t Q_TILE_SZ  = ggml_fa_tile_config::Q;
    static constexpr int64_t KV_TILE_SZ = ggml_fa_tile_config::KV;

    ggml_fa_few_rows_tiles(const ggml_tensor * dst, int nth) {
        const ggml_tensor * q = dst->src[0];
        const ggml_tensor * k = dst->src[1];
        const ggml_tensor * v = dst->src[2];

        n_head_group = std::gcd(q->ne[2]/k->ne[2], q->ne[2]/v->ne[2]);
        n_query      = q->ne[1]*n_head_group;
        n_group      = q->ne[2]/n_head_group;
        n_tile_group = (n_query + Q_TILE_SZ - 1)/Q_TILE_SZ;
        n_tile       = n_tile_group*n_group*q->ne[3];

        // with many tiles, each thread takes the next one. with few tiles, each thread has about as many units as the others
        const int64_t n_many = GGML_FA_MAX_UNITS/2*nth;

        is_many = n_tile >= n_many && q->ne[1]*q->ne[3] > 1 && !ggml_is_numa();

        // the work buffer has room for the results of GGML_FA_MAX_UNITS*nth units. with one chunk, only nth of them are used
        int64_t n_want = n_tile >= n_many ? 1 : nth/std::gcd(n_tile, (int64_t) nth);
        if (n_want*n_tile > GGML_FA_MAX_UNITS*nth) {
            n_want = (n_many + n_tile - 1)/n_tile;
        }

        chunk_size = GGML_PAD((std::max(k->ne[1], (int64_t) 1) + n_want - 1)/n_want, KV_TILE_SZ);
        n_chunk    = std::max((k->ne[1] + chunk_size - 1)/chunk_size, (int64_t) 1);
    }

    // first head, stream, first query and number of queries of a tile. Query iq belongs to head h(iq) and row of Q i1(iq)
    struct tile {
        int64_t h0;
        int64_t i3;
        int64_t iq0;
        int     nq;
        int64_t n_head_group;

        int64_t h (int iq) const { return h0 + (iq0 + iq)%n_head_group; }
        int64_t i1(int iq) const { return (iq0 + iq)/n_head_group; }
    };

    tile get(int64_t i_tile) const {
        const int64_t i_group = i_tile/n_tile_group % n_group;
        const int64_t iq0     = i_tile%n_tile_group * Q_TILE_SZ;

        return { i_group*n_head_group, i_tile/n_tile_group / n_group, iq0, (int) std::min((int64_t) GGML_FA_TILE_Q, n_query - iq0), n_head_group };
    }
};

// Computes one unit: writes M, S and VKQ of each query of a tile to partials, for one chunk of the KV range
static void ggml_flash_attn_ext_few_rows_unit(
        const ggml_fa_op & op,
        const ggml_fa_few_rows_tiles & tiles,
        int64_t i_tile, int64_t i_chunk,
        float * partials,
        float * wdata) {
    static constexpr int Q_TILE_SZ = ggml_fa_tile_config::Q;
    static constexpr int K_PACK_SZ = ggml_fa_tile_config::K_PACK;

    const ggml_tensor * q    = op.q;
    const ggml_tensor * k    = op.k;
    const ggml_tensor * v    = op.v;
    const ggml_tensor * mask = op.mask;

    const int64_t DK = op.DK;
    const int64_t DV = op.DV;

    const auto    tile = tiles.get(i_tile);
    const int64_t h0   = tile.h0;
    const int64_t i3   = tile.i3;
    const int     nq   = tile.nq;

    const char * k_head = (const char *) k->data + h0/(op.n_head/k->ne[2])*k->nb[2] + i3/(q->ne[3]/k->ne[3])*k->nb[3];
    const char * v_head = (const char *) v->data + h0/(op.n_head/v->ne[2])*v->nb[2] + i3/(q->ne[3]/v->ne[3])*v->nb[3];

    // a product of matrices needs a transposed tile of K, which is faster for several queries
    const bool use_gemm   = nq >= 8;
    const int  KV_TILE_SZ = use_gemm ? ggml_fa_tile_config::KV : ggml_fa_tile_config::KV/2; // converted rows stay in the L1 cache

    // Per-thread scratch layout:
    // Q32:    Q_TILE_SZ * DK (queries)
    // KQ:     Q_TILE_SZ * KV_TILE_SZ (attention scores in float)
    // VKQ32:  Q_TILE_SZ * DV (FP32 output accumulator)
    // KV32:   KV_TILE_SZ * MAX(DK, DV) (F32 buffer for K tile, then for V tile)
    // K_rows: K_PACK_SZ * DK (F32 buffer for K rows that are converted before they are packed)
    float * Q32    = wdata;
    float * KQ     = Q32   + Q_TILE_SZ  * DK;
    float * VKQ32  = KQ    + Q_TILE_SZ  * KV_TILE_SZ;
    float * KV32   = VKQ32 + Q_TILE_SZ  * DV;
    float * K_rows = KV32  + KV_TILE_SZ * MAX(DK, DV);

    float S[Q_TILE_SZ];
    float M[Q_TILE_SZ];
    float slopes[Q_TILE_SZ];

    const ggml_fp16_t * masks[Q_TILE_SZ] = {};

    for (int iq = 0; iq < nq; ++iq) {
        const int64_t  i1 = tile.i1(iq);
        const uint32_t h  = tile.h(iq); // head index

        memcpy(Q32 + iq * DK, (const char *) q->data + i1*q->nb[1] + h*q->nb[2] + i3*q->nb[3], DK * sizeof(float));

        S[iq] = 0.0f;
        M[iq] = -INFINITY;

        slopes[iq] = op.slope(h);
        if (mask) {
            masks[iq] = (const ggml_fp16_t *)((const char *) mask->data + i1*mask->nb[1] + (h%mask->ne[2])*mask->nb[2] + (i3%mask->ne[3])*mask->nb[3]);
        }
    }

    memset(VKQ32, 0, nq * DV * sizeof(float));

    int64_t       ic     = i_chunk*tiles.chunk_size;
    const int64_t ic_end = std::min(ic + tiles.chunk_size, k->ne[1]);

    while (ic < ic_end) {
        // fill the tile with rows that are not masked for all queries
        int64_t rows[ggml_fa_tile_config::KV];
        int     kv_tile = 0;

        for (; ic < ic_end && kv_tile < KV_TILE_SZ; ++ic) {
            bool can_skip = mask != nullptr;
            for (int iq = 0; iq < nq && can_skip; ++iq) {
                if (iq == 0 || masks[iq] != masks[iq - 1]) {
                    can_skip = GGML_CPU_FP16_TO_FP32(masks[iq][ic]) == -INFINITY;
                }
            }
            if (!can_skip) {
                rows[kv_tile++] = ic;
            }
        }

        if (kv_tile == 0) {
            break;
        }

        if (use_gemm) {
            // convert K_PACK_SZ rows, then transpose them together
            for (int tk = 0; tk < KV_TILE_SZ; tk += K_PACK_SZ) {
                const int n_rows = MAX(0, MIN(K_PACK_SZ, kv_tile - tk));
                for (int tp = 0; tp < n_rows; ++tp) {
                    op.k_to_float(k_head + rows[tk + tp]*k->nb[1], K_rows + tp * DK, DK);
                }
                ggml_fa_pack_k(K_rows, n_rows, KV32 + tk, DK);
            }
            memset(KQ, 0, nq * KV_TILE_SZ * sizeof(float));
            simd_gemm(KQ, Q32, KV32, nq, DK, KV_TILE_SZ);
        } else {
            for (int tk = 0; tk < kv_tile; ++tk) {
                op.k_to_float(k_head + rows[tk]*k->nb[1], KV32 + tk * DK, DK);
            }
            for (int iq = 0; iq < nq; ++iq) {
                for (int tk = 0; tk < kv_tile; ++tk) {
                    ggml_vec_dot_f32(DK, KQ + iq * KV_TILE_SZ + tk, 0, KV32 + tk * DK, 0, Q32 + iq * DK, 0, 1);
                }
            }
        }

        float mask32[ggml_fa_tile_config::KV];

        for (int iq = 0; iq < nq; ++iq) {
            float * kq_row = KQ + iq * KV_TILE_SZ;

            op.scale_scores(kv_tile, kq_row);

            if (mask) {
                if (iq > 0 && masks[iq] == masks[iq - 1]) {
                    // the previous query has the same mask
                } else if (rows[kv_tile - 1] - rows[0] == kv_tile - 1) {
                    ggml_cpu_fp16_to_fp32(masks[iq] + rows[0], mask32, kv_tile);
                } else {
                    for (int tk = 0; tk < kv_tile; ++tk) {
                        mask32[tk] = GGML_CPU_FP16_TO_FP32(masks[iq][rows[tk]]);
                    }
                }
                ggml_vec_mad_f32(kv_tile, kq_row, mask32, slopes[iq]);
            }

            ggml_flash_attn_ext_soft_max_tile(kq_row, kv_tile, KV_TILE_SZ, VKQ32 + iq * DV, DV, M[iq], S[iq]);
        }

        // V accumulation: VKQ32 += softmax(KQ) * V
        op.add_v(VKQ32, KQ, KV32, v_head, rows, nq, kv_tile, KV_TILE_SZ);
    }

    for (int iq = 0; iq < nq; ++iq) {
        // sinks - apply only on the first kv-chunk
        const float * sink = op.sinks && i_chunk == 0 ? (const float *) op.sinks->data + tile.h(iq) : nullptr;

        ggml_flash_attn_ext_write_partial(partials + iq * (2 + DV), sink, VKQ32 + iq * DV, DV, M[iq], S[iq]);
    }
}

// Combines the partials of all chunks of a tile, and writes the result
// Partials layout: [chunk][query][M, S, VKQ], with chunk_stride floats per chunk
static void ggml_flash_attn_ext_reduce_few_rows(
        ggml_tensor * dst,
        const ggml_fa_few_rows_tiles & tiles,
        int64_t i_tile,
        const float * partials, int64_t chunk_stride,
        float * VKQ) {
    const int64_t DV   = dst->ne[0];
    const auto    tile = tiles.get(i_tile);

    for (int iq = 0; iq < tile.nq; ++iq) {
        const float * partial = partials + iq*(2 + DV);

        float M = -INFINITY;
        for (int64_t i = 0; i < tiles.n_chunk; ++i) {
            M = fmaxf(M, partial[i*chunk_stride]);
        }

        float S = 0.0f;
        memset(VKQ, 0, DV * sizeof(float));

        for (int64_t i = 0; i < tiles.n_chunk; ++i) {
            const float * chunk = partial + i*chunk_stride;
            if (chunk[1] == 0.0f) {
                continue;
            }
            const float ms = expf(chunk[0] - M);
            ggml_vec_mad_f32(DV, VKQ, chunk + 2, ms);
            S += chunk[1]*ms;
        }

        if (S != 0.0f) {
            ggml_vec_scale_f32(DV, VKQ, 1.0f/S);
        }

        // permute(0, 2, 1, 3)
        memcpy((char *) dst->data + tile.h(iq)*dst->nb[1] + tile.i1(iq)*dst->nb[2] + tile.i3*dst->nb[3], VKQ, DV * sizeof(float));
    }
}

void ggml_compute_forward_flash_attn_ext_few_rows(const ggml_compute_params * params, ggml_tensor * dst) {
    const int ith = params->ith;
    const int nth = params->nth;

    const ggml_fa_op op(dst);

    const int64_t DK = op.DK;
    const int64_t DV = op.DV;

    const ggml_fa_few_rows_tiles tiles(dst, nth);

    // Work buffer layout: [thread][scratch], [chunk][tile][query][M, S, VKQ], or with one chunk: [thread][query][M, S, VKQ]
    const int64_t wdata_per_thread = GGML_FA_SCRATCH(DK, DV) + CACHE_LINE_SIZE_F32;
    const int64_t tile_stride      = std::min((int64_t) GGML_FA_TILE_Q, tiles.n_query)*(2 + DV);

    GGML_ASSERT(params->wsize >= sizeof(float)*(nth*wdata_per_thread + (tiles.n_chunk == 1 ? nth : tiles.n_tile*tiles.n_chunk)*tile_stride));

    float * wdata    = (float *) params->wdata + ith*wdata_per_thread;
    float * partials = (float *) params->wdata + nth*wdata_per_thread;

    const auto compute_unit = [&](int64_t i) {
        const int64_t i_tile = i%tiles.n_tile;

        float * unit = partials + (tiles.n_chunk == 1 ? ith : i)*tile_stride;

        ggml_flash_attn_ext_few_rows_unit(op, tiles, i_tile, i/tiles.n_tile, unit, wdata);
        if (tiles.n_chunk == 1) {
            ggml_flash_attn_ext_reduce_few_rows(dst, tiles, i_tile, unit, 0, wdata);
        }
    };

    const int64_t n_unit = tiles.n_tile*tiles.n_chunk;

    if (tiles.is_many) {
        if (ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, nth);
        }

        ggml_barrier(params->threadpool);

        for (int64_t i = ith; i < n_unit; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            compute_unit(i);
        }
    } else {
        for (int64_t i = n_unit*ith/nth; i < n_unit*(ith + 1)/nth; ++i) {
            compute_unit(i);
        }
    }

    if (tiles.n_chunk > 1) {
        ggml_barrier(params->threadpool);

        for (int64_t i_tile = ith; i_tile < tiles.n_tile; i_tile += nth) {
            ggml_flash_attn_ext_reduce_few_rows(dst, tiles, i_tile, partials + i_tile*tile_stride, tiles.n_tile*tile_stride, wdata);
        }
    }
}

void ggml_compute_forward_flash_attn_ext_split_kv(
        ggml_tensor * dst,
        int64_t ic_start, int64_t ic_end,
        float * partials, int64_t partial_stride,
        float * wdata) {
    const ggml_fa_op op(dst);

    const ggml_tensor * q    = op.q;
    const ggml_tensor * k    = op.k;
    const ggml_tensor * v    = op.v;
    const ggml_tensor * mask = op.mask;

    const int64_t DK     = op.DK;
    const int64_t DV     = op.DV;
    const int64_t n_head = op.n_head;

    const int64_t rk2 = n_head/k->ne[2];
    const int64_t rv2 = n_head/v->ne[2];

    static constexpr int H_TILE_SZ  = ggml_fa_tile_config::Q;
    static constexpr int KV_TILE_SZ = ggml_fa_tile_config::KV/2; // the converted rows stay in the L1 cache

    // Per-thread scratch layout:
    // KQ:    H_TILE_SZ * KV_TILE_SZ (attention scores in float)
    // VKQ32: H_TILE_SZ * DV (FP32 output accumulator)
    // KV32:  KV_TILE_SZ * MAX(DK, DV) (F32 buffer for K tile, then for V tile)
    float * KQ    = wdata;
    float * VKQ32 = KQ    + H_TILE_SZ  * KV_TILE_SZ;
    float * KV32  = VKQ32 + H_TILE_SZ  * DV;

    int64_t h0 = 0;
    while (h0 < n_head) {
        // heads that share a K head and a V head
        const int64_t ik2 = h0/rk2;
        const int64_t iv2 = h0/rv2;
        const int     nh  = (int) std::min((int64_t) H_TILE_SZ, std::min((ik2 + 1)*rk2, (iv2 + 1)*rv2) - h0);

        float S[H_TILE_SZ];
        float M[H_TILE_SZ];

        for (int ih = 0; ih < nh; ++ih) {
            S[ih] = 0.0f;
            M[ih] = -INFINITY;
        }

        memset(VKQ32, 0, nh * DV * sizeof(float));

        int64_t ic = ic_start;
        while (ic < ic_end) {
            // fill the tile with rows that are not masked for all heads
            int64_t rows[KV_TILE_SZ];
            int     kv_tile = 0;

            for (; ic < ic_end && kv_tile < KV_TILE_SZ; ++ic) {
                bool can_skip = mask != nullptr;
                for (int ih = 0; can_skip && ih < MIN(nh, mask->ne[2]); ++ih) {
                    const ggml_fp16_t * mp = (const ggml_fp16_t *)((const char *) mask->data + ((h0 + ih)%mask->ne[2])*mask->nb[2]);
                    can_skip = GGML_CPU_FP16_TO_FP32(mp[ic]) == -INFINITY;
                }
                if (!can_skip) {
                    rows[kv_tile++] = ic;
                }
            }

            if (kv_tile == 0) {
                break;
            }

            for (int tk = 0; tk < kv_tile; ++tk) {
                op.k_to_float((const char *) k->data + rows[tk]*k->nb[1] + ik2*k->nb[2], KV32 + tk * DK, DK);
            }

            for (int ih = 0; ih < nh; ++ih) {
                const uint32_t h = h0 + ih; // head index
                const float slope = op.slope(h);

                const float * pq     = (const float *)((const char *) q->data + h*q->nb[2]);
                float       * kq_row = KQ + ih * KV_TILE_SZ;

                for (int tk = 0; tk < kv_tile; ++tk) {
                    ggml_vec_dot_f32(DK, kq_row + tk, 0, KV32 + tk * DK, 0, pq, 0, 1);
                }

                op.scale_scores(kv_tile, kq_row);

                if (mask) {
                    const ggml_fp16_t * mp = (const ggml_fp16_t *)((const char *) mask->data + (h%mask->ne[2])*mask->nb[2]);
                    for (int tk = 0; tk < kv_tile; ++tk) {
                        kq_row[tk] += slope*GGML_CPU_FP16_TO_FP32(mp[rows[tk]]);
                    }
                }

                ggml_flash_attn_ext_soft_max_tile(kq_row, kv_tile, KV_TILE_SZ, VKQ32 + ih * DV, DV, M[ih], S[ih]);
            }

            // V accumulation: VKQ32 += softmax(KQ) * V
            op.add_v(VKQ32, KQ, KV32, (const char *) v->data + iv2*v->nb[2], rows, nh, kv_tile, KV_TILE_SZ);
        }

        for (int ih = 0; ih < nh; ++ih) {
            // sinks - apply only on the first kv-chunk
            const float * sink = op.sinks && ic_start == 0 ? (const float *) op.sinks->data + h0 + ih : nullptr;

            ggml_flash_attn_ext_write_partial(partials + (h0 + ih) * partial_stride, sink, VKQ32 + ih * DV, DV, M[ih], S[ih]);
        }

        h0 += nh;
    }
}
