#include "server-requantize.h"

#include "server-draft-catch-up.h"
#include "server-memory.h"
#include "server-refusal.h"

#include "llama-kv.h"

server_requantize::server_requantize(const server_contexts & ctxs, server_slots & slots, server_memory_stats & stats, server_queue & queue_tasks)
    : ctxs(ctxs), slots(slots), stats(stats), queue_tasks(queue_tasks) {}

json server_requantize::run(const json & body) {
    const bool for_tgt = body.contains("ctk")  || body.contains("ctv");
    const bool for_dft = body.contains("ctkd") || body.contains("ctvd");
    if (!for_tgt && !for_dft) {
        throw server_refusal(ERROR_TYPE_INVALID_REQUEST, "\"ctk\", \"ctv\", \"ctkd\" or \"ctvd\" must name a type");
    }

    auto * ctx_tgt = ctxs.ctx_tgt;
    auto * ctx_dft = ctxs.ctx_dft;
    if (for_dft && !ctx_dft) {
        throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, "there is no draft with a KV cache of its own");
    }

    const int64_t t_start_us = ggml_time_us();

    const auto before = state();

    const auto types_tgt = before.tgt.with(body, "ctk",  "ctv");
    const auto types_dft = before.dft.with(body, "ctkd", "ctvd");

    // Change the cells of the draft first. If the change of the target's cells fails, the draft's cells change back, and can
    // lose precision by these two changes. The precision of the target's cells is more important.
    set(ctx_dft, before.dft, types_dft, "draft ");
    try {
        set(ctx_tgt, before.tgt, types_tgt, "");
    } catch (...) {
        if (!(types_dft == before.dft)) {
            const int32_t ret = llama_set_memory_type(ctx_dft, before.dft.k, before.dft.v);
            if (ret != LLAMA_MEMORY_TYPE_OK) {
                SRV_WRN("the draft's KV cache keeps its new types: %s\n", llama_memory_type_reason(ret));
            }
        }
        throw;
    }

    stats.show();

    const auto after = state();

    json res = after.to_json();
    res["success"]         = true;
    res["previous"]        = before.to_json();
    res["committed_bytes"] = {{ "before", before.n_bytes }, { "after", after.n_bytes }};
    res["n_cells_used"]    = llama_get_memory_usage(ctx_tgt).n_cells_used;
    res["t_ms"]            = (ggml_time_us() - t_start_us)/1e3;

    return res;
}

void server_requantize::clear_lost() {
    for (auto & slot : slots) {
        if (!slot.is_processing() || slot.state == SLOT_STATE_STARTED || slot.state == SLOT_STATE_WAIT_OTHER) {
            clear_lost(slot.id);
        }
    }
}

void server_requantize::clear_lost(int id_slot) {
    auto & slot = slots[id_slot];

    if (server_memory_is_lost(ctxs.ctx_tgt, slot.id, slot.prompt.n_tokens())) {
        SLT_WRN(slot, "the cells of %d tokens are lost\n", slot.prompt.n_tokens());
        slot.prompt_clear();
    } else if (server_memory_is_lost(slot.ctx_dft, slot.id, slot.prompt.n_tokens()) && !server_draft_catch_up::lacks_tokens(slot)) {
        server_draft_catch_up::drop(slot);
    }
}

server_requantize::types_t server_requantize::types_t::of(const llama_context * ctx) {
    types_t res;
    llama_get_memory_type(ctx, &res.k, &res.v);
    return res;
}

// return the type that the request contains under `key`, or type_default. throw server_refusal if it is not a type of cells
static ggml_type parse_type(const json & body, const char * key, ggml_type type_default) {
    if (!body.contains(key)) {
        return type_default;
    }

    const auto & name = body.at(key);
    for (int i = 0; name.is_string() && i < GGML_TYPE_COUNT; ++i) {
        if (ggml_type_name((ggml_type) i) && name == ggml_type_name((ggml_type) i)) {
            return (ggml_type) i;
        }
    }

    throw server_refusal(ERROR_TYPE_INVALID_REQUEST, string_format("\"%s\": %s is not a type of KV cells", key, name.dump().c_str()));
}

server_requantize::types_t server_requantize::types_t::with(const json & body, const char * key_k, const char * key_v) const {
    return { parse_type(body, key_k, k), parse_type(body, key_v, v) };
}

json server_requantize::state_t::to_json() const {
    json res = json::object();
    if (!tgt.is_none()) {
        res["ctk"] = ggml_type_name(tgt.k);
        res["ctv"] = ggml_type_name(tgt.v);
    }
    if (!dft.is_none()) {
        res["ctkd"] = ggml_type_name(dft.k);
        res["ctvd"] = ggml_type_name(dft.v);
    }
    return res;
}

server_requantize::state_t server_requantize::state() const {
    state_t res;

    res.tgt     = types_t::of(ctxs.ctx_tgt);
    res.n_bytes = llama_get_memory_usage(ctxs.ctx_tgt).committed;
    if (ctxs.ctx_dft) {
        res.dft      = types_t::of(ctxs.ctx_dft);
        res.n_bytes += llama_get_memory_usage(ctxs.ctx_dft).committed;
    }

    return res;
}

// return the kind of error for a result of llama_set_memory_type()
static error_type error_of(int32_t ret) {
    switch (ret) {
        case LLAMA_MEMORY_TYPE_UNSUPPORTED:
        case LLAMA_MEMORY_TYPE_BACKEND:   return ERROR_TYPE_NOT_SUPPORTED;
        case LLAMA_MEMORY_TYPE_NO_MEMORY: return ERROR_TYPE_OUT_OF_MEMORY;
        case LLAMA_MEMORY_TYPE_LOST:      return ERROR_TYPE_SERVER;
        default:                          return ERROR_TYPE_INVALID_REQUEST;
    }
}

void server_requantize::set(llama_context * ctx, const types_t & from, const types_t & to, const char * whose) {
    if (from == to) {
        return;
    }

    if (from.is_none()) {
        throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, string_format("the %sKV cache cannot change its types: %s",
                whose, llama_memory_type_reason(LLAMA_MEMORY_TYPE_UNSUPPORTED)));
    }

    int32_t ret = LLAMA_MEMORY_TYPE_UNSUPPORTED;
    queue_tasks.yield_to_queue([&]() { // the queue can answer the metrics task meanwhile
        ret = llama_set_memory_type(ctx, to.k, to.v);
    });

    if (ret == LLAMA_MEMORY_TYPE_LOST && ctx == ctxs.ctx_dft) {
        for (auto & slot : slots) {
            server_draft_catch_up::drop(slot);
        }
    }

    if (ret != LLAMA_MEMORY_TYPE_OK) {
        throw server_refusal(error_of(ret), string_format("the %sKV cache cannot have K %s, V %s: %s",
                whose, ggml_type_name(to.k), ggml_type_name(to.v), llama_memory_type_reason(ret)));
    }
}
