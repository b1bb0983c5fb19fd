#pragma once

#include "server-contexts.h"
#include "server-conversations.h"
#include "server-slot.h"

#include "common.h"

#include <functional>
#include <vector>

// The cells of slots that do not use them at the moment: idle slots, and slots whose request has not started.
class server_slot_cells {
public:
    server_slot_cells(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations);

    // return the idle slots that have cells, the least recently used first. except: may be null
    std::vector<std::reference_wrapper<server_slot_view>> idle_slots(const server_slot_view * except = nullptr);

    // save and free the cells of the least recently used idle slot. return false if there is none
    bool clear_idle(const server_slot_view * except = nullptr);

    // the same, but only if other slots can use its cells: the cache is unified, or memory is short
    bool clear_idle_for_others();

    // save and free the cells of a slot that has not started, or waits for its parent: they are of its last request
    // with_kept: also if that frees nothing, because other slots need all of them. return false if there is no such slot
    bool clear_unstarted(const server_slot_view * except = nullptr, bool with_kept = true);

    // return true if clearing the slot frees nothing: its cells are all shared with a running slot, or with `except`
    bool is_kept(const server_slot_view & slot, const server_slot_view * except);

private:
    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_conversations  & conversations;
};
