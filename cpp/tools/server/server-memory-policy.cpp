#include "server-memory-policy.h"

#include "server-memory.h"

#include "llama.h"

#include <algorithm>

server_memory_policy::server_memory_policy(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        server_conversations & conversations, server_slot_cells & cells, server_pause & pause, server_oom & oom,
        server_draft & draft, server_projector & projector, server_memory_stats & stats)
    : params(params), ctxs(ctxs), slots(slots), batch(batch), conversations(conversations), cells(cells), pause(pause), oom(oom), draft(draft), projector(projector), stats(stats) {}

server_budget_hold server_memory_policy::hold_types() {
    // The slots have just freed the cells that their requests do not use. Before that, a conversation that was copied from such
    // cells counted twice: as cells, and as an entry in RAM. So drop conversations only now, if their bytes exceed the limit.
    // Then update the numbers, because readers get the numbers of the last update during the whole batch.
    if (params.cache_ram_budget && conversations.trim()) {
        stats.update(ctxs.ctx_tgt, ctxs.ctx_dft);
    }

    const bool has_idle = !cells.idle_slots().empty();

    // Without a unified cache, other slots cannot use the cells of an idle slot. But if memory is short, they can use its memory.
    const bool is_shared = params.kv_unified || server_memory_is_short(ctxs.ctx_tgt);

    is_held_for_spare = has_spare_component();

    return { params.kv_budget.get(), (has_idle && is_shared) || is_held_for_spare };
}

// The numbers in the comments are the rows of the table "When the pool is full" in docs/reference/server.md. Row 1 is
// server_pool::admit().
bool server_memory_policy::make_room_for_batch(int32_t & n_batch, int32_t off) {
    if (oom.drop_drafts(off)) { // 2. drafts in the batch
        return true;
    }
    if (drop_less_than_cells(batch.rendered().size())) { // 3. and 4.
        return true;
    }
    if (oom.can_split(off)) {
        return false; // upstream's code tries a smaller batch
    }
    if (is_held_for_spare && !has_spare_component()) {
        return true; // a request uses the component of row 4 again. retry the batch without a hold, so that row 6 precedes row 5
    }

    // 5. to 9.
    free_cells(slots[batch.id_slot(off)], off);
    n_batch = llama_n_batch(ctxs.ctx_tgt);

    return true;
}

void server_memory_policy::make_room_for_chunk(int id_slot) {
    auto & slot = slots[id_slot];

    oom.drop_drafts(0); // with a draft in the batch, a slot cannot be paused, and the draft cannot be unloaded

    if (oom.has_partial_chunk(slot)) {
        oom.end_slot(slot, 0);
    } else if (!drop_less_than_cells(std::min<int32_t>(llama_n_batch(slot.ctx_tgt), mtmd_input_chunk_get_n_tokens(slot.task->tokens.find_chunk(slot.prompt.n_tokens()).get())))) {
        free_cells(slot, 0);
    }

    batch.keep_slot_batched(slots);
}

bool server_memory_policy::drop_less_than_cells(int32_t n) {
    return
        conversations.drop_if_short(n) ||                                        // 3. the oldest conversation in RAM
        (server_memory_is_short(ctxs.ctx_tgt, n) && drop_spare_component()); // 4. the draft, then the projector
}

void server_memory_policy::free_cells(server_slot_view & slot, int32_t off) {
    const bool is_freed =
        cells.clear_idle_for_others() || // 5. idle slots
                                         // 6. smaller types: no call is needed. hold_types() prevents a change of types only while
                                         //    step 4 or 5 can free something. After that, the next batch changes the types
        cells.clear_unstarted()       || // 7. slots whose request has not started
        pause.pause_youngest(off);       // 8. the youngest request

    if (!is_freed) {
        oom.end_slot(slot, off); // 9. the slot that lacks a cell
    }

    conversations.end_shortage();
}

bool server_memory_policy::make_room_for_start(const server_slot_view & slot) {
    return cells.clear_idle_for_others() || cells.clear_unstarted(&slot, false);
}

bool server_memory_policy::make_room_for_copies(const server_slot_view & slot) {
    return cells.clear_idle(&slot) || cells.clear_unstarted(&slot);
}

bool server_memory_policy::read_back(server_slot_view & slot, const std::function<bool()> & read, bool with_unstarted) {
    while (has_spare_component() || !cells.idle_slots(&slot).empty()) {
        {
            const server_budget_hold hold(params.kv_budget.get(), true);
            if (read()) {
                return true;
            }
        }
        const bool is_dropped = server_memory_is_short(ctxs.ctx_tgt) && drop_spare_component();
        if (!is_dropped && !cells.clear_idle(&slot)) {
            break;
        }
    }

    bool res = read();
    while (!res && with_unstarted && cells.clear_unstarted(&slot)) {
        res = read();
    }

    return res;
}

bool server_memory_policy::make_room_for_component(
        const std::function<bool(llama_context * ctx)> & fits, bool may_clear, bool may_shrink) {
    bool res = fits(nullptr);
    while (!res && may_clear && (cells.clear_idle() || cells.clear_unstarted())) {
        res = fits(nullptr);
    }

    return res || (may_shrink && (fits(ctxs.ctx_tgt) || (ctxs.ctx_dft && fits(ctxs.ctx_dft))));
}

bool server_memory_policy::clear_idle() {
    return cells.clear_idle_for_others();
}

void server_memory_policy::end_shortage() {
    conversations.end_shortage();
    if (!params.cache_ram_budget) {
        conversations.trim();
    }
}

bool server_memory_policy::has_spare_component() const {
    return draft.is_loaded_on_demand() || projector.is_spare();
}

bool server_memory_policy::drop_spare_component() {
    return draft.free_on_demand() || projector.free_spare();
}

bool server_memory_policy::drop_spare_draft() {
    return draft.free_on_demand();
}
