#include "memory.h"

#include <algorithm>
#include <chrono>

namespace {

class measurement {
  public:
    measurement(const kv_bench_params & params, bench_context & ctx, memory_result & res) : params(params), ctx(ctx), res(res) {
    }

    void begin() {
        peak_before = -1;
        peak.start();
    }

    // since begin()
    void point(const char * name) {
        const int64_t highest = std::max(peak_before, peak.stop());

        res.peak_exact = peak.is_exact();
        res.points.push_back({ name, ctx.depth(), ctx.usage(), resident_bytes(), highest });
    }

    void fill(uint32_t depth) {
        while (ctx.depth() < depth) {
            const call_result call = ctx.fill(std::min(params.n_ubatch, depth - ctx.depth()));
            if (call.n_grow > 0) {
                res.growths.push_back({ call, params.limit ? limit(call) : growth_limit {} });
            }
        }
    }

  private:
    // what this takes is none of the context's peak
    growth_limit limit(const call_result & call) {
        peak_before = std::max(peak_before, peak.stop());
        const growth_limit found = limit_growth(call.n_bytes_copied, call.n_bytes_added);
        peak.start();
        return found;
    }

    const kv_bench_params & params;

    bench_context & ctx;
    memory_result & res;

    resident_peak peak;
    int64_t peak_before = -1; // since begin(), until peak was started again
};

} // namespace

memory_result memory_measure(const kv_bench_params & params, const bench_model & model) {
    memory_result res;

    res.rss_before = resident_bytes();

    const auto t_start = std::chrono::steady_clock::now();
    bench_context ctx(model, params, params.kv_dynamic);
    res.create_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - t_start).count();

    measurement now(params, ctx, res);
    now.begin();
    now.point("created");

    for (const uint32_t depth : params.depths) {
        now.begin();
        now.fill(depth);
        now.point("depth");
    }

    if (!params.depths.empty()) {
        ctx.clear();
        now.begin();
        ctx.decode(1);
        now.point("after-clear");
    }

    return res;
}
