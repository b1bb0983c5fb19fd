// Flash attention on the CPU for K and V of all types that ggml_cpu_get_to_float() supports: each row is converted to F32 once for
// all queries of a tile. Prompts have their own path in ops.cpp (ggml_compute_forward_flash_attn_ext_tiled()).
//
// This code is not in ops.cpp, because it calls simd_gemm(). With more callers in one file, GCC no longer inlines simd_gemm()
// into the path for prompts. That made prompts with K and V in F16 up to 7 % slower with AVX2.

#pragma once

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns whether the fast paths convert K and V. If both are F16, or both are F32, no conversion is needed. K in F32 with V of
// another type than F16 has no fast path
bool ggml_fa_is_converted(const struct ggml_tensor * dst);

// Returns the bytes of the work buffer that the functions below need with n_tasks threads, from a cache line on. Returns 0 if
// they do not compute dst
size_t ggml_fa_convert_work_size(const struct ggml_tensor * dst, int n_tasks);

#ifdef __cplusplus
}

// Transposes n_rows of at most GGML_FA_TILE_K_PACK rows of K in F32 into columns of a tile: K_f32[dk*GGML_FA_TILE_KV + row]
//
// Sets the rest of K_rows and of the GGML_FA_TILE_K_PACK columns to zero. K_f32 is the first of these columns
void ggml_fa_pack_k(float * K_rows, int n_rows, float * K_f32, int64_t DK);

// Computes a batch with fewer rows of Q per stream than GGML_FA_TILE_Q, for any number of streams
//
// All threads call this function. The work buffer begins at a cache line
void ggml_compute_forward_flash_attn_ext_few_rows(const ggml_compute_params * params, ggml_tensor * dst);

// Computes the part of a single row of Q that rows [ic_start, ic_end) of K and V contribute, for all heads of one stream
//
// Writes 2 + DV floats per head for a later reduction. For head h, partials + h*partial_stride has: the maximum score, the sum of
// the weights, the weighted sum of the rows of V. wdata is scratch of this thread with GGML_FA_SPLIT_SCRATCH floats
void ggml_compute_forward_flash_attn_ext_split_kv(
        ggml_tensor * dst,
        int64_t ic_start, int64_t ic_end,
        float * partials, int64_t partial_stride,
        float * wdata);
#endif
