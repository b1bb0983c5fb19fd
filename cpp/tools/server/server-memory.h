#pragma once

// What the server knows about the memory behind its contexts, from llama_get_memory_usage()

#include "server-common.h"
#include "server-memory-slots.h"

#include "common.h"
#include "llama-kv.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// is memory what the context lacks for n_cells more, rather than cells? ask after a batch or a state found no place
// the only place that decides it. ctx may be null
inline bool server_memory_is_short(const llama_context * ctx, size_t n_cells = 1) {
    if (!ctx) {
        return false;
    }

    const auto usage = llama_get_memory_usage(ctx);

    return usage.n_cells < usage.n_cells_max && usage.n_cells_max - usage.n_cells_used >= n_cells;
}

// the same after a state was not restored: where there were cells for it, or came, something else is wrong with it
// can_tell: the cells that are counted are all that it needs: not those of other streams, nor of a window
inline bool server_memory_is_short_for_state(const llama_context * ctx, const llama_memory_usage & before, size_t n_cells, bool can_tell) {
    const bool has_cells = before.n_cells - before.n_cells_used >= n_cells || llama_get_memory_usage(ctx).n_grow > before.n_grow;

    return server_memory_is_short(ctx, n_cells) && !(can_tell && has_cells);
}

// does the context have no n_cells that are free?
inline bool server_memory_is_full(const llama_context * ctx, size_t n_cells) {
    const auto usage = llama_get_memory_usage(ctx);

    return usage.n_cells_max - usage.n_cells_used < n_cells;
}

// does the context have all of its cells for n_cells? if not, another time may be better for what has failed
// note: free cells do not tell, as a context can have caches of several sizes (windows)
inline bool server_memory_is_free(const llama_context * ctx, size_t n_cells) {
    const auto usage = llama_get_memory_usage(ctx);

    return usage.n_cells_used == 0 && usage.n_cells >= std::min<size_t>(n_cells, usage.n_cells_max);
}

// are the cells of n tokens of a sequence gone? a device that failed in the middle of a change of types has taken them
// ctx may be null
inline bool server_memory_is_lost(const llama_context * ctx, llama_seq_id id, int32_t n) {
    auto * mem = ctx ? llama_get_memory(ctx) : nullptr;

    return mem && n > 0 && llama_memory_seq_pos_max(mem, id) < 0;
}

// what process_mtmd_chunk() returns if there is no place for what it decodes
constexpr int32_t SERVER_CHUNK_NO_CELLS = -2;

inline std::string server_memory_error(const llama_context * ctx, size_t n_cells = 1) {
    const auto usage = llama_get_memory_usage(ctx);

    if (!server_memory_is_short(ctx, n_cells)) {
        return string_format("the KV cache of %u cells has no place left, try again when other requests are done", usage.n_cells_max);
    }

    return string_format("not enough memory for the KV cache to grow beyond %u of %u cells, try again when there is more",
            usage.n_cells, usage.n_cells_max);
}

// The numbers of all contexts, for /metrics and /props. They can be asked for by any thread, also while a batch is computed
// or the server sleeps: then they are those of the last time that somebody looked, and nothing where no context is.
//
// What of it is each slot's takes a look at every cell. While nobody asks, that is done when the slots are all idle and not
// between two batches; for a while after somebody has asked also there, as often as it takes no noticeable part of the time.
class server_memory {
public:
    // before this, there is nothing to see: a server that does nothing of ours says what upstream's does
    void show() {
        std::lock_guard<std::mutex> lock(mutex);

        is_shown = true;
    }

    // what all contexts may take together, may be null
    // the values, as common_params has them on the newest upstream alone, and this is for those before it, too
    void set_budget(std::shared_ptr<llama_memory_budget> budget, const std::vector<ggml_type> & types) {
        std::lock_guard<std::mutex> lock(mutex);

        this->budget = std::move(budget);

        budget_types = json::array();
        for (const auto type : types) {
            budget_types.push_back(ggml_type_name(type));
        }
    }

    // call while the contexts do not compute. ctx_dft: the draft's, may be null
    // with_slots: also what each slot has, whether or not it was asked for
    void update(const llama_context * ctx_tgt, const llama_context * ctx_dft, bool with_slots = false) {
        std::lock_guard<std::mutex> lock(mutex);

        if (!is_shown) {
            return;
        }

        target.update(ctx_tgt);
        draft .update(ctx_dft);

        if (budget) {
            budget_now = llama_memory_budget_get_usage(budget.get());
        }

        const int64_t t_start = ggml_time_us();

        if (with_slots || (t_start < t_asked_us + T_WATCH_US && t_start > t_slots_us + 20*t_slots_took_us)) {
            target.slots.update(ctx_tgt);
            draft .slots.update(ctx_dft);

            t_slots_us      = ggml_time_us();
            t_slots_took_us = t_slots_us - t_start;
        }
    }

