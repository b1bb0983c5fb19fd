#include "server-pool.h"

#include "server-draft-catch-up.h"
#include "server-memory.h"
#include "server-refusal.h"

#include "llama-kv.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

server_pool::server_pool(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        server_projector & projector, server_slot_cells & cells, server_pause & pause, const server_pool_capacity & capacity,
        server_oom & oom, server_share & share, server_memory_policy & policy, const server_replies & replies)
    : params(params), ctxs(ctxs), slots(slots), batch(batch), projector(projector), cells(cells), pause(pause), capacity(capacity),
      oom(oom), share(share), policy(policy), replies(replies) {}

// return true if the prompt of the slot has media after the first n tokens, which end at the border of a chunk
static bool has_media_after(const server_slot_view & slot, size_t n) {
    const auto & tokens = slot.task->tokens;

    return n < tokens.size() && (tokens[n] == LLAMA_TOKEN_NULL || tokens.find_next_media_chunk(n).first);
}

// return the number of tokens that a slot has, or will have when its prompt is processed
// For a slot that generates, count the tokens that it has now. They can be fewer than the tokens of the task's prompt, because
// a context shift may have dropped some of them.
static int32_t n_prompt(const server_slot_view & slot, const server_prompt & prompt, slot_state state) {
    return state == SLOT_STATE_GENERATING ? prompt.n_tokens() : std::max(slot.task->n_tokens(), prompt.n_tokens());
}

void server_pool::resume() {
    // memory may have been freed since the last batch
    policy.end_shortage();

    // free a component that was loaded on demand, if a request would otherwise be refused
    for (auto & slot : slots) {
        while (slot.state == SLOT_STATE_STARTED && capacity.is_too_small(slot.task->n_tokens()) && policy.drop_spare_component()) {
        }
    }

    for (auto * slot = next_waiting(); slot && slot->wait.paused; slot = next_waiting()) {
        const int32_t n_tokens = n_prompt(*slot, slot->wait.paused->prompt, slot->wait.state_paused);

        if (!find_place(*slot, n_tokens) && has_ahead(*slot)) {
            return;
        }
        // If resuming this request has failed, wait for some time before the next attempt. has_place() can return true although
        // resuming fails, because the storage grows in blocks.
        if (has_ahead(*slot) && slot->task->id == id_no_place && ggml_time_us() < t_no_place_us + T_RETRY_US && cells.idle_slots(slot).empty()) {
            return;
        }
        if (!resume(*slot)) {
            return;
        }
    }
}

bool server_pool::admit(int id_slot) {
    auto & slot = slots[id_slot];

    const int32_t n_tokens = slot.task->n_tokens();

    const bool has_media = has_media_after(slot, 0);
    if (has_media && !slot.mctx) {
        slot.mctx = projector.get_loaded(); // the slot has released its projector while it waited, see leave_projector()
    }
    const bool lacks_projector = has_media && !slot.mctx;

    const bool is_full = capacity.is_too_small(n_tokens);

    // do not refuse the request while a projector that was loaded on demand uses a part of the budget. resume() frees this
    // projector when no other request uses it
    if (is_full && (slot.mctx || !projector.is_loaded_on_demand())) {
        oom.refuse(slot);
        slot.release();

        return false;
    }

    const auto * first = next_waiting();

    const bool is_next = !first || first->task->id >= slot.task->id;

    // Without a unified cache, the slot has its own cells, so it need not wait. A prompt that is too long for a slot never fits,
    // so it is refused at once.
    const bool is_free = !params.kv_unified || n_tokens >= slot.n_ctx ||
        (is_next && !is_full && (!has_ahead(slot) || (!lacks_projector && find_place(slot, n_needed(slot)))));

    if (slot.wait.is_unplaced == is_free) {
        SLT_INF(slot, "%s, n_tokens = %d\n", is_free ? "has a place now" : "waits for cells", n_tokens);
    }
    const bool has_waited = std::exchange(slot.wait.is_unplaced, !is_free);

    if (!is_free) {
        pause.leave_projector(slot);
        share.give_back(slot);
    } else if (has_waited) {
        share.take_prefix(slot.id);
    }
    if (is_free && lacks_projector && !take_projector(slot, *slot.task)) {
        slot.release();

        return false;
    }

    return is_free;
}

