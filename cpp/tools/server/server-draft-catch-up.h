#pragma once

#include "server-contexts.h"
#include "server-slot.h"

#include "common.h"

#include <functional>

class server_queue;

// Keep the draft's cache in step with the target's. If there is no memory for the draft, the requests continue without it, and
// it processes the tokens that it lacks as soon as there is memory.
class server_draft_catch_up {
public:
    server_draft_catch_up(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_queue & queue_tasks);

    // free the draft's cells of the slot. the draft processes the prompt again when it can
    static void drop(server_slot_view & slot);

    // return true if the draft lacks tokens of the prompt. for cells that were copied from another slot, the draft cannot know
    static bool lacks_tokens(const server_slot_view & slot);

    // the draft has not processed a batch that the target has. return true if the requests can continue without it
    // note: other drafters keep states of the last batch, and cannot miss one
    bool can_skip(const common_batch & view);

    // let the draft process the tokens that it lacks. return false if it cannot draft yet
    bool catch_up(int id_slot);

    // make the checkpoint for the return from a rejected draft. without memory for it, discard the draft and return false
    bool make_checkpoint(int id_slot, const std::function<void()> & make) const;

    // restore the draft from that checkpoint, or drop its cells
    void restore_draft(int id_slot) const;

private:
    // drop the draft's cells of slots in the batch that have lost them, because a device failed. return false if there are none
    bool drop_lost(const common_batch & view);

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_queue          & queue_tasks;
};
