#pragma once

#include "server-batch-view.h"
#include "server-budget-hold.h"
#include "server-contexts.h"
#include "server-conversations.h"
#include "server-draft.h"
#include "server-oom.h"
#include "server-pause.h"
#include "server-projector.h"
#include "server-slot.h"
#include "server-slot-cells.h"

#include "common.h"

#include <cstdint>
#include <functional>

// Decide which owner frees memory, and in which order. No other class calls the owners to free memory for someone else.
//
// The order is the table "When the pool is full" in docs/reference/server.md. The owners, with the rows of the table:
//
//  server_oom                     | 2: drafts of the batch, 9: the slot that lacks a cell
//  server_conversations           | 3: conversations in RAM
//  server_draft, server_projector | 4: components that were loaded on demand
//  server_slot_cells              | 5: cells of idle slots, 7: cells of slots whose request has not started
//  llama_memory_budget            | 6: precision, as the cells change to smaller types (hold_types())
//  server_pause                   | 8: cells of the youngest request
//
// A batch that finds no place uses all of these rows, the other requests for memory use some of them.
class server_memory_policy {
public:
    server_memory_policy(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        server_conversations & conversations, server_slot_cells & cells, server_pause & pause, server_oom & oom,
        server_draft & draft, server_projector & projector);

    // call before a batch is decoded: let it fail before its cells change to smaller types, if something else can be freed
    server_budget_hold hold_types();

    // the batch, rendered from off on, found no place. return false if a smaller batch may find one: upstream tries that
    bool make_room_for_batch(int32_t & n_batch, int32_t off);

    // the current chunk of the slot found no place. it is decoded while the batch is made, and tries again with a later
    // batch, unless the slot has to end
    void make_room_for_chunk(int id_slot);

    // free cells for a request that waits for its place. return false if there is nothing left to free
    bool make_room_for_start(const server_slot_view & slot);

    // free cells for a slot that needs its own copies of shared cells. return false if there is nothing left to free
    bool make_room_for_copies(const server_slot_view & slot);

    // restore the cells of a slot: try read() until it succeeds, and free memory before cells change to smaller types
    // read: returns false if there was no place, and the slot has no cells then
    // with_unstarted: also free the cells of slots whose request has not started
    bool read_back(server_slot_view & slot, const std::function<bool()> & read, bool with_unstarted = false);

    // make room in the budget for the projector or the draft. return false if they do not fit
    // fits: try to reserve the bytes. ctx: its cells may change to smaller types for that, null: no cells may
    // may_clear: slots may lose their cells, may_shrink: cells may change to smaller types
    bool make_room_for_component(const std::function<bool(llama_context * ctx)> & fits, bool may_clear, bool may_shrink);

    // free cells of idle slots for others. return false if there are none
    bool clear_idle();

    // forget that RAM was short, as memory may have been freed since. call before a batch is made
    void end_shortage();

    // return true if a component was loaded on demand and could be freed
    bool has_spare_component() const;

    // free a component that was loaded on demand. return false if there is none
    bool drop_spare_component();

    // free a draft that was loaded on demand, for a projector. return false if there is none
    bool drop_spare_draft();

private:
    // free memory that is worth less than any cells, after n cells found no place. return false if there is none
    bool drop_less_than_cells(int32_t n);

    // free cells for the next cell of the slot, or end the slot
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

    bool is_held_for_spare = false; // the types of the last batch were held because a component could be freed
};
