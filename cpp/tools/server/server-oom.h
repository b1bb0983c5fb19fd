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
// Rejected: ending the slot with the most cells. The slot that lacks a cell is the slot whose next token cannot be computed.
// The cells of a slot that has ended are the first cells to be freed when another slot lacks a cell
// (server_slot_cells::clear_idle()).
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
    // The processed tokens of the prompt stay in the cells, so that a repeated request can continue after these tokens. Only a
    // prompt with media is cleared. The tokens of the slot in the batch from index off on are dropped.
    void end_slot(server_slot_view & slot, int32_t off);

    // drop the tokens of a slot that an exception has ended, because the slot may already process another request
    void drop_ended(int id_slot);

    // return true if cells of the slot contain the first tokens of a media chunk, and the memory cannot be cut to the state
    // before this chunk
    bool has_partial_chunk(const server_slot_view & slot) const;

    // drop the checkpoint at n_tokens, for which there was no memory. A later restore uses the checkpoint before it and computes
    // more tokens
    void drop_checkpoint(int id_slot, int64_t n_tokens) const;

    // restore the target from the checkpoint of before the draft tokens, because the target has rejected these tokens
    // return false if the restore failed. The slot has ended then.
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
