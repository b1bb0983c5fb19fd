#pragma once

#include "server-batch-view.h"
#include "server-contexts.h"
#include "server-pool-capacity.h"
#include "server-replies.h"
#include "server-slot.h"

#include "common.h"

#include <cstdint>

// Handles a batch for which there are no cells: drafts are dropped from it, or one slot ends. All other slots continue.
//
// Rejected: ending the slot with the most cells. The slot that lacks a cell is the one whose next token cannot be computed. The
// cells that it leaves are the first to be freed when the next slot lacks one (server_slot_cells::clear_idle()).
class server_oom {
public:
    server_oom(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        const server_pool_capacity & capacity, const server_replies & replies);

    // return true if a failed batch has not written to any cell
    bool is_not_begun(const common_batch & view) const;

    // return true if the tokens of the batch from index off on can be decoded in smaller batches
    bool can_split(int32_t off);

    // drop the draft tokens of the batch from index off on, so that each slot needs only one cell. return false if there are none
    bool drop_drafts(int32_t off);

    // end a slot that lacks a cell. The client receives the text so far, or an error
    // Its prompt stays in the cells as far as it was processed, so that the same request can continue there. Its tokens in the
    // batch from index off on are dropped.
    void end_slot(server_slot_view & slot, int32_t off);

    // drop the tokens of a slot that an exception has ended, because the slot may already process another request
    void drop_ended(int id_slot);

    // return true if the slot has cells of a part of its current media chunk, and its memory cannot be cut to the state before
    // the chunk
    bool has_partial_chunk(const server_slot_view & slot) const;

    // drop the checkpoint at n_tokens, for which there was no memory. A later restore uses the checkpoint before it and computes
    // more tokens
    void drop_checkpoint(int id_slot, int64_t n_tokens) const;

    // restore the target from the checkpoint that was made before a draft which was rejected. return false if the slot had to end
    bool restore_target(int id_slot);

    // send the error for a prompt that can never fit into --kv-budget
    void refuse(const server_slot_view & slot) const;

private:
    // return true if a prompt does not fit although no other request uses the pool
    bool is_hopeless(const server_slot_view & slot);

    void send_error(const server_slot_view & slot);

    const common_params        & params;
    const server_contexts      & ctxs;
    server_slots               & slots;
    server_batch_view          & batch;
    const server_pool_capacity & capacity;
    const server_replies       & replies;
};
