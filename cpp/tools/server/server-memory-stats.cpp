#include "server-memory-stats.h"

#include <sstream>
#include <utility>

void server_memory_stats::show() {
    std::lock_guard<std::mutex> lock(mutex);

    is_shown = true;
}

void server_memory_stats::set_budget(std::shared_ptr<llama_memory_budget> budget, const std::vector<ggml_type> & types) {
    std::lock_guard<std::mutex> lock(mutex);

    this->budget = std::move(budget);

    budget_types = json::array();
    for (const auto type : types) {
        budget_types.push_back(ggml_type_name(type));
    }
}

void server_memory_stats::set_conversations(std::function<server_conversations::usage()> usage) {
    std::lock_guard<std::mutex> lock(mutex);

    conversations = std::move(usage);
}

void server_memory_stats::update(const llama_context * ctx_tgt, const llama_context * ctx_dft, bool with_slots) {
    std::lock_guard<std::mutex> lock(mutex);

    if (!is_shown) {
        return;
    }

    target.update(ctx_tgt);
    draft .update(ctx_dft);

    if (budget) {
        budget_now = llama_memory_budget_get_usage(budget.get());
    }
    if (conversations) {
        conversations_now = conversations();
    }

    const int64_t t_start = ggml_time_us();

    if (with_slots || (t_start < t_asked_us + T_WATCH_US && t_start > t_slots_us + 20*t_slots_took_us)) {
        target.slots.update(ctx_tgt);
        draft .slots.update(ctx_dft);

        t_slots_us      = ggml_time_us();
        t_slots_took_us = t_slots_us - t_start;
    }
}

void server_memory_stats::reset() {
    std::lock_guard<std::mutex> lock(mutex);

    target.reset();
    draft .reset();

    if (conversations) {
        conversations_now = conversations(); // entries in RAM stay while the server sleeps
    }

    if (budget) {
        budget_now = llama_memory_budget_get_usage(budget.get());
    }
    budget_now.committed = budget_now.reclaimable;
    budget_now.other     = 0;
}

void server_memory_stats::reset_draft() {
    std::lock_guard<std::mutex> lock(mutex);

    draft.reset();
}

