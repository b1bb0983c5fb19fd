// Checks the Hadamard transform on the CPU bit for bit, against additions in the same order.
//
// Cells of quantized types are rotated by this transform, both in a batch and in a change of types. The vector code of the patch
// cpu-hadamard must round as upstream's scalar code does, because static and dynamic caches must have equal cells.

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include "test-kv-cpu.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// return random numbers that are the same on every platform. Some of them are zeros of both signs, infinite or subnormal
static float random_number() {
    const uint64_t state = random_bits();

    switch (state >> 58) {
        case 0:  return  0.0f;
        case 1:  return -0.0f;
        case 2:  return std::ldexp(1.0f, -140);
        case 3:  return (state >> 40)%64 == 0 ? INFINITY : 1.0f;
        default: return (float) (state >> 40)/(float) (1 << 23) - 1.0f;
    }
}

// transform a row in the order of ggml: scale it, then add and subtract at distances of 1, 2, 4 and so on
static void transform(float * row, int64_t n) {
    const float scale = 1.0f/sqrtf((float) n);

    for (int64_t i = 0; i < n; ++i) {
        row[i] *= scale;
    }
    for (int64_t len = 1; len < n; len *= 2) {
        for (int64_t i = 0; i < n; ++i) {
            if ((i & len) == 0) {
                const volatile float u = row[i];
                const volatile float v = row[i + len];
                row[i]       = u + v;
                row[i + len] = u - v;
            }
        }
    }
}

static bool is_equal(float a, float b) {
    return std::memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b));
}

static void test(ggml_backend_t backend, ggml_type type, int64_t n) {
    const std::string name = std::string(ggml_type_name(type)) + ", " + std::to_string(n);

    const int64_t n_rows = 37;

    ggml_context_ptr ctx(ggml_init({ 16*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));

    ggml_tensor * matrix = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n, n);
    ggml_tensor * rows   = ggml_new_tensor_2d(ctx.get(), type, n, n_rows);
    ggml_tensor * out    = ggml_mul_mat(ctx.get(), matrix, rows);

    ggml_mul_mat_set_hint(out, GGML_HINT_SRC0_IS_HADAMARD);

    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, out);

    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

    std::vector<float> expected(n*n_rows);
    for (float & x : expected) {
        x = random_number();
    }

    std::vector<ggml_fp16_t> half(expected.size());
    ggml_fp32_to_fp16_row(expected.data(), half.data(), half.size());
    if (type == GGML_TYPE_F16) {
        ggml_fp16_to_fp32_row(half.data(), expected.data(), half.size());
    }
    ggml_backend_tensor_set(rows, type == GGML_TYPE_F16 ? (const void *) half.data() : expected.data(), 0, ggml_nbytes(rows));

    check(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS, name + ": computes");

    std::vector<float> res(expected.size());
    ggml_backend_tensor_get(out, res.data(), 0, ggml_nbytes(out));

    for (int64_t i = 0; i < n_rows; ++i) {
        transform(expected.data() + i*n, n);
    }

    int64_t n_equal = 0;
    for (size_t i = 0; i < res.size(); ++i) {
        n_equal += is_equal(res[i], expected[i]);
    }
    check(n_equal == (int64_t) res.size(), name + ": " + std::to_string(res.size() - n_equal) + " elements differ");
}

int main() {
    ggml_backend_load_all();

    const ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));

    for (const auto type : { GGML_TYPE_F32, GGML_TYPE_F16 }) {
        for (int64_t n = 1; n <= 1024; n *= 2) {
            test(backend.get(), type, n);
        }
    }

    return report();
}
