#pragma once

// The types of a live KV cache: POST /requantize_kvcache {"ctk": TYPE, "ctv": TYPE, "ctkd": TYPE, "ctvd": TYPE}
//
// A part of server_context_impl (impl_t), included there once the slots are defined. Slots may be generating: the change is made
// between two batches, and positions and cells stay.

#include "server-common.h"
#include "server-memory.h"
#include "server-refusal.h"

#include "llama-kv.h"
#include "llama.h"

#include <string>

struct server_kv_types {
    ggml_type k = GGML_TYPE_COUNT;
    ggml_type v = GGML_TYPE_COUNT;

    static server_kv_types of(const llama_context * ctx) {
        server_kv_types res;
        llama_get_memory_type(ctx, &res.k, &res.v);
        return res;
    }

    // these, with those that the request names. throws server_refusal
    server_kv_types with(const json & body, const char * key_k, const char * key_v) const {
        return { parse(body, key_k, k), parse(body, key_v, v) };
    }

    bool is_none() const { return k == GGML_TYPE_COUNT; }

    bool operator==(const server_kv_types & other) const { return k == other.k && v == other.v; }

private:
    static ggml_type parse(const json & body, const char * key, ggml_type type_default) {
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
};

template <typename impl_t>
class server_requantize {
public:
    // main loop. throws server_refusal: then nothing has changed, unless the device has failed
    json requantize(const json & body) {
        const bool for_tgt = body.contains("ctk")  || body.contains("ctv");
        const bool for_dft = body.contains("ctkd") || body.contains("ctvd");
        if (!for_tgt && !for_dft) {
            throw server_refusal(ERROR_TYPE_INVALID_REQUEST, "\"ctk\", \"ctv\", \"ctkd\" or \"ctvd\" must name a type");
        }

        auto * ctx_tgt = self().ctx_tgt;
        auto * ctx_dft = self().ctx_dft;
        if (for_dft && !ctx_dft) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, "there is no draft with a KV cache of its own");
        }

        const int64_t t_start_us = ggml_time_us();

        const auto before = state();

        const auto types_tgt = before.tgt.with(body, "ctk",  "ctv");
        const auto types_dft = before.dft.with(body, "ctkd", "ctvd");

        // the draft first: where the target cannot follow, nobody misses what its cells lose on the way there and back
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

        self().memory.show();

        const auto after = state();

        json res = after.to_json();
        res["success"]         = true;
        res["previous"]        = before.to_json();
        res["committed_bytes"] = {{ "before", before.n_bytes }, { "after", after.n_bytes }};
        res["n_cells_used"]    = llama_get_memory_usage(ctx_tgt).n_cells_used;
        res["t_ms"]            = (ggml_time_us() - t_start_us)/1e3;

        return res;
    }

    // main loop, before a task and before a batch is made. a device that fails in the middle of a change of types, also of one that the budget asks
    // for, takes all cells: what has tokens in a batch ends there (llama_decode() returns -3), the others process theirs anew
    void clear_lost() {
        for (auto & slot : self().slots) {
            if (!slot.is_processing() || slot.state == SLOT_STATE_STARTED || slot.state == SLOT_STATE_WAIT_OTHER) {
                clear_lost(slot);
            }
        }
    }

    // the same for a slot whose prompt begins: while a batch is made others are read, and media decoded
    void clear_lost(server_slot & slot) {
        if (server_memory_is_lost(self().ctx_tgt, slot.id, slot.prompt.n_tokens())) {
            SLT_WRN(slot, "the cells of %d tokens are lost\n", slot.prompt.n_tokens());
            slot.prompt_clear();
        } else if (server_memory_is_lost(slot.ctx_dft, slot.id, slot.prompt.n_tokens()) && !self().draft_lacks_some(slot)) {
            self().draft_drop(slot);
        }
    }

private:
    struct state_t {
        server_kv_types tgt;
        server_kv_types dft;

        size_t n_bytes = 0;

        json to_json() const {
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
    };

    state_t state() const {
        state_t res;

        res.tgt     = server_kv_types::of(self().ctx_tgt);
        res.n_bytes = llama_get_memory_usage(self().ctx_tgt).committed;
        if (self().ctx_dft) {
            res.dft      = server_kv_types::of(self().ctx_dft);
            res.n_bytes += llama_get_memory_usage(self().ctx_dft).committed;
        }

        return res;
    }

    void set(llama_context * ctx, const server_kv_types & from, const server_kv_types & to, const char * whose) {
        if (from == to) {
            return;
        }

        if (from.is_none()) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, string_format("the %sKV cache cannot change its types: %s",
                    whose, llama_memory_type_reason(LLAMA_MEMORY_TYPE_UNSUPPORTED)));
        }

        int32_t ret = LLAMA_MEMORY_TYPE_UNSUPPORTED;
        self().queue_tasks.yield_to_queue([&]() { // for the metrics
            ret = llama_set_memory_type(ctx, to.k, to.v);
        });

        if (ret == LLAMA_MEMORY_TYPE_LOST && ctx == self().ctx_dft) {
            for (auto & slot : self().slots) {
                self().draft_drop(slot);
            }
        }

        if (ret != LLAMA_MEMORY_TYPE_OK) {
            throw server_refusal(error_of(ret), string_format("the %sKV cache cannot have K %s, V %s: %s",
                    whose, ggml_type_name(to.k), ggml_type_name(to.v), llama_memory_type_reason(ret)));
        }
    }

    static error_type error_of(int32_t ret) {
        switch (ret) {
            case LLAMA_MEMORY_TYPE_UNSUPPORTED:
            case LLAMA_MEMORY_TYPE_BACKEND:   return ERROR_TYPE_NOT_SUPPORTED;
            case LLAMA_MEMORY_TYPE_NO_MEMORY: return ERROR_TYPE_OUT_OF_MEMORY;
            case LLAMA_MEMORY_TYPE_LOST:      return ERROR_TYPE_SERVER;
            default:                          return ERROR_TYPE_INVALID_REQUEST;
        }
    }

    impl_t & self() {
        return static_cast<impl_t &>(*this);
    }

    const impl_t & self() const {
        return static_cast<const impl_t &>(*this);
    }
};
