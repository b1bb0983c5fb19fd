#include "context.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <stdexcept>

// the sequence that contains the whole context, and the sequence of the batch that is being decoded
static constexpr llama_seq_id SEQ_ALL  = 0;
static constexpr llama_seq_id SEQ_FILL = 1;

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

double seconds_of(const kv_bench_params & params) {
    if (params.device.empty() && params.n_threads == 1) {
        return (double) std::clock()/CLOCKS_PER_SEC;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ggml_backend_dev_t device_of(const kv_bench_params & params) {
    return params.device.empty() ? nullptr : ggml_backend_dev_by_name(params.device.c_str());
}

//
// bench_model
//

bench_model::bench_model(const llama_api & api, const kv_bench_params & params, error_log & log) : api(api) {
    api.llama_log_set(log_callback, &log);
    api.ggml_backend_load_all();

    ggml_backend_dev_t devices[] = { device_of(params), nullptr };
    if (devices[0] == nullptr && !params.device.empty()) {
        api.llama_log_set(nullptr, nullptr);
        throw std::runtime_error("there is no device " + params.device);
    }

    llama_model_params mparams = api.llama_model_default_params();
    mparams.devices      = devices;
    mparams.n_gpu_layers = devices[0] == nullptr ? 0 : 999;

    model = api.llama_model_load_from_file(params.model.c_str(), mparams);
    if (model == nullptr) {
        api.llama_log_set(nullptr, nullptr);
        throw std::runtime_error("the model cannot be loaded");
    }
}

bench_model::~bench_model() {
    api.llama_model_free(model);
    api.llama_backend_free();
    api.llama_log_set(nullptr, nullptr); // later messages must not access the log, which is destroyed now
}

//
// bench_context
//

bench_context::bench_context(const bench_model & model, const kv_bench_params & params) : api(model.api), params(params)
#ifdef KV_BENCH_TYPES
    , budget(params.budget > 0 ? llama_memory_budget_init(params.budget*size_t(1024*1024), params.auto_quant.data(), params.auto_quant.size()) : nullptr,
            llama_memory_budget_free)
#endif
{
    llama_context_params cparams = api.llama_context_default_params();

    const uint32_t n_batch = std::max(params.n_ubatch, params.n_prompt);

    cparams.n_ctx           = params.n_ctx;
    cparams.n_batch         = n_batch;
    cparams.n_ubatch        = params.n_ubatch;
    cparams.n_seq_max       = 2;
    cparams.kv_unified      = true; // one stream for both sequences
    cparams.swa_full        = false; // the same as in the programs of llama.cpp
    cparams.n_threads       = params.n_threads;
    cparams.n_threads_batch = params.n_threads;
    cparams.flash_attn_type = params.flash_attn;
    cparams.type_k          = params.type_k;
    cparams.type_v          = params.type_v;
    cparams.kv_dynamic      = params.kv_dynamic;

    ctx = api.llama_init_from_model(model.model, cparams);
    if (ctx == nullptr) {
        throw std::runtime_error("the context cannot be created");
    }

#ifdef KV_BENCH_TYPES
    if (params.kv_dynamic && budget && !llama_memory_budget_add(budget.get(), ctx)) {
        api.llama_free(ctx);
        throw std::runtime_error("this libllama has no budgets");
    }
#else
    if (params.budget > 0) {
        api.llama_free(ctx);
        throw std::runtime_error("this build has no budgets, because it lacks the layer \"types\"");
    }
#endif

    mem = api.llama_get_memory(ctx);
    if (mem == nullptr) {
        api.llama_free(ctx);
        throw std::runtime_error("this model has no memory");
    }

    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model.model));
    batch   = llama_batch_init((int32_t) n_batch, 0, 1);
}

bench_context::~bench_context() {
    llama_batch_free(batch);
    api.llama_free(ctx);
}

