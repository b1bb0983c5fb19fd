// Check that the CPU converts rows to another type with the same bits in one step as in three.
//
// A change of the types of cells copies rows to F32, rotates them with a Hadamard transform if necessary, and writes them to rows of
// another tensor. The patch cpu-convert-rows computes these operations together, unless the F32 values are an output of the
// graph. So each case runs twice: once with the F32 values as an output, and once without.

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include "test-kv-cpu.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static constexpr uint8_t unwritten = 0x5a;

// draw numbers that are the same on every platform, some of them zeros of both signs or subnormal
static float random_number() {
    const uint64_t state = random_bits();

    switch (state >> 58) {
        case 0:  return  0.0f;
        case 1:  return -0.0f;
        case 2:  return 1e-7f;
        default: return (float) (state >> 40)/(float) (1 << 23) - 1.0f;
    }
}

struct test_case {
    ggml_type from;
    ggml_type to;

    int64_t n;      // elements of a row
    int64_t n_rows;
    int64_t n_rot;  // elements of a block of the transform. 0: none

    bool is_inside = false; // the rows are written to the memory that they are read from

    std::string name() const {
        return std::string(ggml_type_name(from)) + " to " + ggml_type_name(to) + ", " + std::to_string(n_rows) + " rows of " +
            std::to_string(n) + ", rotation " + std::to_string(n_rot) + (is_inside ? ", inside" : "");
    }
};

struct test_result {
    std::vector<uint8_t> rows;

    bool has_f32 = false; // the F32 values were stored
};

static test_result convert(const test_case & c, ggml_backend_t backend, const std::vector<uint8_t> & data, bool is_output) {
    const ggml_context_ptr ctx(ggml_init({ 16*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));

    // rows of a larger tensor, as of a KV cache. every second row is written, in descending order
    ggml_tensor * src = ggml_new_tensor_2d(ctx.get(), c.from, c.n, 3*c.n_rows);
    ggml_tensor * dst = c.is_inside ? nullptr : ggml_new_tensor_2d(ctx.get(), c.to, c.n, 2*c.n_rows + 3);
    ggml_tensor * idx = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, c.n_rows);
    ggml_tensor * rot = c.n_rot > 0 ? ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, c.n_rot, c.n_rot) : nullptr;

    ggml_tensor * rows = ggml_view_2d(ctx.get(), src, c.n, c.n_rows, src->nb[1], c.is_inside ? 0 : c.n_rows*src->nb[1]);
    ggml_tensor * f32  = ggml_cast(ctx.get(), rows, GGML_TYPE_F32);
    ggml_tensor * cur  = f32;

    if (is_output) {
        ggml_set_output(f32);
    }
    if (rot) {
        cur = ggml_reshape_2d(ctx.get(), cur, c.n_rot, c.n*c.n_rows/c.n_rot);
        cur = ggml_mul_mat(ctx.get(), rot, cur);
        ggml_mul_mat_set_hint(cur, GGML_HINT_SRC0_IS_HADAMARD);
        cur = ggml_reshape_2d(ctx.get(), cur, c.n, c.n_rows);
    }

    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    ggml_backend_buffer_clear(buffer.get(), unwritten);

    // the rows of the new type are smaller than those of the old type, so all of them fit into the memory of `src`
    ggml_tensor inside = *src;
    if (c.is_inside) {
        inside.type = c.to;
        inside.nb[0] = ggml_type_size(c.to);
        inside.nb[1] = ggml_row_size(c.to, c.n);
        inside.nb[2] = inside.nb[1]*inside.ne[1];
        inside.nb[3] = inside.nb[2];
        dst = &inside;
    }

    ggml_tensor * view = ggml_view_2d(ctx.get(), dst, dst->ne[0], dst->ne[1], dst->nb[1], 0);
    ggml_tensor * out  = ggml_set_rows(ctx.get(), view, cur, idx);
    for (ggml_tensor * t : { view, out }) {
        ggml_backend_view_init(t);
    }

    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, out);

    ggml_backend_tensor_set(rows, data.data(), 0, data.size());

    std::vector<int64_t> idxs;
    for (int64_t i = 0; i < c.n_rows; ++i) {
        idxs.push_back(c.is_inside ? i : 2*(c.n_rows - i) + 1);
    }
    ggml_backend_tensor_set(idx, idxs.data(), 0, ggml_nbytes(idx));

    check(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS, c.name() + ": computes");

    test_result res;
    for (size_t i = 0; i < ggml_nbytes(f32); ++i) {
        res.has_f32 = res.has_f32 || ((const uint8_t *) f32->data)[i] != unwritten;
    }

    res.rows.resize(ggml_nbytes(dst));
    memcpy(res.rows.data(), dst->data, res.rows.size());

    return res;
}

static void test(const test_case & c, ggml_backend_t backend) {
    std::vector<float> values(c.n*c.n_rows);
    for (float & x : values) {
        x = random_number();
    }

    std::vector<uint8_t> data(ggml_row_size(c.from, c.n)*c.n_rows);
    ggml_quantize_chunk(c.from, values.data(), data.data(), 0, c.n_rows, c.n, nullptr);

    const auto parts = convert(c, backend, data, true);
    const auto fused = convert(c, backend, data, false);

    check(parts.has_f32, c.name() + ": an output is stored");
    check(fused.has_f32 == c.is_inside, c.name() + ": F32 values are stored only if a row could be overwritten before it is read");
    check(fused.rows == parts.rows, c.name() + ": the bits are equal");
}

int main() {
    ggml_backend_load_all();

    const ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));

    auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
    const auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");

    for (int n_threads = 1; n_threads <= 3; ++n_threads) {
        set_n_threads(backend.get(), n_threads);

        for (const auto from : types) {
            for (const auto to : types) {
                test({ from, to,   96, 1,   0 }, backend.get());
                test({ from, to, 1088, 5,   0 }, backend.get());
                test({ from, to, 1088, 5,  64 }, backend.get());
                test({ from, to,  256, 7, 256 }, backend.get());
                test({ from, to, 3072, 2, 512 }, backend.get());

                if (ggml_row_size(to, 256) <= ggml_row_size(from, 256)) {
                    test({ from, to, 256, 9,  0, true }, backend.get());
                    test({ from, to, 256, 9, 64, true }, backend.get());
                }
            }
        }
    }

    return report();
}
