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
// Before the projector or the draft is loaded, server_memory_policy makes room in the budget. The exception is a draft that is
// loaded on demand for a request: nothing is freed, and the draft must fit into the unused part of the budget.
class server_budget {
public:
    server_budget(
        const common_params & params, const server_contexts & ctxs, server_memory_policy & policy,
        server_draft & draft, server_projector & projector, server_memory_stats & stats);

    // count the weights that load_model() has loaded. load_model() calls this at its end. return false if the weights leave no
    // room for the caches
    bool init();

private:
    // count the bytes of the projector and the draft in the budget, and make room for them
    // The budget also counts the cells that each context starts with. return false if the budget is still exceeded
    // may_clear, may_shrink: see server_memory_policy::make_room_for_component()
    bool fits(bool may_clear, bool may_shrink);

    // return true if more bytes are in use than the budget allows
    bool is_exceeded() const;

    // change the number of bytes that a component (the projector or the draft) uses
    // The function throws server_refusal if the new number of bytes does not fit into the budget.
    // what:      name of the component, for the error message
    // n_bytes:   n_bytes_projector or n_bytes_draft
    // make_room: function that calls its argument (fits_t) until the argument returns true, and frees memory between the calls.
    //            make_room returns false if nothing more can be freed
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
