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

// Counts the bytes of the projector and the draft model in --kv-budget while they are loaded.
//
// Before the projector or the draft is loaded, server_memory_policy makes room in the budget. For a draft that is loaded on
// demand, nothing is freed: it must fit into the free part.
class server_budget {
public:
    server_budget(
        const common_params & params, const server_contexts & ctxs, server_memory_policy & policy,
        server_draft & draft, server_projector & projector, server_memory_stats & stats);

    // count the weights that load_model() has loaded. load_model() calls this at its end. return false if the weights leave no
    // room for the caches
    bool init();

private:
    // count the cells that a context starts with. return false if the budget is exceeded
    // may_clear, may_shrink: see server_memory_policy::make_room_for_component()
    bool fits(bool may_clear, bool may_shrink);

    // return true if more bytes are in use than the budget allows
    bool is_exceeded() const;

    // change the number of bytes that a component uses. throw server_refusal if they do not fit into the budget
    // what:      name of the component, for the message
    // n_bytes:   n_bytes_projector or n_bytes_draft
    // make_room: calls the function of type fits_t until it succeeds, and frees memory between the calls. returns false if
    // nothing more can be freed
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
