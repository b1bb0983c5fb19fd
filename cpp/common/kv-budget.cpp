#include "kv-budget.h"

#include "log.h"

#include "llama-cpp.h"
#include "llama-kv.h"

#include "../src/llama-ext.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static constexpr uint64_t MIB = 1024*1024;

static bool is_smaller(ggml_type a, ggml_type b) {
    return ggml_type_size(a)*ggml_blck_size(b) < ggml_type_size(b)*ggml_blck_size(a);
}

// return the step of n_ctx in cells: 256 for each stream. llama_context rounds n_ctx up to a multiple of this step
// Other options can require a larger step, which this function does not include.
static uint32_t n_ctx_step(bool kv_unified, int32_t n_seq_max) {
    return 256*(kv_unified ? 1 : std::max(1, n_seq_max));
}

// set `cur` to the smallest of the given types, unless `cur` is smaller
static void step_down(const std::vector<ggml_type> & types, ggml_type & cur) {
    for (const auto type : types) {
        cur = is_smaller(type, cur) ? type : cur;
    }
}

static void check_types(const common_params & params) {
    const auto & types = params.kv_auto_quant;

    const auto fail = [](const std::string & why) {
        throw std::invalid_argument("--kv-auto-quant: " + why);
    };

    for (size_t i = 1; i < types.size(); ++i) {
        if (!is_smaller(types[i], types[i - 1])) {
            fail(string_format("%s does not take less than %s before it", ggml_type_name(types[i]), ggml_type_name(types[i - 1])));
        }
    }

    const auto type_k = params.cache_type_k;
    const auto type_v = params.cache_type_v;

    if (is_smaller(type_k, types.front()) && is_smaller(type_v, types.front())) {
        fail(string_format("it begins with %s, the cache with less (--cache-type-k %s, --cache-type-v %s)",
                ggml_type_name(types.front()), ggml_type_name(type_k), ggml_type_name(type_v)));
    }
    if (!is_smaller(types.back(), type_k) && !is_smaller(types.back(), type_v)) {
        fail(string_format("%s does not take less than what the cache begins with (--cache-type-k %s, --cache-type-v %s)",
                ggml_type_name(types.back()), ggml_type_name(type_k), ggml_type_name(type_v)));
    }
    if (ggml_is_quantized(types.back()) && params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        fail(string_format("%s needs flash attention, which --flash-attn off disables", ggml_type_name(types.back())));
    }
}

void common_kv_budget_init(common_params & params) {
    const auto & types = params.kv_auto_quant;

    if (params.kv_budget_mib == 0 && types.empty()) {
        return;
    }

    if (!types.empty()) {
        check_types(params);
    }

    params.kv_dynamic = true;
    params.kv_budget.reset(llama_memory_budget_init(std::min<uint64_t>(params.kv_budget_mib*MIB, SIZE_MAX), types.data(), types.size()), llama_memory_budget_free);
}

llama_flash_attn_type common_kv_flash_attn_type(const common_params & params) {
    // a quantized V requires flash attention. Without flash attention, V is stored transposed and cannot be quantized
    return !params.kv_auto_quant.empty() && ggml_is_quantized(params.kv_auto_quant.back()) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : params.flash_attn_type;
}

uint32_t common_kv_n_ctx(const common_params & params) {
    if (params.kv_cache_tokens == 0) {
        return params.n_ctx;
    }

    uint32_t n_ctx = params.n_ctx;
    if (n_ctx == 0) {
        // use the context size that the model was trained with. With `--fit` and several streams, each stream gets this size
        n_ctx = common_get_gguf_info(params.model.path).n_ctx_train*(params.kv_unified || !params.fit_params ? 1 : params.n_parallel);
    }

    const uint32_t step  = n_ctx_step(params.kv_unified, params.n_parallel);
    const uint32_t n_max = std::max<uint32_t>(step, params.kv_cache_tokens/step*step);
    if (n_max > (uint32_t) params.kv_cache_tokens) {
        LOG_WRN("%s: --kv-cache-tokens %d is less than the smallest context, %u\n", __func__, params.kv_cache_tokens, n_max);
    }

    return n_ctx == 0 || n_ctx > n_max ? n_max : params.n_ctx;
}

//
// common_kv_budget_fit
//

namespace {

// while an object of this class exists, log only at debug level, because internal contexts are created and freed
struct quiet_log {
    quiet_log() {
        llama_log_get(&callback, &user_data);
        llama_log_set([](ggml_log_level, const char * text, void * data) {
            const auto * scope = (const quiet_log *) data;
            scope->callback(GGML_LOG_LEVEL_DEBUG, text, scope->user_data);
        }, this);
    }

    ~quiet_log() { llama_log_set(callback, user_data); }

