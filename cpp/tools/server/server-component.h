#pragma once

#include "server-bytes.h"
#include "server-common.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

using server_deadline = std::chrono::steady_clock::time_point;

// When a component is loaded: always, on request (is_lazy), or from the first request that needs it until no request has
// used it for n_seconds (is_auto; 0: it stays loaded). Not thread-safe.
class server_lazy {
public:
    server_lazy() = default;
    server_lazy(bool is_lazy, int32_t n_seconds);

    bool is_lazy() const { return lazy; }
    bool is_auto() const { return n_seconds >= 0; }

    int32_t get_n_seconds() const { return n_seconds; }

    // note that a request uses the component now
    void used();

    // return true if no request has used it for n_seconds
    bool is_unused() const;

    // do not load it for a while: loading failed, or its memory was needed for something else
    void defer();

    // return true if a request may load it now
    bool may_load() const;

private:
    using clock = std::chrono::steady_clock;

    bool    lazy      = false;
    int32_t n_seconds = -1;

    clock::time_point t_used;
    clock::time_point t_retry;
};

// A component of the server that is loaded and freed while the server runs: the projector and the draft.
struct server_component {
    std::string name;

    // call these three on the main loop, also after the end of the HTTP thread
    // load and unload throw server_refusal, and nothing has changed then
    std::function<bool()> is_loaded;
    std::function<json()> load;
    std::function<json()> unload; // returns null while the component is in use

    // call these two on an HTTP thread
    // call: run a function on the main loop
    // call_unused: the same for a function that returns null while the component is in use. wait until it is not in use
    std::function<json(std::function<json()>)>                  call;
    std::function<json(std::function<json()>, server_deadline)> call_unused;
};

// return the response to a load or an unload
// what: "taken" or "freed", the memory is more - less. both are empty if nothing had to be done
json server_component_done(const char * state, const char * what, const server_bytes & more, const server_bytes & less);

// answer POST {"action": "load" | "unload", "unload": NAME, "timeout_ms": N}
// other: the component that a load may free first (a swap)
json server_component_post(const server_component & component, const server_component & other, const json & body);
