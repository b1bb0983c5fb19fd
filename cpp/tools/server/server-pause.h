#pragma once

#include "server-batch-view.h"
#include "server-projector.h"
#include "server-conversations.h"
#include "server-slot.h"
#include "server-task.h"

#include <cstddef>
#include <cstdint>
#include <memory>

// Pauses requests. The cells of a paused request move to RAM, where --cache-ram limits them, until there is room in the pool
// again (server_pool::resume()).
class server_pause {
public:
    server_pause(server_slots & slots, server_batch_view & batch, server_conversations & conversations, const server_projector & projector);

    // pause the youngest running request, unless it is the only one. Drop its tokens in the batch from index off on
    // return false if no request was paused, because there is none or because its cells do not fit into RAM
    bool pause_youngest(int32_t off);

    // release the projector of a slot if it was loaded on demand, because other requests may need its memory
    void leave_projector(server_slot_view & slot) const;

private:
    bool pause(server_slot_view & slot, int32_t off);

    // return the state of the slot. The result is null if RAM has no room for it
    std::unique_ptr<server_prompt_cache_state> save(const server_slot_view & slot);

    server_slots           & slots;
    server_batch_view      & batch;
    server_conversations   & conversations;
    const server_projector & projector;
};