    ggml_log_callback callback  = nullptr;
    void *            user_data = nullptr;
};

struct bytes {
    size_t cells   = 0;
    size_t compute = 0;
};

// return the bytes that a context needs, without allocating them. throws std::runtime_error if the context cannot be created
bytes measure(const char * path, llama_model_params mparams, const llama_context_params & cparams) {
    const quiet_log scope;

    mparams.no_alloc  = true;
    mparams.load_mode = LLAMA_LOAD_MODE_NONE;

    const llama_model_ptr   model(llama_model_load_from_file(path, mparams));
    const llama_context_ptr ctx(model ? llama_init_from_model(model.get(), cparams) : nullptr);
    if (!ctx) {
        throw std::runtime_error(string_format("the KV cache of %s cannot be measured (-lv %d shows why)", path, LOG_LEVEL_DEBUG));
    }

    const auto usage = llama_get_memory_usage(ctx.get());

    bytes res;
    // no cell is in use, so `usage.used` is the bytes of recurrent states, which the budget does not count
    res.cells = usage.reserved - usage.used;
    for (const auto & [_, mem] : llama_get_memory_breakdown(ctx.get())) {
        res.compute += mem.compute;
    }

    return res;
}

} // namespace

common_kv_budget_fit::common_kv_budget_fit(
        const common_params & params, const llama_model_params & mparams, llama_context_params & tgt, const common_fit_extra_model * extra)
    : params(params), mparams(mparams), tgt(tgt), extra(extra) {
    take_smallest(params.model.path.c_str(), mparams, tgt);
    if (extra) {
        take_smallest(extra->path_model, *extra->mparams, *extra->cparams);
    }
}

common_kv_budget_fit::~common_kv_budget_fit() {
    for (auto & [cparams, given] : given) {
        cparams->type_k = given.type_k;
        cparams->type_v = given.type_v;
    }
}

// set the types of a context to the smallest types of the budget that its model supports. Some models do not support every type
void common_kv_budget_fit::take_smallest(const char * path, const llama_model_params & mparams, llama_context_params & cparams) {
    given.emplace_back(&cparams, cparams);

    for (auto types = params.kv_auto_quant; !types.empty(); types.pop_back()) {
        step_down(types, cparams.type_k);
        step_down(types, cparams.type_v);

        try {
            measure(path, mparams, cparams);
            return;
        } catch (const std::runtime_error &) {
            cparams.type_k = given.back().second.type_k;
            cparams.type_v = given.back().second.type_v;
        }
    }
}

void common_kv_budget_fit::fit_n_ctx() try {
    const bool is_free = params.n_ctx == 0 && (uint32_t) params.fit_params_min_ctx != UINT32_MAX;
    if (params.kv_budget_mib == 0 || !is_free || tgt.n_ctx == 0) {
        return;
    }

    const uint32_t step = n_ctx_step(tgt.kv_unified, tgt.n_seq_max);

    const uint32_t n_min = (tgt.n_ubatch + step - 1)/step*step; // n_ubatch or more: a smaller context would reduce n_ubatch
    uint32_t       n_max = tgt.n_ctx;
    if (n_max <= n_min) {
        return;
    }

    const auto measure_all = [&](uint32_t n_ctx) {
        llama_context_params cparams = tgt;
        cparams.n_ctx = n_ctx;

        bytes res = measure(params.model.path.c_str(), mparams, cparams);

        try {
            if (extra) {
                cparams = *extra->cparams;
                cparams.n_ctx = n_ctx;

                const bytes more = measure(extra->path_model, *extra->mparams, cparams);
                res.cells   += more.cells;
                res.compute += more.compute;
            }
        } catch (const std::runtime_error & err) { // the draft shares the cells of its target, or cannot run without the target
            LOG_WRN("fit_n_ctx: planning without the draft: %s\n", err.what());
            extra = nullptr;
        }

        return res;
    };

    const bytes  start  = measure_all(n_min);
    const uint64_t budget = params.kv_budget_mib*MIB;

    // return the bytes that the budget counts for a context of n_ctx cells: the bytes of all cells, plus the bytes by which the
    // compute buffers are larger than with n_min cells
    const auto size = [&](uint32_t n_ctx) {
        const bytes cur = measure_all(n_ctx);
        return cur.cells + cur.compute - std::min(cur.compute, start.compute);
    };

    const size_t size_min = start.cells;
    for (size_t size_max = size(n_max); size_max > budget; size_max = size(n_max)) {
        if (size_min >= budget || n_max == n_min) {
            n_max = n_min;
            break;
        }

        // estimate the largest n_ctx that fits: the bytes are proportional to n_ctx, except in caches with a window (SWA)
        const uint32_t n = n_min + (n_max - n_min)*(double(budget - size_min)/(size_max - size_min));
        n_max = std::max(n_min, n - n%step);
    }

    if (n_max < tgt.n_ctx) {
        LOG_INF("%s: a budget of %d MiB for the KV cache holds %u of %u cells with K %s, V %s\n", __func__,
                params.kv_budget_mib, n_max, tgt.n_ctx, ggml_type_name(tgt.type_k), ggml_type_name(tgt.type_v));
        tgt.n_ctx = n_max;
    }
} catch (const std::runtime_error & err) {
    LOG_WRN("%s: the context is not planned by the budget: %s\n", __func__, err.what());
}
