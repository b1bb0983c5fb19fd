#pragma once

#include "server-contexts.h"
#include "server-conversations.h"
#include "server-slot.h"

#include "common.h"

#include <functional>
#include <vector>

// Frees the cells of slots that do not use them now: idle slots, and slots whose request has not started.
class server_slot_cells {
public:
    server_slot_cells(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations);

    // return the idle slots that have cells, the least recently used one first
    // except: a slot that is left out, or null
    std::vector<std::reference_wrapper<server_slot_view>> idle_slots(const server_slot_view * except = nullptr);

    // save the conversation of the least recently used idle slot, and free its cells. return false if no idle slot has cells
    bool clear_idle(const server_slot_view * except = nullptr);

    // do the same as clear_idle(), but only if other slots can use the cells: the cache is unified, or memory is short
    bool clear_idle_for_others();

    // save and free the cells of a slot that has not started, or that waits for its parent slot. These cells contain the prompt
    // of the slot's last request
    // with_kept: also clear a slot for which is_kept() is true, although this frees nothing
    // return false if there is no such slot
    bool clear_unstarted(const server_slot_view * except = nullptr, bool with_kept = true);

    // return true if clearing the slot would free nothing, because all of its cells are shared with a running slot or with `except`
    bool is_kept(const server_slot_view & slot, const server_slot_view * except);

private:
    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_conversations  & conversations;
};
