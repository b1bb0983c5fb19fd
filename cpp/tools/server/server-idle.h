#pragma once

#include "server-contexts.h"
#include "server-memory-stats.h"
#include "server-conversations.h"
#include "server-slot.h"

#include "common.h"

#include <cstdint>
#include <vector>

// Frees the memory of slots that were not used for some time (--kv-idle-release).
//
// Before that, the conversations of these slots are saved in RAM, as far as --cache-ram allows. With --cache-ram 0, nothing is
// saved, and all of the memory is freed.
class server_idle {
public:
    server_idle(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations, server_memory_stats & stats);

    // free the memory of slots that were not used for the seconds of --kv-idle-release. The main loop calls this at each tick
    void release();

private:
    void release(server_slot_view & slot);

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_conversations  & conversations;
    server_memory_stats   & stats;

    std::vector<int64_t> t_since; // by slot: time at which the slot was last seen in use, or empty
};
