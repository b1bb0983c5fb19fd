#pragma once

// A part of the server that is loaded and freed on request: POST {"action": "load" | "unload", "unload": NAME, "timeout_ms": N}

#include "server-bytes.h"
#include "server-common.h"
#include "server-refusal.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>

using server_deadline = std::chrono::steady_clock::time_point;

// When a part is there: always, on request (is_lazy), or from the first request that needs it until nobody has used it for
// n_seconds (auto, 0: it stays). Not thread-safe
class server_lazy {
public:
    server_lazy() = default;
    server_lazy(bool is_lazy, int32_t n_seconds) : lazy(is_lazy || n_seconds >= 0), n_seconds(n_seconds) {}

    bool is_lazy() const { return lazy; }
    bool is_auto() const { return n_seconds >= 0; }

    int32_t get_n_seconds() const { return n_seconds; }

    void used() {
        t_used = clock::now();
    }

    bool is_unused() const {
        return n_seconds > 0 && clock::now() - t_used >= std::chrono::seconds(n_seconds);
    }

    // it could not be loaded for a request that can do without, or had to go: not again with each one
    void defer() {
        t_retry = clock::now() + std::chrono::seconds(std::max(10, n_seconds));
    }

    bool may_load() const {
        return is_auto() && clock::now() >= t_retry;
    }

private:
    using clock = std::chrono::steady_clock;

    bool    lazy      = false;
    int32_t n_seconds = -1;

    clock::time_point t_used;
    clock::time_point t_retry;
};

struct server_component {
    std::string name;

    // main loop, also when the HTTP thread has gone. load and unload throw server_refusal: then all is as before
    std::function<bool()> is_loaded;
    std::function<json()> load;
    std::function<json()> unload; // returns null while somebody uses it

    // HTTP thread: what the main loop makes of a function; the other one takes one that returns null while somebody uses the part,
    // and waits until nobody does
    std::function<json(std::function<json()>)>                  call;
    std::function<json(std::function<json()>, server_deadline)> call_unused;
};

// what a load or an unload says. what: "taken" or "freed", more - less; nothing if it was in that state before
inline json server_component_done(const char * state, const char * what, const server_bytes & more, const server_bytes & less) {
    return {
        { "success", true },
        { "state",   state },
        { what, {
            { "resident_bytes", more.resident - less.resident },
            { "device_bytes",   more.device   - less.device   },
        }},
    };
}

// main loop. no request comes between the two: it would have the one that has just gone loaded again
inline json server_component_swap(const server_component & part, const server_component & other) {
    const bool was_loaded = other.is_loaded();

    const json gone = other.unload();
    if (gone.is_null()) {
        return gone;
    }
    try {
        json res = part.load();
        res["unloaded"] = {{ other.name, gone }};
        return res;
    } catch (...) {
        if (was_loaded) {
            try {
                other.load();
            } catch (const std::exception & e) {
                SRV_ERR("the %s that was unloaded for it is not there any more: %s\n", other.name.c_str(), e.what());
            }
        }
        throw;
    }
}

// other: the one that may have to go, for a swap
inline json server_component_post(const server_component & part, const server_component & other, const json & body) {
    const auto action = json_value(body, "action", std::string());
    const auto swap   = json_value(body, "unload", std::string());

    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::clamp<int64_t>(json_value(body, "timeout_ms", (int64_t) 10000), 0, 24*60*60*1000));

    if (action == "unload" && swap.empty()) {
        return part.call_unused(part.unload, deadline);
    }

    if (action != "load" || (!swap.empty() && swap != other.name)) {
        throw server_refusal(ERROR_TYPE_INVALID_REQUEST,
                "\"action\" must be \"load\" or \"unload\"; with \"load\", \"unload\" may be \"" + other.name + "\"");
    }

    if (swap.empty()) {
        return part.call(part.load);
    }

    return other.call_unused([part, other]() { return server_component_swap(part, other); }, deadline);
}
