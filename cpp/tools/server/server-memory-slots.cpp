#include "server-memory-slots.h"

#include <cstdint>

const std::vector<server_memory_slots::item> & server_memory_slots::items() {
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

void server_memory_slots::update(const llama_context * ctx) {
    usage.clear();

    for (uint32_t id = 0; ctx && id < llama_n_seq_max(ctx); ++id) {
        usage.push_back(llama_memory_seq_usage(ctx, id));
    }
}

size_t server_memory_slots::value(const item & item, size_t id) const {
    return item.value(usage[id]);
}

json server_memory_slots::to_json(size_t id) const {
    json res = json::object();

    for (const auto & item : items()) {
        res[item.name] = id < size() ? value(item, id) : 0;
    }

    return res;
}

json server_memory_slots::to_json() const {
    json res = json::array();

    for (size_t id = 0; id < size(); ++id) {
        res.push_back(to_json(id));
    }

    return res;
}