call_result bench_context::fill(uint32_t n) {
    const call_result res = call(SEQ_FILL, n);

    api.llama_memory_seq_cp(mem, SEQ_FILL, SEQ_ALL, -1, -1);
    api.llama_memory_seq_rm(mem, SEQ_FILL, -1, -1);

    return res;
}

void bench_context::fill_by_copy(uint32_t n) {
    if (n == n_filled && api.llama_state_seq_set_data(ctx, filled.data(), filled.size(), SEQ_FILL) > 0) {
        api.llama_memory_seq_add(mem, SEQ_FILL, -1, -1, (llama_pos) n_past - (llama_pos) pos_filled);
        api.llama_memory_seq_cp(mem, SEQ_FILL, SEQ_ALL, -1, -1);
        api.llama_memory_seq_rm(mem, SEQ_FILL, -1, -1);
        n_past += n;
        return;
    }

    const uint32_t pos = n_past;
    call(SEQ_FILL, n);

    if (api.llama_memory_can_shift(mem)) {
        filled.resize(api.llama_state_seq_get_size(ctx, SEQ_FILL));
        n_filled   = api.llama_state_seq_get_data(ctx, filled.data(), filled.size(), SEQ_FILL) == filled.size() ? n : 0;
        pos_filled = pos;
    }

    api.llama_memory_seq_cp(mem, SEQ_FILL, SEQ_ALL, -1, -1);
    api.llama_memory_seq_rm(mem, SEQ_FILL, -1, -1);
}

call_result bench_context::decode(uint32_t n) {
    return call(SEQ_ALL, n);
}

void bench_context::clear() {
    api.llama_memory_clear(mem, true);
    n_past = 0;
}

#ifdef KV_BENCH_TYPES
ggml_type bench_context::type() const {
    ggml_type type_k, type_v;
    llama_get_memory_type(ctx, &type_k, &type_v);
    return type_k;
}

double bench_context::retype(ggml_type type) {
    const double t_start = seconds_of(params);
    const int    rc      = llama_set_memory_type(ctx, type, type);
    const double seconds = seconds_of(params) - t_start;

    if (rc != LLAMA_MEMORY_TYPE_OK) {
        throw std::runtime_error(std::string("the cells cannot be ") + ggml_type_name(type) + ": " + llama_memory_type_reason(rc));
    }

    return seconds;
}
#else
ggml_type bench_context::type() const {
    return params.type_k;
}

double bench_context::retype(ggml_type) {
    throw std::runtime_error("this build cannot change the types of the cells, because it lacks the layer \"types\"");
}
#endif

llama_memory_usage bench_context::usage() const {
    return api.llama_get_memory_usage ? api.llama_get_memory_usage(ctx) : llama_memory_usage {};
}

call_result bench_context::call(llama_seq_id seq, uint32_t n) {
    batch.n_tokens = (int32_t) n;
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t pos = n_past + i;
        batch.token   [i]    = (llama_token) (pos*2654435761u % (uint32_t) n_vocab);
        batch.pos     [i]    = (llama_pos) pos;
        batch.n_seq_id[i]    = 1;
        batch.seq_id  [i][0] = seq;
        batch.logits  [i]    = i + 1 == n;
    }

    const llama_memory_usage before = usage();

    const double t_start = seconds_of(params);
    const int    rc      = api.llama_decode(ctx, batch);
    api.llama_synchronize(ctx);
    const double seconds = seconds_of(params) - t_start;

    if (rc == 1) {
        throw cache_full();
    }
    if (rc != 0) {
        throw std::runtime_error("llama_decode() of " + std::to_string(n) + " tokens at " + std::to_string(n_past) +
                " returned " + std::to_string(rc));
    }

    const llama_memory_usage after = usage();

    const call_result res = {
        n_past, n, seconds,
        after.n_grow - before.n_grow, 1e-6*(double) (after.t_grow_us - before.t_grow_us),
        after.n_bytes_copied - before.n_bytes_copied, after.committed - std::min(before.committed, after.committed),
        after.n_cells - std::min(before.n_cells, after.n_cells),
    };
    n_past += n;

    return res;
}