    // call before the contexts are freed: what they take goes, what they have done stays counted
    void reset() {
        std::lock_guard<std::mutex> lock(mutex);

        target.reset();
        draft .reset();

        budget_now.committed = 0;
        budget_now.other     = 0;
    }

    // the same for the draft alone
    void reset_draft() {
        std::lock_guard<std::mutex> lock(mutex);

        draft.reset();
    }

    std::string to_metrics() const {
        std::lock_guard<std::mutex> lock(mutex);

        if (!is_shown) {
            return "";
        }

        t_asked_us = ggml_time_us();

        std::ostringstream out;
        for (const auto & item : items()) {
            const auto name = add_header(out, "kv_cache_", item);
            for (const auto * ctx : contexts()) {
                out << name << "{context=\"" << ctx->name << "\"} " << item.value(*ctx).dump() << "\n";
            }
        }
        if (budget) {
            for (const auto & item : budget_items()) {
                const auto name = add_header(out, "kv_budget_", item);
                out << name << " " << item.value(budget_now).dump() << "\n";
            }
        }

        for (const auto & item : server_memory_slots::items()) {
            const std::string name = "llamacpp:kv_cache_slot_" + item.name;

            out << "# HELP " << name << " KV cache, by slot: " << item.help << "\n"
                << "# TYPE " << name << " gauge\n";
            for (const auto * ctx : contexts()) {
                for (size_t id = 0; id < ctx->slots.size(); ++id) {
                    out << name << "{context=\"" << ctx->name << "\",slot=\"" << id << "\"} " << ctx->slots.value(item, id) << "\n";
                }
            }
        }

        return out.str();
    }

    void update_props(json & props) const {
        std::lock_guard<std::mutex> lock(mutex);

        if (!is_shown) {
            return;
        }

        t_asked_us = ggml_time_us();

        json res = json::object();
        for (const auto * ctx : contexts()) {
            for (const auto & item : items()) {
                res[ctx->name][item.name] = item.value(*ctx);
            }
            res[ctx->name]["slots"] = ctx->slots.to_json();
            ctx->add_types(res[ctx->name]);
        }

        props["kv_cache"] = res;

        if (budget) {
            res = {{ "types", budget_types }};
            for (const auto & item : budget_items()) {
                res[item.name] = item.value(budget_now);
            }
            props["kv_budget"] = res;
        }
    }

    // what each slot has, and the target's types, which change for all slots at once
    void update_slots(json & slots) const {
        std::lock_guard<std::mutex> lock(mutex);

        if (!is_shown) {
            return;
        }

        t_asked_us = ggml_time_us();

        for (auto & slot : slots) {
            for (const auto * ctx : contexts()) {
                slot["kv_cache"][ctx->name] = ctx->slots.to_json(slot.at("id").get<int>());
            }
            if (target.type_k != GGML_TYPE_COUNT) {
                target.add_types(slot["kv_cache"]);
            }
        }
    }

private:
    struct context {
        const char * name;
        bool         present = false;

        llama_memory_usage now  = {};
        llama_memory_usage past = {}; // counters of the contexts that were here before

        server_memory_slots slots = {};

        ggml_type type_k = GGML_TYPE_COUNT; // none
        ggml_type type_v = GGML_TYPE_COUNT;

        void update(const llama_context * ctx) {
            present = present || ctx;
            now     = ctx ? llama_get_memory_usage(ctx) : llama_memory_usage {};

            if (ctx) {
                llama_get_memory_type(ctx, &type_k, &type_v);
            }
        }

        void add_types(json & res) const {
            if (type_k != GGML_TYPE_COUNT) {
                res["type_k"] = ggml_type_name(type_k);
                res["type_v"] = ggml_type_name(type_v);
            }
        }

        void reset() {
            past.n_grow         += now.n_grow;
            past.n_shrink       += now.n_shrink;
            past.n_bytes_copied += now.n_bytes_copied;
            past.t_grow_us      += now.t_grow_us;
            past.n_retype       += now.n_retype;
            past.t_retype_us    += now.t_retype_us;

            now    = {};
            type_k = GGML_TYPE_COUNT;
            type_v = GGML_TYPE_COUNT;
            slots  = {};
        }
    };

