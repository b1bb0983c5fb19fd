#include "turns.h"

#include "random-heap.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

namespace {

class turns {
  public:
    static constexpr int N_CREATE = 6; // number of contexts that are created in a round. only the last one is used

    turns(const kv_bench_params & params, std::vector<pair_result> & res) : params(params), params_base(params_of_base(params)), res(res), rng(params.seed) {
    }

    void round(uint32_t i, const bench_model & model_test, const bench_model & model_base) {
        i_round = i;
        i_depth = 0;
        i_pair  = params.seed + i; // also alternate from round to round which context is first

        const random_heap heap_test(model_test.api, rng);
        const random_heap heap_base(model_base.api, rng);

        std::unique_ptr<bench_context> test;
        std::unique_ptr<bench_context> base;

        for (int i_create = 0; i_create < N_CREATE; ++i_create) {
            pair("create", [&] { return create(test, model_test, params); }, [&] { return create(base, model_base, params_base); });
        }

        for (const uint32_t depth : params.depths) {
            i_depth = depth;

            fill(*test, *base, depth);
            decode("prompt", *test, *base, params.n_batch, params.n_prompt);

            // if the cells of the storage are almost used up, generate more tokens than they can hold, so that a growth is
            // measured
            const uint32_t n_past = test->depth();
            const uint32_t edge   = test->usage().n_cells;
            if (edge > n_past + params.n_gen/2 && edge < n_past + params.n_ubatch) {
                fill(*test, *base, edge - params.n_gen/2);
            }
            decode("generate", *test, *base, params.n_gen, 1);
        }
    }

  private:
    static kv_bench_params params_of_base(kv_bench_params params) {
        params.kv_dynamic = false;
        if (params.base_type != GGML_TYPE_COUNT) {
            params.type_k = params.base_type;
            params.type_v = params.base_type;
        }
        return params;
    }

    static call_result create(std::unique_ptr<bench_context> & ctx, const bench_model & model, const kv_bench_params & params) {
        call_result created = {};

        ctx.reset();

        const double t_start = seconds_of(params);
        ctx = std::make_unique<bench_context>(model, params);
        created.seconds = seconds_of(params) - t_start;

        return created;
    }

    void fill(bench_context & test, bench_context & base, uint32_t depth) const {
        while (base.depth() + 1 < depth) {
            const uint32_t n = std::min(params.n_ubatch, depth - 1 - base.depth());
            if (params.kv_dynamic) { // let each batch grow the cache, as a prompt does
                test.fill(n);
                base.fill(n);
            } else {
                test.fill_by_copy(n);
                base.fill_by_copy(n);
            }
        }
        if (base.depth() < depth) {
            test.fill(1); // this call also makes the K-shift of the copied cells, which is not measured
            base.fill(1);
        }
    }

    // decode n consecutive batches in each of the two contexts, in turn. The cache grows between these batches as usual
    void decode(const char * kind, bench_context & test, bench_context & base, uint32_t n, uint32_t n_tokens) {
        for (uint32_t i = 0; i < n; ++i) {
            pair(kind, [&] { return test.decode(n_tokens); }, [&] { return base.decode(n_tokens); });
        }
    }

    // let the threads of the other library fall asleep. After a call, the threads of OpenMP wait actively for some milliseconds,
    // and would compete with the threads of this library
    void wait_for_idle_threads() const {
        if (!params.other.empty() && params.n_threads > 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
    }

    template <typename F, typename G>
    void pair(const char * kind, F && call_test, G && call_base) {
        call_result test = {};
        call_result base = {};

        if (i_pair++ % 2 == 0) {
            wait_for_idle_threads();
            test = call_test();
            wait_for_idle_threads();
            base = call_base();
        } else {
            wait_for_idle_threads();
            base = call_base();
            wait_for_idle_threads();
            test = call_test();
        }

        res.push_back({ i_round, i_depth, kind, test, base.seconds });
    }

    const kv_bench_params & params;
    const kv_bench_params   params_base;

    std::vector<pair_result> & res;

    std::mt19937 rng;

    uint32_t i_round = 0;
    uint32_t i_depth = 0;
    uint32_t i_pair  = 0;
};

} // namespace

std::vector<pair_result> turns_measure(const kv_bench_params & params, const bench_model & test, const bench_model & base) {
    std::vector<pair_result> res;

    llama_api_map_large_buffers(test.api);
    llama_api_map_large_buffers(base.api);

    turns all(params, res);
    for (uint32_t i = 0; i < params.n_round; ++i) {
        all.round(i, test, base);
    }

    return res;
}
