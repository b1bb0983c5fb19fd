#pragma once

// What each slot has of the memory behind a context, from llama_memory_seq_usage()

#include "server-common.h"

#include "llama-kv.h"

#include <string>
#include <vector>

class server_memory_slots {
public:
    struct item {
        std::string  name;
        const char * help;
        size_t    (* value)(const llama_seq_usage & usage);
    };

    static const std::vector<item> & items() {
        static const std::vector<item> res = {
            { "bytes",               "used bytes, those of shared cells divided: the slots sum to used_bytes",
                                                                                  [](const llama_seq_usage & u) { return u.bytes; } },
            { "cells",               "cells with a token of the slot",            [](const llama_seq_usage & u) { return size_t(u.cells.n_cells); } },
            { "cells_shared",        "of these, with other slots",                [](const llama_seq_usage & u) { return size_t(u.cells.n_shared); } },
            { "runs",                "runs of adjacent cells",                    [](const llama_seq_usage & u) { return size_t(u.cells.n_runs); } },
            { "window_bytes",        "bytes, in caches with a window",            [](const llama_seq_usage & u) { return u.bytes_window; } },
            { "window_cells",        "cells, in the cache with a window",         [](const llama_seq_usage & u) { return size_t(u.window.n_cells); } },
            { "window_cells_shared", "shared cells, in the cache with a window",  [](const llama_seq_usage & u) { return size_t(u.window.n_shared); } },
            { "window_runs",         "runs of cells, in the cache with a window", [](const llama_seq_usage & u) { return size_t(u.window.n_runs); } },
        };

        return res;
    }

    // call while the context does not compute. ctx may be null
    void update(const llama_context * ctx) {
        usage.clear();

        for (uint32_t id = 0; ctx && id < llama_n_seq_max(ctx); ++id) {
            usage.push_back(llama_memory_seq_usage(ctx, id));
        }
    }

    size_t size() const {
        return usage.size();
    }

    size_t value(const item & item, size_t id) const {
        return item.value(usage[id]);
    }

    json to_json(size_t id) const {
        json res = json::object();

        for (const auto & item : items()) {
            res[item.name] = id < size() ? value(item, id) : 0;
        }

        return res;
    }

    json to_json() const {
        json res = json::array();

        for (size_t id = 0; id < size(); ++id) {
            res.push_back(to_json(id));
        }

        return res;
    }

private:
    std::vector<llama_seq_usage> usage;
};