bool server_pool::is_outside_batch(int id_slot) {
    const auto is_outside = [&](const server_slot_view & cur) {
        const bool is_begun = cur.state == SLOT_STATE_PROCESSING_PROMPT || (cur.state == SLOT_STATE_GENERATING && cur.i_batch == -1);

        return cur.state == SLOT_STATE_STARTED || cur.wait.paused || (is_begun && batch.count(cur.id, 0) == 0);
    };

    const auto & slot = slots[id_slot];

    return is_outside(slot) || (slot.state == SLOT_STATE_WAIT_OTHER && std::any_of(slots.begin(), slots.end(), [&](const auto & other) {
        return other.is_processing() && other.task->id == slot.task->id_parent && is_outside(other);
    }));
}

bool server_pool::take_projector(server_slot_view & slot, const server_task & task) const {
    slot.mctx = projector.get();
    try {
        slot.mctx.check();
    } catch (const server_refusal & e) {
        replies.error(task, e.what(), e.type);
        return false;
    } catch (const std::exception & e) {
        replies.error(task, e.what(), ERROR_TYPE_SERVER);
        return false;
    }
    return true;
}

size_t server_pool::read_file(int id_slot, const char * path, llama_tokens & tokens, bool & is_short) {
    auto & slot = slots[id_slot];

    size_t res = 0;

    policy.read_back(slot, [&]() {
        const auto before = llama_get_memory_usage(slot.ctx_tgt);

        size_t n_tokens = 0;
        res = llama_state_seq_load_file(slot.ctx_tgt, path, slot.id, tokens.data(), tokens.size(), &n_tokens);

        if (res != 0) {
            is_short = false;
            return true;
        }

        // free the cells: if the context has several caches, some of them may have read their part of the state
        llama_memory_seq_rm(llama_get_memory(slot.ctx_tgt), slot.id, -1, -1);

        const size_t n_cells = server_tokens::deserialize(tokens, (bool) projector).size();
        const bool   can_fit = 0 < n_cells && n_cells <= std::min<size_t>(slot.n_ctx, before.n_cells_max);
        const bool   is_full = before.n_cells_max - before.n_cells_used < n_cells;

        size_t n_idle = 0;
        for (const server_slot_view & other : cells.idle_slots(&slot)) {
            n_idle += llama_memory_seq_usage(slot.ctx_tgt, other.id).cells.n_cells;
        }
        // keep the cells of idle slots if freeing them would not make enough room
        const bool can_help = before.n_cells_max - before.n_cells_used + n_idle >= n_cells;

        is_short = can_fit && server_memory_is_short_for_state(slot.ctx_tgt, before);

        return !is_short && !(can_fit && is_full && can_help);
    });

    return res;
}

bool server_pool::is_ahead(const server_slot_view & other, const server_slot_view & slot) {
    return &other != &slot && (other.is_running() || (other.state == SLOT_STATE_STARTED && other.task->id < slot.task->id));
}

bool server_pool::has_ahead(const server_slot_view & slot) {
    return std::any_of(slots.begin(), slots.end(), [&](const server_slot_view & other) { return is_ahead(other, slot); });
}

server_slot_view * server_pool::next_waiting() {
    server_slot_view * res = nullptr;
    for (auto & slot : slots) {
        if (slot.wait && (!res || slot.task->id < res->task->id)) {
            res = &slot;
        }
    }
    return res;
}

int32_t server_pool::n_kept(const server_slot_view & slot) const {
    const bool is_shared = params.kv_share_prefix && slot.has_shared_cells();

    return is_shared ? std::min<int32_t>(slot.prompt.tokens.get_common_prefix(slot.task->tokens), slot.n_computed()) : slot.n_computed();
}

