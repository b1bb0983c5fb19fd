#pragma once

#include "server-batch-view.h"
#include "server-contexts.h"
#include "server-pool-capacity.h"
#include "server-replies.h"
#include "server-slot.h"

#include "common.h"

#include <cstdint>

// The consequences of a batch that finds no cells: drafts are dropped from it, or one slot ends. All other slots continue.
//
// Rejected: ending the slot with the most cells. The slot that lacks a cell is the one whose next token cannot be computed.
// The cells that it leaves are the first to be freed when the next slot lacks one (server_slot_cells::clear_idle()).
class server_oom {
public:
    server_oom(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        const server_pool_capacity & capacity, const server_replies & replies);

    // return true if a failed batch has left nothing in the cells
    bool is_not_begun(const common_batch & view) const;

    // return true if the entries of the batch from off on can be decoded in smaller batches
    bool can_split(int32_t off);

    // drop the drafts of the batch from off on: then each slot needs one cell. return false if there are none
    bool drop_drafts(int32_t off);

    // end a slot that lacks a cell, with its text so far or an error. its prompt stays as far as it was processed, so that
    // the same request continues there. drop its entries of the batch from off on
    void end_slot(server_slot_view & slot, int32_t off);

    // drop the batch entries of a slot that an exception has ended: another request may have that slot by now
    void drop_ended(int id_slot);

    // return true if the slot has cells of a part of its current chunk, and its memory cannot be cut to the state before it
    bool has_partial_chunk(const server_slot_view & slot) const;

    // drop the checkpoint at n_tokens, which found no memory. more tokens are computed again from the one before
    void drop_checkpoint(int id_slot, int64_t n_tokens) const;

    // restore the target from the checkpoint before a rejected draft. return false if the slot had to end
    bool restore_target(int id_slot);

    // send the error for a prompt that is too long for --kv-budget
    void refuse(const server_slot_view & slot) const;

private:
    // return true if a prompt found no cells although the pool is empty apart from it
    bool is_hopeless(const server_slot_view & slot);

    void send_error(const server_slot_view & slot);

    const common_params        & params;
    const server_contexts      & ctxs;
    server_slots               & slots;
    server_batch_view          & batch;
    const server_pool_capacity & capacity;
    const server_replies       & replies;
};
