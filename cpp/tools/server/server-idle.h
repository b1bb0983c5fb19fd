#pragma once

#include "server-contexts.h"
#include "server-memory-stats.h"
#include "server-conversations.h"
#include "server-slot.h"

#include "common.h"

#include <cstdint>
#include <vector>

// Free the memory of slots that were not used for some time (--kv-idle-release).
//
// The conversations are saved to --cache-ram first, and limited by it: with --cache-ram 0, all of the memory is freed.
class server_idle {
public:
    server_idle(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations, server_memory_stats & stats);

    // main loop, each tick: free the memory that was unused for the set time
    void release();

private:
    void release(server_slot_view & slot);

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_conversations  & conversations;
    server_memory_stats   & stats;

    std::vector<int64_t> t_since; // by slot: when it was last seen in use, or empty
};