int32_t server_pool::n_needed(const server_slot_view & slot) const {
    return slot.is_running() ? n_prompt(slot, slot.prompt, slot.state) - slot.n_computed() : slot.task->n_tokens() - n_kept(slot);
}

bool server_pool::has_place(const server_slot_view & slot, int32_t n) {
    const int32_t n_max = capacity.n_cells_max();
    if (n_max == 0) {
        return true; // the model uses no cells
    }

    int64_t n_all = (int64_t) llama_get_memory_usage(ctxs.ctx_tgt).n_cells_used + n;
    for (const auto & other : slots) {
        if (is_ahead(other, slot)) {
            n_all += n_needed(other);
        }
    }

    const int32_t n_ahead = slot.n_remaining() < 0 ? n_max : slot.n_remaining();

    return n_all + std::min(n_ahead, n_max/16) <= n_max;
}

bool server_pool::find_place(const server_slot_view & slot, int32_t n) {
    int32_t n_free = 0; // maximum number of cells that the slots could free
    for (const auto & other : slots) {
        if (&other != &slot && !other.is_running() && !cells.is_kept(other, &slot)) {
            n_free += llama_memory_seq_usage(other.ctx_tgt, other.id).cells.n_cells;
        }
    }
    // Check n_free only without a budget. With a budget, clearing a slot frees other memory in addition to its cells, so the
    // number of cells that become free can be larger than n_free.
    if (params.kv_budget_mib == 0 && !has_place(slot, n - n_free)) {
        return false;
    }

    while (!has_place(slot, n)) {
        if (!policy.make_room_for_start(slot)) {
            return false;
        }
    }
    return true;
}

bool server_pool::resume(server_slot_view & slot) {
    if (has_media_after(slot, slot.wait.paused->prompt.n_tokens()) && !slot.mctx) {
        slot.mctx = projector.get_loaded();

        // do not load the projector now, because that would use memory of running requests
        if (!slot.mctx && params.kv_unified && has_ahead(slot)) {
            return false;
        }
        if (!slot.mctx && !take_projector(slot, *slot.task)) {
            slot.release();
            return true;
        }
    }

    const auto write = [&](llama_context * ctx, const std::vector<uint8_t> & data) {
        return !data.empty() && llama_state_seq_set_data(ctx, data.data(), data.size(), slot.id) == data.size();
    };

    const bool is_first = !has_ahead(slot);

    // Move the paused state out of the slot while its cells are restored. With `--cache-ram budget`, a state in the slot and
    // the restored cells would both count, and both might not fit into the budget.
    auto saved = std::move(slot.wait.paused);

    const bool ok = policy.read_back(slot, [&]() { return write(slot.ctx_tgt, saved->data.main); }, is_first);

    if (!ok) {
        slot.mem.seq_rm(slot.id, -1, -1);
    }
    if (!ok && !is_first) {
        slot.wait.paused = std::move(saved);
        pause.leave_projector(slot);
        id_no_place   = slot.task->id;
        t_no_place_us = ggml_time_us();
        return false; // wait until one of the running requests ends
    }

    slot.state  = slot.wait.state_paused;
    slot.prompt = std::move(saved->prompt);

    if (!ok) {
        oom.end_slot(slot, batch.size());
        slot.prompt_clear();
        return true;
    }

    SLT_INF(slot, "resumed, n_tokens = %d\n", slot.prompt.n_tokens());

    if (server_draft_catch_up::lacks_tokens(slot) || (slot.ctx_dft && !write(slot.ctx_dft, saved->data.drft))) {
        server_draft_catch_up::drop(slot);
    }
    if (slot.can_speculate() && slot.state == SLOT_STATE_GENERATING) {
        common_speculative_begin(slot.spec, slot.id, slot.prompt.tokens.get_text_tokens());
    }

    return true;
}
