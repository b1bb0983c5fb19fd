#include "run.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>

using clock_type = std::chrono::steady_clock;

static double seconds_since(clock_type::time_point t_start) {
    return std::chrono::duration<double>(clock_type::now() - t_start).count();
}

const char * call_kind_name(call_kind kind) {
    switch (kind) {
        case call_kind::fill:     return "fill";
        case call_kind::cross:    return "cross";
        case call_kind::generate: return "generate";
        case call_kind::prompt:   return "prompt";
        case call_kind::cleared:  return "cleared";
    }
    return "";
}

struct error_log {
    bool verbose = false;
    std::string last;
};

static void log_callback(ggml_log_level level, const char * text, void * user_data) {
    error_log & log = *(error_log *) user_data;
    if (log.verbose) {
        fputs(text, stderr);
    }
    if (level == GGML_LOG_LEVEL_ERROR) {
        log.last = text;
        while (!log.last.empty() && log.last.back() == '\n') {
            log.last.pop_back();
        }
    }
}

namespace {

// the sequence that has the whole context, and the one that a batch is filled in
constexpr llama_seq_id SEQ_ALL  = 0;
constexpr llama_seq_id SEQ_FILL = 1;

class bench_context {
  public:
    bench_context(const kv_bench_params & params, const llama_model * model, llama_context * ctx, run_result & res)
        : params(params), ctx(ctx), mem(llama_get_memory(ctx)), n_vocab(llama_vocab_n_tokens(llama_model_get_vocab(model))), res(res) {
        if (mem == nullptr) {
            throw std::runtime_error("this model has no memory");
        }
        batch = llama_batch_init((int32_t) std::max(params.n_ubatch, std::max(params.n_prompt, 1u)), 0, 1);
        begin();
    }

    ~bench_context() {
        llama_batch_free(batch);
    }

    bench_context(const bench_context &) = delete;
    bench_context & operator=(const bench_context &) = delete;

    // close the interval since the point before
    void point(const std::string & name) {
        point_result p;
        p.name    = name;
        p.depth   = n_past;
        p.seconds = seconds_since(t_start);
        p.peak    = std::max(peak_before, peak.stop());
        p.rss     = resident_bytes();
        p.usage   = llama_get_memory_usage(ctx);
        res.peak_exact = peak.is_exact();
        res.points.push_back(p);
    }

    void begin() {
        t_start = clock_type::now();
        peak_before = -1;
        peak.start();
    }

    void fill(uint32_t depth) {
        bool crossed = params.n_cross == 0 || !params.kv_dynamic;
        while (n_past < depth) {
            uint32_t n = std::min(params.n_ubatch, depth - n_past);
            const uint32_t edge = llama_get_memory_usage(ctx).n_cells;
            // once on the way, from token to token over the edge of the storage
            if (!crossed && n_past < edge && n_past + n > edge && edge + params.n_cross <= depth) {
                if (n_past + params.n_cross < edge) {
                    fill_batch(edge - params.n_cross - n_past);
                }
                while (n_past < edge + params.n_cross) {
                    decode(call_kind::cross, SEQ_ALL, 1);
                }
                crossed = true;
                continue;
            }
            fill_batch(n);
        }
    }

    void speed() {
        if (params.max_gen > 0 && n_past > params.max_gen) {
            return;
        }
        const uint32_t depth = n_past;
        for (uint32_t i = 0; i < params.n_gen; ++i) {
            decode(call_kind::generate, SEQ_ALL, 1);
        }
        go_back(depth);
        for (uint32_t i = 0; i < params.n_repeat && params.n_prompt > 0; ++i) {
            decode(call_kind::prompt, SEQ_ALL, params.n_prompt);
            go_back(depth);
        }
    }

    void clear() {
        llama_memory_clear(mem, true);
        n_past = 0;
        point("cleared");
        begin();
        decode(call_kind::cleared, SEQ_ALL, 1);
        point("after-clear");
    }

  private:
    void fill_batch(uint32_t n) {
        decode(call_kind::fill, SEQ_FILL, n);
        llama_memory_seq_cp(mem, SEQ_FILL, SEQ_ALL, -1, -1);
        llama_memory_seq_rm(mem, SEQ_FILL, -1, -1);
    }

    // forget what was measured with. a recurrent state cannot: there the context is some tokens longer from here on
    void go_back(uint32_t depth) {
        if (llama_memory_seq_rm(mem, SEQ_ALL, (llama_pos) depth, -1)) {
            n_past = depth;
        }
    }