    template <typename T>
    struct item {
        std::string  name;
        const char * type;
        const char * help;
        json      (* value)(const T & of); // bytes and cells to the last digit
    };

    // returns the name
    template <typename T>
    static std::string add_header(std::ostringstream & out, const char * prefix, const item<T> & item) {
        const auto name = "llamacpp:" + (prefix + item.name);

        out << "# HELP " << name << " " << item.help << "\n"
            << "# TYPE " << name << " " << item.type << "\n";

        return name;
    }

    static const std::vector<item<llama_memory_budget_usage>> & budget_items() {
        using usage = llama_memory_budget_usage;

        static const std::vector<item<usage>> res = {
            { "bytes",           "gauge",   "KV budget: bytes, 0 for what there is",                   [](const usage & u) -> json { return u.n_bytes;   } },
            { "committed_bytes", "gauge",   "KV budget: bytes that are taken",                         [](const usage & u) -> json { return u.committed; } },
            { "loaded_bytes",    "gauge",   "KV budget: of these, by the projector and the draft model", [](const usage & u) -> json { return u.other;     } },
            { "down_total",      "counter", "KV budget: times that cells have taken smaller types",    [](const usage & u) -> json { return u.n_down;    } },
            { "up_total",        "counter", "KV budget: times that they have gone back to the first",  [](const usage & u) -> json { return u.n_up;      } },
        };

        return res;
    }

    static const std::vector<item<context>> & items() {
        static const std::vector<item<context>> res = {
            { "reserved_bytes",        "gauge",   "KV cache and recurrent states: bytes at full size",           [](const context & c) -> json { return c.now.reserved; } },
            { "committed_bytes",       "gauge",   "KV cache and recurrent states: bytes that are taken",         [](const context & c) -> json { return c.now.committed; } },
            { "used_bytes",            "gauge",   "KV cache and recurrent states: bytes behind tokens",          [](const context & c) -> json { return c.now.used; } },
            { "cells_max",             "gauge",   "KV cache: cells at full size",                                [](const context & c) -> json { return c.now.n_cells_max; } },
            { "cells",                 "gauge",   "KV cache: cells with memory",                                 [](const context & c) -> json { return c.now.n_cells; } },
            { "cells_used",            "gauge",   "KV cache: cells that hold a token",                           [](const context & c) -> json { return c.now.n_cells_used; } },
            { "fragmentation",         "gauge",   "KV cache and recurrent states: part of the taken bytes that is behind no token", [](const context & c) -> json { return c.now.committed ? 1.0 - double(c.now.used)/c.now.committed : 0.0; } },
            { "grow_total",            "counter", "KV cache: times that it has grown",                           [](const context & c) -> json { return c.past.n_grow         + c.now.n_grow; } },
            { "shrink_total",          "counter", "KV cache: times that it has given memory back",               [](const context & c) -> json { return c.past.n_shrink       + c.now.n_shrink; } },
            { "copied_bytes_total",    "counter", "KV cache: bytes that were moved for that",                    [](const context & c) -> json { return c.past.n_bytes_copied + c.now.n_bytes_copied; } },
            { "grow_seconds_total",    "counter", "KV cache: time spent growing",                                [](const context & c) -> json { return (c.past.t_grow_us     + c.now.t_grow_us)/1e6; } },
            { "retype_total",          "counter", "KV cache: times that its types have changed",                 [](const context & c) -> json { return c.past.n_retype       + c.now.n_retype; } },
            { "retype_seconds_total",  "counter", "KV cache: time spent changing its types",                     [](const context & c) -> json { return (c.past.t_retype_us   + c.now.t_retype_us)/1e6; } },
        };

        return res;
    }

    std::vector<const context *> contexts() const {
        std::vector<const context *> res = { &target };
        if (draft.present) {
            res.push_back(&draft);
        }

        return res;
    }

    static constexpr int64_t T_WATCH_US = 120*1000*1000; // who collects metrics asks once a minute

    mutable std::mutex mutex;

    mutable int64_t t_asked_us = -T_WATCH_US;

    int64_t t_slots_us      = 0;
    int64_t t_slots_took_us = 0;

    bool is_shown = false;

    std::shared_ptr<llama_memory_budget> budget;
    json                                 budget_types;
    llama_memory_budget_usage            budget_now = {};

    context target = { "target" };
    context draft  = { "draft"  };
};
