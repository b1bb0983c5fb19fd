#include "memory.h"

#include <algorithm>
#include <chrono>

namespace {

class measurement {
  public:
    measurement(const kv_bench_params & params, bench_context & ctx, memory_result & res) :
        params(params), ctx(ctx), res(res), device_peak(device_of(params)) {
    }

    void begin() {
        peak_before        = -1;
        device_peak_before = -1;
        start();
    }

    // record the memory in use now, and the peaks since the last call of point()
    void point(const char * name, double seconds = 0.0, double memcpy_seconds = 0.0) {
        stop();

        res.peak_exact = peak.is_exact();
        res.points.push_back({
            name, ctx.depth(), ctx.usage(), ctx.type(), seconds, memcpy_seconds, resident_bytes(), peak_before, device_bytes(device_of(params)), device_peak_before,
        });
    }

    void retype(ggml_type type) {
        const uint64_t before  = ctx.usage().used;
        const double   seconds = ctx.retype(type);

        point(ggml_type_name(type), seconds, limit((before + ctx.usage().used)/2, 0, params.n_threads).memcpy_seconds);
    }

    void fill(uint32_t depth) {
        while (ctx.depth() < depth) {
            const call_result call = ctx.fill(std::min(params.n_ubatch, depth - ctx.depth()));
            if (call.n_grow > 0) {
                res.growths.push_back({ call, params.limit ? limit(call.n_bytes_copied, call.n_bytes_added) : growth_limit {} });
            }
        }
    }

  private:
    // measure the reference time of a growth, without counting its memory in the context's peak
    growth_limit limit(uint64_t n_bytes_copied, uint64_t n_bytes_added, int32_t n_threads = 1) {
        stop();
        const growth_limit found = limit_growth(device_of(params), n_bytes_copied, n_bytes_added, n_threads);
        start();
        return found;
    }

    void start() {
        peak.start();
        device_peak.start();
    }

    void stop() {
        peak_before        = std::max(peak_before, peak.stop());
        device_peak_before = std::max(device_peak_before, device_peak.stop());
    }

    const kv_bench_params & params;

    bench_context & ctx;
    memory_result & res;

    resident_peak peak;
    int64_t peak_before = -1; // largest number of resident bytes between the last point() and the last stop()

    device_bytes_peak device_peak;
    int64_t device_peak_before = -1;
};

} // namespace

memory_result memory_measure(const kv_bench_params & params, const bench_model & model) {
    memory_result res;

    res.rss_before    = resident_bytes();
    res.device_before = device_bytes(device_of(params));

    const auto t_start = std::chrono::steady_clock::now();
    bench_context ctx(model, params);
    res.create_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - t_start).count();

    measurement now(params, ctx, res);
    now.begin();
    now.point("created");

    for (const uint32_t depth : params.depths) {
        now.begin();
        try {
            now.fill(depth);
            now.point("depth");
        } catch (const cache_full &) {
            now.point("full");
            break;
        }
    }

    for (const ggml_type type : params.retype) {
        now.begin();
        now.retype(type);
    }

    if (!params.depths.empty()) {
        ctx.clear();
        now.begin();
        ctx.decode(1);
        now.point("after-clear");
    }

    return res;
}
