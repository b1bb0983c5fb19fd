#pragma once

#include "server-batch-view.h"
#include "server-budget-hold.h"
#include "server-contexts.h"
#include "server-conversations.h"
#include "server-draft.h"
#include "server-memory-stats.h"
#include "server-oom.h"
#include "server-pause.h"
#include "server-projector.h"
#include "server-slot.h"
#include "server-slot-cells.h"

#include "common.h"

#include <cstdint>
#include <functional>

// Decides which owner of memory frees it, and in which order. If a class needs memory that another class owns, it calls this
// class, and only this class calls the owner.
//
// The order is the order of the table "When the pool is full" in docs/reference/server.md. The owners, and the rows of the
// table that they implement:
//
//  server_oom                     | 2: drops drafts of the batch, 9: ends the slot that lacks a cell
//  server_conversations           | 3: drops conversations in RAM
//  server_draft, server_projector | 4: frees a component that was loaded on demand
//  server_slot_cells              | 5: frees cells of idle slots, 7: frees cells of slots whose request has not started
//  llama_memory_budget            | 6: changes cells to smaller types, which costs precision (hold_types())
//  server_pause                   | 8: frees the cells of the youngest request
//
// If a batch lacks cells, all rows are used in this order. Other callers that need memory use only some of the rows.
class server_memory_policy {
public:
    server_memory_policy(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        server_conversations & conversations, server_slot_cells & cells, server_pause & pause, server_oom & oom,
        server_draft & draft, server_projector & projector, server_memory_stats & stats);

    // let the next batch fail instead of changing cells to smaller types, if something else can be freed first
    // Call this before a batch is decoded. The effect ends when the result is destroyed.
    server_budget_hold hold_types();

    // free memory after a batch has failed for lack of cells
    // n_batch: size of the next attempt
    // off:     index of the first token that was not decoded
    // return false if a smaller batch may succeed. After that, upstream's code tries a smaller batch
    bool make_room_for_batch(int32_t & n_batch, int32_t off);

    // free memory after the current media chunk (image or audio) of a slot has failed for lack of cells
    // The chunk is decoded while the batch is made. Unless the slot ends, a later batch tries the chunk again.
    void make_room_for_chunk(int id_slot);

    // free cells for a request that waits to start. return false if nothing more can be freed
    bool make_room_for_start(const server_slot_view & slot);

    // free cells for a slot that needs its own copies of shared cells. return false if nothing more can be freed
    bool make_room_for_copies(const server_slot_view & slot);

    // call read() until it has restored the cells of a slot, and free memory between the calls
    // Cells of other slots change to smaller types only after everything else was freed.
    // read:           returns false if there were too few free cells for the state. After that, the slot has no cells
    // with_unstarted: also free the cells of slots whose request has not started
    bool read_back(server_slot_view & slot, const std::function<bool()> & read, bool with_unstarted = false);

    // make room in the budget for the projector or the draft. return false if they do not fit
    // fits:       reserves the bytes of projector and draft in the budget, and returns true if they fit. Its parameter ctx is
    //             the context whose cells may change to smaller types. null means: no cells may change
    // may_clear:  the cells of idle and unstarted slots may be freed
    // may_shrink: cells may change to smaller types
    bool make_room_for_component(const std::function<bool(llama_context * ctx)> & fits, bool may_clear, bool may_shrink);

    // free the cells of an idle slot that other slots can use. return false if there are none
    bool clear_idle();

    // forget that RAM was short, because memory may have been freed since then. Call this before a batch is made
    void end_shortage();

    // return true if a component was loaded on demand and can be freed
    bool has_spare_component() const;

    // free a component that was loaded on demand. return false if there is none
    bool drop_spare_component();

    // free a draft that was loaded on demand, to make room for a projector. return false if there is none
    bool drop_spare_draft();

private:
    // free a conversation in RAM, the draft or the projector, after a batch or chunk has failed for lack of n cells
    // return false if there is none
    bool drop_less_than_cells(int32_t n);

    // free cells so that the slot can compute its next token. If nothing can be freed, end the slot
    // off: index of the first token of the batch that was not decoded
    void free_cells(server_slot_view & slot, int32_t off);

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    server_batch_view     & batch;
    server_conversations  & conversations;
    server_slot_cells     & cells;
    server_pause          & pause;
    server_oom            & oom;
    server_draft          & draft;
    server_projector      & projector;
    server_memory_stats   & stats;

    bool is_held_for_spare = false; // hold_types() kept the types of the last batch, because a component could be freed
};
