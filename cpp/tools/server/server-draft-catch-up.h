#pragma once

#include "server-contexts.h"
#include "server-slot.h"

#include "common.h"

#include <functional>

class server_queue;

// Keeps the cache of the draft up to date with the cache of the target.
//
// If there is no memory for the draft, the requests continue without a draft. When there is memory again, the draft processes the
// tokens that it lacks.
class server_draft_catch_up {
public:
    server_draft_catch_up(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_queue & queue_tasks);

    // free the draft's cells of a slot. The draft processes the prompt again later
    static void drop(server_slot_view & slot);

    // return true if the draft lacks tokens of the slot's prompt
    // If the cells were copied from another slot, it is not known which tokens the draft lacks. The result is true then.
    static bool lacks_tokens(const server_slot_view & slot);

    // return true if requests can continue although the draft has failed to process a batch that the target has processed
    // Some drafters keep states of the last batch and cannot skip a batch. For them, the result is false.
    bool can_skip(const common_batch & view);

    // let the draft process the tokens that it lacks. return false if the draft cannot be used yet
    bool catch_up(int id_slot);

    // create the checkpoint to which target and draft return if the target rejects the draft tokens of a slot
    // make: creates the checkpoint
    // If there is no memory for the checkpoint, discard the draft tokens and return false.
    bool make_checkpoint(int id_slot, const std::function<void()> & make) const;

    // restore the draft from the checkpoint of make_checkpoint(). If that fails, free the draft's cells of the slot
    void restore_draft(int id_slot) const;

private:
    // free the draft's cells of the slots of the batch that have lost cells in the draft, because a device failed
    // return false if no slot of the batch has lost cells
    bool drop_lost(const common_batch & view);

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_queue          & queue_tasks;
};
