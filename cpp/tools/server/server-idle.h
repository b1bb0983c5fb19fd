#pragma once

#include "server-contexts.h"
#include "server-memory-stats.h"
#include "server-saved-prompts.h"
#include "server-slot.h"

#include "common.h"

#include <cstdint>
#include <vector>

// Free the memory of slots that were not used for some time (--kv-idle-release).
//
// Cells on a device are saved to --cache-ram first. Cells in host memory are not: the copy would need the same memory again. Once
// no slot has been used for that time, the prompt cache is dropped as well, if the cells are in host memory.
class server_idle {
public:
    server_idle(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_saved_prompts & saved, server_memory_stats & stats);

    // main loop, each tick: free the memory that was unused for the set time
    void release();

private:
    void release(server_slot_view & slot);

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_saved_prompts  & saved;
    server_memory_stats   & stats;

    std::vector<int64_t> t_since; // by slot: when it was last seen in use, or empty

    int64_t t_busy = 0; // when a slot was last in use
};
