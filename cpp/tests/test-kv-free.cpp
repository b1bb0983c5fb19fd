// Checks on every device that a graph does not access a buffer that was freed before the graph runs.
//
// A growth of the KV cache by copy frees buffers while the backend exists. Objects that the backend keeps between graphs
// (descriptor sets, command buffers, captured graphs) may still refer to them. If the device's memory is on the heap of this
// process, as with Mesa's software driver for Vulkan, an access corrupts the heap. The test needs no KV cache.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include "test-kv.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

// compute a chain of n operations in a new buffer, and return the buffer
// An operation has two inputs and one result if is_binary, otherwise one input and one result.
static ggml_backend_buffer_ptr compute(ggml_backend_t backend, bool is_binary, int n, const char * what) {
    const ggml_init_params params = { ggml_tensor_overhead()*(2*n + 8) + ggml_graph_overhead(), nullptr, true };

    const ggml_context_ptr ctx { ggml_init(params) };

    ggml_tensor * a = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 64, 4);
    ggml_tensor * b = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 64, 4);

    ggml_tensor * cur = a;
    for (int i = 0; i < n; ++i) {
        cur = is_binary ? ggml_mul(ctx.get(), cur, b) : ggml_scale(ctx.get(), cur, 0.5f);
    }

    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, cur);

    ggml_backend_buffer_ptr res { ggml_backend_alloc_ctx_tensors(ctx.get(), backend) };

    std::vector<float> data(ggml_nelements(a), 1.0f);
    ggml_backend_tensor_set(a, data.data(), 0, ggml_nbytes(a));
    data.assign(data.size(), 0.5f);
    if (b->buffer) {
        ggml_backend_tensor_set(b, data.data(), 0, ggml_nbytes(b));
    }

    check(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS, std::string(what) + ": computes");

    ggml_backend_tensor_get(cur, data.data(), 0, ggml_nbytes(cur));
    for (const float x : data) {
        if (x != std::ldexp(1.0f, -n)) {
            check(false, std::string(what) + ": the result");
            break;
        }
    }

    return res;
}

int main() {
    ggml_backend_load_all();

    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);

        const char * name = ggml_backend_dev_name(dev);

        const ggml_backend_ptr backend { ggml_backend_dev_init(dev, nullptr) };
        if (!backend) {
            printf("%s: skipped, it cannot be used\n", name);
            continue;
        }

        for (int k = 0; k < 100 && n_failed == 0; ++k) {
            // use 16 descriptor sets. Each set refers to the three tensors of an operation: two inputs and one result
            auto freed = compute(backend.get(), true, 16, name);

            // run another graph, which uses other descriptor sets
            const auto other = compute(backend.get(), true, 1, name);

            // Free the buffer of these tensors, and let other objects use its memory. Then use these descriptor sets again,
            // for operations with only two tensors. The third entry of a set may still refer to the freed buffer.
            freed.reset();

            std::vector<std::unique_ptr<char[]>> heap;
            for (size_t size = 440; size < 560; size += 4) {
                heap.emplace_back(new char[size]());
            }

            const auto last = compute(backend.get(), false, 8, name);

            for (size_t j = 0; j < heap.size(); ++j) {
                for (size_t c = 0; c < 440 + 4*j; ++c) {
                    if (heap[j][c] != 0) {
                        check(false, std::string(name) + ": memory that was freed has been written");
                        j = heap.size() - 1;
                        break;
                    }
                }
            }
        }

        printf("%s: done\n", name);
    }

    return report();
}
