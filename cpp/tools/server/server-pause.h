#pragma once

#include "server-batch-view.h"
#include "server-projector.h"
#include "server-conversations.h"
#include "server-slot.h"
#include "server-task.h"

#include <cstddef>
#include <cstdint>
#include <memory>

// Pause requests: their cells move to RAM, as a part of --cache-ram, until the pool has a place again (server_pool::resume()).
class server_pause {
public:
    server_pause(server_slots & slots, server_batch_view & batch, server_conversations & conversations, const server_projector & projector);

    // pause the youngest running request, unless it is the only one. its entries of the batch from off on are dropped
    // return false if there is none, or RAM has no room for its cells
    bool pause_youngest(int32_t off);

    // release a projector that was loaded on demand. requests with a place, or before this one, may need its memory
    void leave_projector(server_slot_view & slot) const;

private:
    bool pause(server_slot_view & slot, int32_t off);

    // return the state of the slot, null if RAM has no room for it
    std::unique_ptr<server_prompt_cache_state> save(const server_slot_view & slot);

    server_slots           & slots;
    server_batch_view      & batch;
    server_conversations   & conversations;
    const server_projector & projector;
};
