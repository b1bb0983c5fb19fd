#pragma once

// A part of the server that is loaded and freed on request: POST {"action": "load" | "unload", "unload": NAME, "timeout_ms": N}

#include "server-bytes.h"
#include "server-common.h"
#include "server-refusal.h"

#include <chrono>
#include <functional>
#include <string>

using server_deadline = std::chrono::steady_clock::time_point;

struct server_part {
    std::string name;

    std::function<bool()> is_loaded;

    // both throw server_refusal: then all is as before
    std::function<json()>                load;
    std::function<json(server_deadline)> unload; // once nobody uses it
};

// what a load or an unload says. what: "taken" or "freed", more - less; nothing if it was in that state before
inline json server_part_done(const char * state, const char * what, const server_bytes & more, const server_bytes & less) {
    return {
        { "success", true },
        { "state",   state },
        { what, {
            { "resident_bytes", more.resident - less.resident },
            { "device_bytes",   more.device   - less.device   },
        }},
    };
}

// other: the one that may have to go, for a swap
inline json server_part_post(const server_part & part, const server_part & other, const json & body) {
    const auto action = json_value(body, "action", std::string());
    const auto swap   = json_value(body, "unload", std::string());

    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(json_value(body, "timeout_ms", (int64_t) 10000));

    if (action == "unload" && swap.empty()) {
        return part.unload(deadline);
    }

    if (action != "load" || (!swap.empty() && swap != other.name)) {
        throw server_refusal(ERROR_TYPE_INVALID_REQUEST,
                "\"action\" must be \"load\" or \"unload\"; with \"load\", \"unload\" may be \"" + other.name + "\"");
    }

    if (swap.empty()) {
        return part.load();
    }

    const bool was_loaded = other.is_loaded();

    const json gone = other.unload(deadline);
    try {
        json res = part.load();
        res["unloaded"] = {{ other.name, gone }};
        return res;
    } catch (const server_refusal &) {
        if (was_loaded) {
            other.load();
        }
        throw;
    }
}
