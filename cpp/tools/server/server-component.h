#pragma once

#include "server-bytes.h"
#include "server-common.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

using server_deadline = std::chrono::steady_clock::time_point;

// Decides when a component (the projector or the draft) may be loaded, and when it is unused. There are three cases:
//   - always loaded: neither is_lazy() nor is_auto()
//   - is_lazy(): loaded by a request of a client (POST)
//   - is_auto(): loaded by the first request that needs it. It is freed when no request has used it for n_seconds. 0 means: it
//     stays loaded
// Not thread-safe.
class server_lazy {
public:
    server_lazy() = default;
    server_lazy(bool is_lazy, int32_t n_seconds);

    bool is_lazy() const { return lazy; }
    bool is_auto() const { return n_seconds >= 0; }

    int32_t get_n_seconds() const { return n_seconds; }

    // note that a request uses the component now
    void used();

    // return true if no request has used the component for n_seconds
    bool is_unused() const;

    // do not load the component for a while, because loading failed, or because its memory was needed for something else
    void defer();

    // return true if a request may load the component now
    bool may_load() const;

private:
    using clock = std::chrono::steady_clock;

    bool    lazy      = false;
    int32_t n_seconds = -1;

    clock::time_point t_used;
    clock::time_point t_retry;
};

// A component of the server that is loaded and freed while the server runs. There are two: the projector and the draft.
struct server_component {
    std::string name;

    // functions that run on the main loop. The HTTP thread that requested them may have ended by then, see server-main-loop.h
    // load and unload throw server_refusal if they fail. Nothing has changed then.
    std::function<bool()> is_loaded;
    std::function<json()> load;
    std::function<json()> unload; // returns null while the component is in use

    // functions that an HTTP thread calls. They run their argument on the main loop, and return the result of the argument
    // call:        runs the argument once
    // call_unused: runs the argument, if necessary several times, until the result is not null. A result of null means that the
    //              component is still in use
    std::function<json(std::function<json()>)>                  call;
    std::function<json(std::function<json()>, server_deadline)> call_unused;
};

// return the response to a request that loads or unloads a component
// what: "taken" after a load, or "freed" after an unload. Under this key, the response contains the difference `more` - `less`
// more: memory in use after a load, or before an unload
// less: memory in use before a load, or after an unload
// If nothing had to be loaded or unloaded, `more` and `less` are 0.
json server_component_done(const char * state, const char * what, const server_bytes & more, const server_bytes & less);

// answer POST {"action": "load" | "unload", "unload": NAME, "timeout_ms": N}
// other: the second component. If NAME is its name, it is freed before `component` is loaded (a swap)
json server_component_post(const server_component & component, const server_component & other, const json & body);
