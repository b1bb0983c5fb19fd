#include "server-component.h"

#include "server-refusal.h"

#include <algorithm>
#include <exception>

server_lazy::server_lazy(bool is_lazy, int32_t n_seconds) : lazy(is_lazy || n_seconds >= 0), n_seconds(n_seconds) {}

void server_lazy::used() {
    t_used = clock::now();
}

bool server_lazy::is_unused() const {
    return n_seconds > 0 && clock::now() - t_used >= std::chrono::seconds(n_seconds);
}

void server_lazy::defer() {
    t_retry = clock::now() + std::chrono::seconds(std::max(10, n_seconds));
}

bool server_lazy::may_load() const {
    return is_auto() && clock::now() >= t_retry;
}

json server_component_done(const char * state, const char * what, const server_bytes & more, const server_bytes & less) {
    return {
        { "success", true },
        { "state",   state },
        { what, {
            { "resident_bytes", more.resident - less.resident },
            { "device_bytes",   more.device   - less.device   },
        }},
    };
}

// free `other` and load `component` in one call of the main loop
// With two calls, a request between them could load `other` again.
static json swap_components(const server_component & component, const server_component & other) {
    const bool was_loaded = other.is_loaded();

    const json freed = other.unload();
    if (freed.is_null()) {
        return freed;
    }
    try {
        json res = component.load();
        res["unloaded"] = {{ other.name, freed }};
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

json server_component_post(const server_component & component, const server_component & other, const json & body) {
    const auto action = json_value(body, "action", std::string());
    const auto swap   = json_value(body, "unload", std::string());

    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::clamp<int64_t>(json_value(body, "timeout_ms", (int64_t) 10000), 0, 24*60*60*1000));

    if (action == "unload" && swap.empty()) {
        return component.call_unused(component.unload, deadline);
    }

    if (action != "load" || (!swap.empty() && swap != other.name)) {
        throw server_refusal(ERROR_TYPE_INVALID_REQUEST,
                "\"action\" must be \"load\" or \"unload\"; with \"load\", \"unload\" may be \"" + other.name + "\"");
    }

    if (swap.empty()) {
        return component.call(component.load);
    }

    return other.call_unused([component, other]() { return swap_components(component, other); }, deadline);
}
