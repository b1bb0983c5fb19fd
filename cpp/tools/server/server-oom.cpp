#include "server-oom.h"

#include "server-memory.h"

#include "llama.h"

#include <algorithm>

server_oom::server_oom(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        const server_pool_capacity & capacity, const server_replies & replies)
    : params(params), ctxs(ctxs), slots(slots), batch(batch), capacity(capacity), replies(replies) {}

bool server_oom::is_not_begun(const common_batch & view) const {
    auto * mem = llama_get_memory(ctxs.ctx_tgt);

    // If the memory keeps snapshots of a recurrent state, return false. To undo the batch, the memory would restore a snapshot,
    // although a batch that has not begun has written no snapshot.
    return mem && llama_n_rs_seq(ctxs.ctx_tgt) == 0 && std::all_of(view.tokens.begin(), view.tokens.end(), [&](const auto & token) {
        return llama_memory_seq_pos_max(mem, token.seq_id) < token.pos[0];
    });
}

bool server_oom::can_split(int32_t off) {
    const int32_t n = batch.rendered().size();
    if (n <= 1) {
        return false;
    }

    // A task with pooling needs all tokens of its prompt in one batch.
    for (int32_t i = off; i < off + n; ++i) {
        if (!slots[batch.id_slot(i)].can_split()) {
            return false;
        }
    }

    return true;
}

bool server_oom::drop_drafts(int32_t off) {
    bool res = false;

    for (auto & slot : slots) {
        if (slot.spec_i_batch.empty() || slot.spec_i_batch[0] < off) {
            continue;
        }

        slot.i_batch = slot.spec_i_batch[0];
        batch.drop(slot.id, slot.i_batch + 1);

        slot.prompt.tokens.keep_first(slot.prompt.n_tokens() - slot.spec_draft.size());
        if (!slot.spec_is_replay) {
            slot.stats.n_draft_tokens -= slot.spec_draft.size(); // the target has not verified these tokens
        }
        slot.spec_i_batch.clear();
        slot.spec_draft  .clear();
        slot.spec_draft_q.clear();
        slot.spec_is_replay = false;

        res = true;
    }

    return res;
}

void server_oom::end_slot(server_slot_view & slot, int32_t off) {
    SLT_WRN(slot, "no memory for the next cell, n_tokens = %d, n_gen = %d\n", slot.prompt.n_tokens(), (int) slot.stats.n_gen);

    batch.drop(slot.id, off);

    // Also end the child slots of this request (the slots of its other completions, n_cmpl), if no token was generated. Each
    // child waits for the prompt, or has a copy of the first tokens of the prompt. No slot will process the other tokens of the
    // prompt.
    for (auto & other : slots) {
        if (slot.stats.n_gen == 0 && other.is_processing() && other.task->id_parent == slot.task->id) {
            send_error(other);
            batch.drop(other.id, off);
            other.release();
        }
    }

    const bool has_media = slot.prompt.tokens.has_media();
    if (!has_media) {
        const llama_pos pos_next = llama_memory_seq_pos_max(llama_get_memory(slot.ctx_tgt), slot.id) + 1;

        slot.prompt.tokens.keep_first(std::min<size_t>(slot.prompt.n_tokens(), pos_next));
    }

    if (slot.stats.n_gen > 0) {
        replies.truncated(slot);
    } else {
        send_error(slot);
    }
    slot.release();

    if (has_media) {
        slot.prompt_clear(); // the last cells may contain only a part of an image
    }
}

void server_oom::drop_ended(int id_slot) {
    auto & slot = slots[id_slot];

    const int32_t n      = batch.drop(slot.id, 0);
    const int32_t n_left = slot.prompt.n_tokens() - n;

    if (n > 0 && (n_left <= 0 || slot.prompt.tokens.has_media())) {
        slot.prompt_clear(); // the last cells may contain only a part of an image
    } else if (n > 0) {
        slot.prompt.tokens.keep_first(n_left);

        // remove the cells of the dropped tokens, because some of these tokens may have been computed already
        const auto seq_rm = [&](llama_context * ctx) {
            return !ctx || llama_memory_seq_rm(llama_get_memory(ctx), slot.id, slot.prompt.tokens.pos_next(), -1);
        };
        if (!seq_rm(slot.ctx_tgt) || !seq_rm(slot.ctx_dft)) {
            slot.prompt_clear();
        }
    }

    batch.keep_slot_batched(slots);
}

bool server_oom::has_partial_chunk(const server_slot_view & slot) const {
    const bool has_part = llama_memory_seq_pos_max(llama_get_memory(slot.ctx_tgt), slot.id) >= slot.prompt.tokens.pos_next();

    return has_part && !ctxs.can_cut_anywhere();
}

void server_oom::drop_checkpoint(int id_slot, int64_t n_tokens) const {
    auto & slot = slots[id_slot];

    SLT_WRN(slot, "no memory for a context checkpoint, n_tokens = %d\n", (int) n_tokens);

    auto & checkpoints = slot.prompt.checkpoints;
    if (!checkpoints.empty() && checkpoints.back().n_tokens == n_tokens) {
        checkpoints.pop_back();
    }
}

bool server_oom::restore_target(int id_slot) {
    auto & slot = slots[id_slot];

    // the checkpoint is empty if a copy of the sequence was pending when the checkpoint was made
    if (!slot.spec_ckpt.data_tgt.empty() && slot.spec_ckpt.load_tgt(slot.ctx_tgt, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        return true;
    }

    end_slot(slot, batch.size());
    slot.prompt_clear(); // the number of tokens in the cells is unknown now

    return false;
}

void server_oom::refuse(const server_slot_view & slot) const {
    const int32_t n_block  = server_pool_capacity::N_BLOCK;
    const int32_t n_tokens = slot.task->n_tokens();
    const int32_t n_max    = capacity.n_cells_max();

    // report that the budget holds at least N_BLOCK/2 tokens, because a cache starts with that many cells
    const int32_t n_held = n_tokens > n_max ? n_max : std::min(n_tokens - 1, std::max(n_block/2, n_max - n_block));

    replies.error(slot, string_format("request (%d tokens) exceeds what --kv-budget %d holds (%d tokens), try increasing it",
            n_tokens, params.kv_budget_mib, n_held), ERROR_TYPE_EXCEED_CONTEXT_SIZE);
}

bool server_oom::is_hopeless(const server_slot_view & slot) {
    const bool is_alone = std::all_of(slots.begin(), slots.end(), [&](const server_slot_view & other) {
        return &other == &slot || other.prompt.n_tokens() == 0;
    });

    return is_alone && capacity.is_too_small(slot.task->n_tokens() + server_pool_capacity::N_BLOCK, capacity.n_cells_max());
}

void server_oom::send_error(const server_slot_view & slot) {
    if (is_hopeless(slot)) {
        refuse(slot);
    } else {
        replies.error(slot, server_memory_error(slot.ctx_tgt), ERROR_TYPE_OUT_OF_MEMORY);
    }
}
