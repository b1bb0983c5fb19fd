#pragma once

#include "server-contexts.h"
#include "server-draft.h"
#include "server-memory-policy.h"
#include "server-memory-stats.h"
#include "server-projector.h"

#include "common.h"
#include "llama-kv.h"

#include <cstddef>
#include <functional>

// The bytes of the projector and the draft model, which count in --kv-budget while they are loaded. Before one of them is loaded,
// server_memory_policy makes room for it. A draft on demand gets only room that is free.
class server_budget {
public:
    server_budget(
        const common_params & params, const server_contexts & ctxs, server_memory_policy & policy,
        server_draft & draft, server_projector & projector, server_memory_stats & stats);

    // load_model(), at its end: count the loaded weights. return false if they leave no room for the caches
    bool init();

private:
    // count the cells that a context starts with. return false if the budget is exceeded
    // may_clear, may_shrink: see server_memory_policy::make_room_for_component()
    bool fits(bool may_clear, bool may_shrink);

    // return true if more bytes are in use than the budget has
    bool is_exceeded() const;

    // change the bytes of a component. throw server_refusal if they do not fit
    // n_bytes: its member below. make_room: frees memory with the function that it gets, and returns false if that fails
    using fits_t = std::function<bool(llama_context * ctx)>;
    void set(const char * what, size_t & n_bytes, size_t n_bytes_new, const std::function<bool(const fits_t &)> & make_room);

    llama_memory_budget * budget() const { return params.kv_budget.get(); }

    const common_params   & params;
    const server_contexts & ctxs;
    server_memory_policy  & policy;
    server_draft          & draft;
    server_projector      & projector;
    server_memory_stats   & stats;

    size_t n_bytes_projector = 0;
    size_t n_bytes_draft     = 0;
};
