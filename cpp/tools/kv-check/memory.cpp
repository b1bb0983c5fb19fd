#include "memory.h"

#include "../../src/llama-kv-log.h"
#include "child.h"
#include "fields.h"
#include "json.h"
#include "resident.h"
#include "session.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

struct memory_log {
    bool     verbose     = false;
    unsigned cells_start = 0;
    std::string error;
};

static void log_callback(ggml_log_level level, const char * text, void * user_data) {
    memory_log & log = *(memory_log *) user_data;
    if (log.verbose) {
        fputs(text, stderr);
    }
    if (const char * str = strstr(text, LLAMA_KV_LOG_START_BEGIN)) {
        sscanf(str, LLAMA_KV_LOG_START, &log.cells_start);
    }
    if (level == GGML_LOG_LEVEL_ERROR) {
        log.error = text;
        while (!log.error.empty() && log.error.back() == '\n') {
            log.error.pop_back();
        }
    }
}

// write the fields of llama_memory_usage under their own names. kv_bytes is the committed memory
static void write_usage(json_line & out, const llama_memory_usage & usage) {
    out.num(field::kv_bytes, (int64_t) usage.committed);
    out.num(field::reserved, (int64_t) usage.reserved).num(field::committed, (int64_t) usage.committed).num(field::used, (int64_t) usage.used);
    out.num(field::n_cells, usage.n_cells).num(field::n_cells_max, usage.n_cells_max).num(field::n_cells_used, usage.n_cells_used);
    out.num(field::n_grow, usage.n_grow).num(field::n_shrink, usage.n_shrink).num(field::n_bytes_copied, (int64_t) usage.n_bytes_copied);
    out.num(field::t_grow_us, usage.t_grow_us).num(field::t_grow_max_us, usage.t_grow_max_us);
}

static constexpr uint32_t N_CHUNK = 512;

static bool decode(llama_context * ctx, llama_seq_id seq, uint32_t n, llama_pos pos) {
    llama_batch batch = llama_batch_init((int32_t) n, 0, 1);
    for (uint32_t i = 0; i < n; ++i) {
        batch.token[i]     = (llama_token) (1 + i % 100);
        batch.pos[i]       = pos + (llama_pos) i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = i + 1 == n;
    }
    batch.n_tokens = (int32_t) n;
    const int32_t rc = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return rc == 0;
}

// fill n cells in a short time: decode one sequence, and restore its state as other sequences, which needs no attention over all
// cells
static bool fill_cells(llama_context * ctx, uint32_t n) {
    if (!decode(ctx, 0, std::min(n, N_CHUNK), 0)) {
        return false;
    }
    std::vector<uint8_t> data(llama_state_seq_get_size(ctx, 0));
    if (llama_state_seq_get_data(ctx, data.data(), data.size(), 0) != data.size()) {
        return false;
    }
    for (uint32_t seq = 1; (seq + 1)*N_CHUNK <= n; ++seq) {
        if (llama_state_seq_set_data(ctx, data.data(), data.size(), (llama_seq_id) seq) == 0) {
            return false;
        }
    }
    return true;
}

int memory_report(const kv_check_params & params) {
    memory_log log;
    log.verbose = params.verbose;
    llama_log_set(log_callback, &log);

    std::vector<ggml_backend_dev_t> devices;
    llama_model * model = nullptr;
    try {
        child_load_backends(params);
        llama_model_params mparams = child_model_params(params, devices);
        if (params.no_alloc) {
            mparams.no_alloc = true;
            child_set_no_mmap(mparams); // a measurement allocates nothing, so it must not map the file either
        }
        model = llama_model_load_from_file(params.model.c_str(), mparams);
    } catch (const std::exception & err) {
        log.error = err.what();
    }

    session_params sp;
    sp.dynamic = params.kv_dynamic;
    sp.unified = params.unified;
    sp.n_seqs  = params.n_seqs;
    if (params.n_fill > 0) {
        sp.unified = true;
        sp.n_seqs  = (params.n_fill + N_CHUNK - 1)/N_CHUNK;
    }
    sp.types   = { params.type_k, params.type_v };
    sp.n_cells = (params.n_ctx > 0 ? params.n_ctx : 131072)/sp.n_streams();

    llama_context_params cparams = session_context_params(params, sp);
    cparams.n_batch = 2048; // the same as in llama-server, because the size of the output buffers depends on it

    const int64_t rss_before = resident_bytes();
    const auto t_start = std::chrono::steady_clock::now();
    llama_context * ctx = model == nullptr ? nullptr : llama_init_from_model(model, cparams);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - t_start).count();
    const int64_t rss_after = resident_bytes();

    bool filled = true;
    if (ctx != nullptr && params.n_fill > 0) {
        filled = fill_cells(ctx, params.n_fill);
    }
    const int64_t rss_filled = resident_bytes();

    const llama_memory_usage usage = ctx == nullptr ? llama_memory_usage {} : llama_get_memory_usage(ctx);

    const char * type_k = ggml_type_name(params.type_k);
    const char * type_v = ggml_type_name(params.type_v);

    json_line out;
    out.begin_object();
    out.str(field::mode, "memory").str(field::model, params.model).flag(field::kv_dynamic, params.kv_dynamic);
    out.num(field::n_ctx, ctx != nullptr ? (int64_t) llama_n_ctx(ctx) : 0).num(field::n_ubatch, params.n_ubatch);
    out.num(field::seqs, params.n_seqs).flag(field::unified, params.unified).str(field::type_k, type_k).str(field::type_v, type_v);
    out.str(field::device, params.device.empty() ? "CPU" : params.device);
    out.str(field::status, ctx != nullptr ? (filled ? "ok" : "fill-fails") : model != nullptr ? "context-fails" : "load-fails");
    out.str(field::reason, ctx != nullptr && filled ? "" : log.error);
    out.num(field::cells_start, ctx == nullptr ? 0 : log.cells_start > 0 ? (int64_t) log.cells_start : (int64_t) llama_n_ctx_seq(ctx));
    write_usage(out, usage);
    out.num(field::rss_before, rss_before).num(field::rss_after, rss_after).num(field::rss_context, rss_after - rss_before);
    out.real(field::create_seconds, seconds);
    if (ctx != nullptr && params.n_fill > 0) {
        llama_memory_clear(llama_get_memory(ctx), true);
        decode(ctx, 0, 1, 0);

        out.num(field::rss_filled, rss_filled).num(field::rss_cleared, resident_bytes());
        out.num(field::committed_cleared, (int64_t) llama_get_memory_usage(ctx).committed);
    }
    out.end_object();
    printf("%s\n", out.text().c_str());

    const int rc = ctx != nullptr ? 0 : 2;
    llama_free(ctx);
    if (model != nullptr) {
        llama_model_free(model);
    }
    llama_backend_free();
    return rc;
}