std::string server_memory_stats::to_metrics() const {
    std::lock_guard<std::mutex> lock(mutex);

    if (!is_shown) {
        return "";
    }

    t_asked_us = ggml_time_us();

    std::ostringstream out;
    for (const auto & item : context_items()) {
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

    for (const auto & item : conversation_items()) {
        const auto name = add_header(out, "conversation_", item);
        out << name << " " << item.value(conversations_now).dump() << "\n";
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

void server_memory_stats::update_props(json & props) const {
    std::lock_guard<std::mutex> lock(mutex);

    if (!is_shown) {
        return;
    }

    t_asked_us = ggml_time_us();

    json res = json::object();
    for (const auto * ctx : contexts()) {
        for (const auto & item : context_items()) {
            res[ctx->name][item.name] = item.value(*ctx);
        }
        res[ctx->name]["slots"] = ctx->slots.to_json();
        ctx->add_types(res[ctx->name]);
    }

    props["kv_cache"] = res;

    for (const auto & item : conversation_items()) {
        props["conversations"][item.name] = item.value(conversations_now);
    }

    if (budget) {
        res = {{ "types", budget_types }};
        for (const auto & item : budget_items()) {
            res[item.name] = item.value(budget_now);
        }
        props["kv_budget"] = res;
    }
}

void server_memory_stats::update_slots(json & slots) const {
    std::lock_guard<std::mutex> lock(mutex);

    if (!is_shown) {
        return;
    }

    t_asked_us = ggml_time_us();

    for (auto & slot : slots) {
        const size_t id = slot.at("id").get<int>();
        if (id < conversations_now.n_bytes_checkpoints_by_slot.size()) {
            slot["conversations"] = {
                { "checkpoint_bytes", conversations_now.n_bytes_checkpoints_by_slot[id] },
                { "paused_bytes",     conversations_now.n_bytes_paused_by_slot     [id] },
            };
        }
        for (const auto * ctx : contexts()) {
            slot["kv_cache"][ctx->name] = ctx->slots.to_json(slot.at("id").get<int>());
        }
        if (target.type_k != GGML_TYPE_COUNT) {
            target.add_types(slot["kv_cache"]);
        }
    }
}

void server_memory_stats::context::update(const llama_context * ctx) {
    present = present || ctx;
    now     = ctx ? llama_get_memory_usage(ctx) : llama_memory_usage {};

    if (ctx) {
        llama_get_memory_type(ctx, &type_k, &type_v);
    }
}

void server_memory_stats::context::add_types(json & res) const {
    if (type_k != GGML_TYPE_COUNT) {
        res["type_k"] = ggml_type_name(type_k);
        res["type_v"] = ggml_type_name(type_v);
    }
}

void server_memory_stats::context::reset() {
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

template <typename T>
std::string server_memory_stats::add_header(std::ostringstream & out, const char * prefix, const item<T> & item) {
    const auto name = "llamacpp:" + (prefix + item.name);

    out << "# HELP " << name << " " << item.help << "\n"
        << "# TYPE " << name << " " << item.type << "\n";

    return name;
}

const std::vector<server_memory_stats::item<llama_memory_budget_usage>> & server_memory_stats::budget_items() {
    using usage = llama_memory_budget_usage;

    static const std::vector<item<usage>> res = {
        { "bytes",           "gauge",   "KV budget: the limit in bytes, 0 without one",            [](const usage & u) -> json { return u.n_bytes;   } },
        { "committed_bytes", "gauge",   "KV budget: committed bytes",                              [](const usage & u) -> json { return u.committed; } },
        { "loaded_bytes",    "gauge",   "KV budget: committed bytes of the projector and the draft model", [](const usage & u) -> json { return u.other;     } },
        { "conversation_bytes", "gauge", "KV budget: committed bytes of conversations, with --cache-ram budget", [](const usage & u) -> json { return u.reclaimable; } },
        { "down_total",      "counter", "KV budget: number of changes to smaller types",           [](const usage & u) -> json { return u.n_down;    } },
        { "up_total",        "counter", "KV budget: number of returns to the first types",         [](const usage & u) -> json { return u.n_up;      } },
    };

    return res;
}

const std::vector<server_memory_stats::item<server_conversations::usage>> & server_memory_stats::conversation_items() {
    using usage = server_conversations::usage;

    static const std::vector<item<usage>> res = {
        { "limit_bytes",        "gauge",   "Conversations: bytes that --cache-ram allows now, 0 for no limit",         [](const usage & u) -> json { return u.n_bytes_limit;       } },
        { "entry_bytes",        "gauge",   "Conversations: bytes of the entries in RAM, without checkpoints",      [](const usage & u) -> json { return u.n_bytes_entries;     } },
        { "checkpoint_bytes",   "gauge",   "Conversations: bytes of checkpoints, of slots and entries",            [](const usage & u) -> json { return u.n_bytes_checkpoints; } },
        { "paused_bytes",       "gauge",   "Conversations: bytes of paused requests",                              [](const usage & u) -> json { return u.n_bytes_paused;      } },
        { "disk_bytes",         "gauge",   "Conversations: bytes of files on disk",                                [](const usage & u) -> json { return u.n_bytes_disk;        } },
        { "disk_limit_bytes",   "gauge",   "Conversations: bytes that --cache-disk-limit allows, 0 for no limit",  [](const usage & u) -> json { return u.n_bytes_disk_limit;  } },
        { "entries",            "gauge",   "Conversations: entries in RAM",                                        [](const usage & u) -> json { return u.n_entries;           } },
        { "disk_entries",       "gauge",   "Conversations: files on disk",                                         [](const usage & u) -> json { return u.n_entries_disk;      } },
        { "hits_total",         "counter", "Conversations: requests that continued from an entry or another slot", [](const usage & u) -> json { return u.n_hits;              } },
        { "misses_total",       "counter", "Conversations: requests that found no usable state",                   [](const usage & u) -> json { return u.n_misses;            } },
        { "saved_tokens_total", "counter", "Conversations: tokens that the hits did not compute",                  [](const usage & u) -> json { return u.n_tokens_saved;      } },
        { "disk_hits_total",         "counter", "Conversations: requests that continued from a file on disk",              [](const usage & u) -> json { return u.n_hits_disk;         } },
        { "disk_misses_total",       "counter", "Conversations: requests that found no usable state, also not on disk",    [](const usage & u) -> json { return u.n_misses_disk;       } },
        { "disk_saved_tokens_total", "counter", "Conversations: tokens that the hits on disk did not compute",             [](const usage & u) -> json { return u.n_tokens_saved_disk; } },
    };

    return res;
}

const std::vector<server_memory_stats::item<server_memory_stats::context>> & server_memory_stats::context_items() {
    static const std::vector<item<context>> res = {
        { "reserved_bytes",        "gauge",   "KV cache and recurrent states: bytes at full size",           [](const context & c) -> json { return c.now.reserved; } },
        { "committed_bytes",       "gauge",   "KV cache and recurrent states: bytes with memory",            [](const context & c) -> json { return c.now.committed; } },
        { "used_bytes",            "gauge",   "KV cache and recurrent states: bytes of cells with a token",  [](const context & c) -> json { return c.now.used; } },
        { "cells_max",             "gauge",   "KV cache: cells at full size",                                [](const context & c) -> json { return c.now.n_cells_max; } },
        { "cells",                 "gauge",   "KV cache: cells with memory",                                 [](const context & c) -> json { return c.now.n_cells; } },
        { "cells_used",            "gauge",   "KV cache: cells with a token",                                [](const context & c) -> json { return c.now.n_cells_used; } },
        { "fragmentation",         "gauge",   "KV cache and recurrent states: share of the committed bytes without a token",    [](const context & c) -> json { return c.now.committed ? 1.0 - double(c.now.used)/c.now.committed : 0.0; } },
        { "grow_total",            "counter", "KV cache: number of growths",                                 [](const context & c) -> json { return c.past.n_grow         + c.now.n_grow; } },
        { "shrink_total",          "counter", "KV cache: number of times that memory was freed",             [](const context & c) -> json { return c.past.n_shrink       + c.now.n_shrink; } },
        { "copied_bytes_total",    "counter", "KV cache: bytes that growths and shrinks copied",             [](const context & c) -> json { return c.past.n_bytes_copied + c.now.n_bytes_copied; } },
        { "grow_seconds_total",    "counter", "KV cache: seconds spent growing",                             [](const context & c) -> json { return (c.past.t_grow_us     + c.now.t_grow_us)/1e6; } },
        { "retype_total",          "counter", "KV cache: number of changes of type",                         [](const context & c) -> json { return c.past.n_retype       + c.now.n_retype; } },
        { "retype_seconds_total",  "counter", "KV cache: seconds spent on changes of type",                  [](const context & c) -> json { return (c.past.t_retype_us   + c.now.t_retype_us)/1e6; } },
    };

    return res;
}

std::vector<const server_memory_stats::context *> server_memory_stats::contexts() const {
    std::vector<const context *> res = { &target };
    if (draft.present) {
        res.push_back(&draft);
    }

    return res;
}