    void decode(call_kind kind, llama_seq_id seq, uint32_t n) {
        batch.n_tokens = (int32_t) n;
        for (uint32_t i = 0; i < n; ++i) {
            const uint32_t pos = n_past + i;
            batch.token   [i]    = (llama_token) (pos*2654435761u % (uint32_t) n_vocab);
            batch.pos     [i]    = (llama_pos) pos;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = seq;
            batch.logits  [i]    = i + 1 == n;
        }

        const llama_memory_usage before = llama_get_memory_usage(ctx);
        const auto t_call = clock_type::now();
        const int rc = llama_decode(ctx, batch);
        llama_synchronize(ctx);
        const double seconds = seconds_since(t_call);
        if (rc != 0) {
            throw std::runtime_error("llama_decode() of " + std::to_string(n) + " tokens at " + std::to_string(n_past) +
                    " returned " + std::to_string(rc));
        }
        const llama_memory_usage after = llama_get_memory_usage(ctx);

        res.calls.push_back({
            kind, n_past, n, seconds, after.n_grow - before.n_grow, 1e-6*(double) (after.t_grow_us - before.t_grow_us),
            after.n_bytes_copied - before.n_bytes_copied, after.committed - std::min(before.committed, after.committed),
            after.n_cells, {},
        });
        n_past += n;
        if (after.n_grow != before.n_grow && params.limit_bytes > 0) {
            limit(res.calls.back());
        }
    }

    // what the measurement takes is none of the context's peak
    void limit(call_result & call) {
        peak_before = std::max(peak_before, peak.stop());
        call.limit = limit_growth(call.n_bytes_copied, call.n_bytes_added);
        peak.start();
    }

    const kv_bench_params & params;

    llama_context * ctx;
    llama_memory_t  mem;

    const int32_t n_vocab;

    run_result & res;

    llama_batch batch {};

    uint32_t n_past = 0;

    resident_peak peak;
    int64_t peak_before = -1; // since the point before, until peak was started again
    clock_type::time_point t_start;
};

} // namespace

static llama_context_params context_params(const kv_bench_params & params) {
    llama_context_params cparams = llama_context_default_params();

    cparams.n_ctx           = params.n_ctx;
    cparams.n_batch         = std::max(params.n_ubatch, params.n_prompt);
    cparams.n_ubatch        = params.n_ubatch;
    cparams.n_seq_max       = 2;
    cparams.kv_unified      = true; // both sequences in one stream
    cparams.swa_full        = false; // as the programs have it
    cparams.n_threads       = params.n_threads;
    cparams.n_threads_batch = params.n_threads;
    cparams.flash_attn_type = params.flash_attn;
    cparams.type_k          = params.type_k;
    cparams.type_v          = params.type_v;
    cparams.kv_dynamic      = params.kv_dynamic;

    return cparams;
}

static void measure(const kv_bench_params & params, const llama_model * model, llama_context * ctx, run_result & res) {
    bench_context bench(params, model, ctx, res);
    bench.point("created");
    for (const uint32_t depth : params.depths) {
        bench.begin();
        bench.fill(depth);
        bench.point("depth");
        bench.speed();
    }
    if (!params.depths.empty()) {
        bench.begin();
        bench.clear();
    }
}

run_result bench_run(const kv_bench_params & params) {
    run_result res;
    error_log  log;
    log.verbose = params.verbose;
    llama_log_set(log_callback, &log);
    ggml_backend_load_all();

    llama_model_params mparams = llama_model_default_params();
    ggml_backend_dev_t no_devices[] = { nullptr };
    mparams.devices      = no_devices;
    mparams.n_gpu_layers = 0;

    llama_model * model = llama_model_load_from_file(params.model.c_str(), mparams);
    if (model == nullptr) {
        res.status = "load-fails";
        res.reason = log.last;
        return res;
    }
    res.n_layer  = llama_model_n_layer(model);
    res.n_params = (double) llama_model_n_params(model);

    res.rss_before = resident_bytes();
    const auto t_start = clock_type::now();
    llama_context * ctx = llama_init_from_model(model, context_params(params));
    res.create_seconds = seconds_since(t_start);

    if (ctx == nullptr) {
        res.status = "context-fails";
        res.reason = log.last;
    } else {
        res.n_ctx  = llama_n_ctx(ctx);
        res.status = "ok";
        try {
            measure(params, model, ctx, res);
        } catch (const std::exception & err) {
            res.status = "decode-fails";
            res.reason = std::string(err.what()) + (log.last.empty() ? "" : ": " + log.last);
        }
        llama_free(ctx);
    }
    llama_model_free(model);
    llama_backend_free();
    llama_log_set(nullptr, nullptr); // what is logged from here on must not find the log above

    return res;
}
