#pragma once

// What the server does when a batch finds no cells: one slot ends, or does without its draft, and all others go on.
//
// A part of server_context_impl (impl_t), which only server-context.cpp knows; included there once the slots are defined.
// Rejected: ending whoever has most. The slot that lacks a cell is the one whose next token cannot be computed, and what it
// leaves behind is given up first when the next one lacks one (try_clear_idle_slots()).

#include "server-memory.h"

#include "common.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <new>

// leave out what a slot has in the batch from the off-th entry on, the indices of all others stay
// returns the number of entries
static int32_t server_batch_drop(server_batch & batch, int32_t id_slot, int32_t off) {
    int32_t n = 0;
    for (int32_t i = off; i < batch.size(); i++) {
        if (batch.tokens[i].id_slot == id_slot) {
            batch.tokens[i].id_slot = -1;
            n++;
        }
    }
    return n;
}

// number of entries from the off-th on, at most n_max, up to one that was dropped
static int32_t server_batch_n_kept(const server_batch & batch, int32_t off, int32_t n_max) {
    int32_t n = 0;
    while (n < n_max && off + n < batch.size() && batch.tokens[off + n].id_slot != -1) {
        n++;
    }
    return n;
}

// as long as it lives, a batch fails where the cells would take smaller types
class server_budget_hold {
public:
    server_budget_hold(llama_memory_budget * budget, bool hold) : budget(hold ? budget : nullptr) { set(true); }
    ~server_budget_hold() { set(false); }

    server_budget_hold(const server_budget_hold &) = delete;

private:
    void set(bool hold) {
        if (budget) {
            llama_memory_budget_hold(budget, hold);
        }
    }

    llama_memory_budget * budget;
};

template <typename impl_t>
class server_oom {
protected:
    // idle slots give up their cells before others lose precision, and what came on demand its memory
    server_budget_hold hold_budget() {
        const bool has_idle = !self().pool_idle_slots().empty();

        // cells of their own are of no use to others, unless memory is what is short
        const bool is_shared = self().params_base.kv_unified || server_memory_is_short(self().ctx_tgt);

        is_held_for_spare = self().budget.has_spare();

        return { self().params_base.kv_budget.get(), (has_idle && is_shared) || is_held_for_spare };
    }

    // is nothing of the batch in the cells, although it has failed?
    bool is_not_begun(const common_batch & view) const {
        auto * mem = llama_get_memory(self().ctx_tgt);

        // not with snapshots of a recurrent state: to take a batch back goes to one that this batch did not write
        return mem && llama_n_rs_seq(self().ctx_tgt) == 0 && std::all_of(view.tokens.begin(), view.tokens.end(), [&](const auto & token) {
            return llama_memory_seq_pos_max(mem, token.seq_id) < token.pos[0];
        });
    }

    // the batch, rendered from off on, found no place. returns false if that may be for its size: then it is tried again as
    // upstream does, in smaller ones
    bool make_room(int32_t & n_batch, int32_t off) {
        const auto & batch = self().batch;

        if (drop_drafts(off) || drop_spare(batch.view.size())) {
            return true;
        }

        // what is pooled over all of its tokens stays in one batch
        const auto is_whole = [&](const auto & token) { return !self().slots[token.id_slot].can_split(); };

        if (batch.view.size() > 1 && std::none_of(batch.tokens.begin() + off, batch.tokens.begin() + off + batch.view.size(), is_whole)) {
            return false;
        }

        // what the types were kept for is in use again
        if (is_held_for_spare && !self().budget.has_spare()) {
            return true;
        }

        free_cells(self().slots[self().batch.tokens[off].id_slot], off);
        n_batch = llama_n_batch(self().ctx_tgt);

        return true;
    }

    // a chunk of the slot's media, which is decoded by itself while a batch is made, found no place. unless the slot has to end,
    // it tries again with a later batch
    void make_room_for_chunk(server_slot & slot) {
        drop_drafts(0); // a slot must not be paused, nor the draft go, in the midst of one

        if (has_lost_cells(slot)) {
            end_slot(slot, 0);
        } else if (!drop_spare(std::min<int32_t>(llama_n_batch(slot.ctx_tgt), mtmd_input_chunk_get_n_tokens(slot.task->tokens.find_chunk(slot.prompt.n_tokens()).get())))) {
            free_cells(slot, 0);
        }

        keep_slot_batched();
    }

    // an exception has ended the slot: what it has in the batch is not computed, and may not be that of another
    void drop_ended(server_slot & slot) {
        const int32_t n      = server_batch_drop(self().batch, slot.id, 0);
        const int32_t n_left = slot.prompt.n_tokens() - n;

        if (n > 0 && (n_left <= 0 || slot.prompt.tokens.has_media())) {
            slot.prompt_clear(); // may end within an image
        } else if (n > 0) {
            slot.prompt.tokens.keep_first(n_left);

            // some may have been computed
            const auto seq_rm = [&](llama_context * ctx) {
                return !ctx || llama_memory_seq_rm(llama_get_memory(ctx), slot.id, slot.prompt.tokens.pos_next(), -1);
            };
            if (!seq_rm(slot.ctx_tgt) || !seq_rm(slot.ctx_dft)) {
                slot.prompt_clear();
            }
        }

        keep_slot_batched();
    }

    // the batch is set up for one of its slots, which may have ended
    void keep_slot_batched() {
        auto & batch = self().batch;

        if (batch.slot_batched && batch.slot_batched->is_processing()) {
            return;
        }

        const auto it = std::find_if(batch.tokens.begin(), batch.tokens.end(), [](const auto & token) { return token.id_slot != -1; });
        if (it == batch.tokens.end()) {
            batch.clear();
        } else {
            batch.slot_batched = &self().slots[it->id_slot];
        }
    }

    // a checkpoint at n_tokens has found no memory: from further back, more is computed again
    void drop_checkpoint(server_slot & slot, int64_t n_tokens) {
        SLT_WRN(slot, "no memory for a context checkpoint, n_tokens = %d\n", (int) n_tokens);

        auto & checkpoints = slot.prompt.checkpoints;
        if (!checkpoints.empty() && checkpoints.back().n_tokens == n_tokens) {
            checkpoints.pop_back();
        }
    }

    // returns false without memory for what a draft goes back to: the slot goes on without one
    bool spec_ckpt_made(server_slot & slot, const std::function<void()> & make) {
        try {
            make();
            return true;
        } catch (const std::bad_alloc &) {
            SLT_WRN(slot, "%s", "no memory for a checkpoint, no draft\n");
        }

        slot.stats.n_draft_tokens -= slot.spec_draft.size();

        slot.spec_draft  .clear();
        slot.spec_draft_q.clear();
        slot.spec_ckpt   .clear();

        return false;
    }

    // returns false if the slot had to end
    bool load_spec_tgt(server_slot & slot) {
        // an empty one was made while the copy that the sequence is waited for memory
        if (!slot.spec_ckpt.data_tgt.empty() && slot.spec_ckpt.load_tgt(slot.ctx_tgt, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
            return true;
        }

        end_slot(slot, self().batch.size());
        slot.prompt_clear(); // of unknown length

        return false;
    }

    // without memory for its checkpoint, the draft has lost its cells
    void load_spec_dft(server_slot & slot) {
        if (slot.spec_ckpt.load_dft(slot.ctx_dft, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
            return;
        }

        draft_drop(slot);
    }

    // the draft has no cells of the slot any more, and gets them when it can
    static void draft_drop(server_slot & slot) {
        llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, -1, -1);
        slot.prompt.n_draft_retry = 0;
    }

    // the draft has not had all of the prompt's tokens. when the cells come from elsewhere, what drafts does not know which
    static bool draft_lacks_some(const server_slot & slot) {
        return slot.ctx_dft && slot.prompt.n_draft_retry != -1;
    }

    // the draft has not processed what the target has. returns true if the slots can go on without
    // note: drafters other than these keep states of the last batch that do not survive one that is missing
    bool draft_can_wait(const common_batch & view) {
        const auto & types = self().params_base.speculative.types;
        const auto   has   = [&](common_speculative_type type) { return std::find(types.begin(), types.end(), type) != types.end(); };

        const bool is_simple = has(COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE);
        const bool is_mtp    = has(COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
        const bool is_other  = has(COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3) ||
                               has(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) ||
                               has(COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK);

        const bool has_lost = self().ctx_dft && draft_drop_lost(view);

        if (is_simple == is_mtp || is_other || (!has_lost && !server_memory_is_short(self().ctx_dft) && !is_draft_full(view))) {
            return false;
        }

        SRV_WRN("%s", "no memory for the draft, the batch goes on without it\n");

        for (const auto & token : view.tokens) {
            auto & slot = self().slots[token.seq_id];
            if (is_mtp) {
                // what it lacks are states of the target, which are gone: it starts over with the next batch
                llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, -1, -1);
            } else if (slot.prompt.n_draft_retry == -1) {
                slot.prompt.n_draft_retry = 0;
            }
        }

        return true;
    }

    // let the draft process what it had no memory for. returns false if it cannot draft yet
    bool draft_catch_up(server_slot & slot) {
        if (!slot.ctx_dft) {
            return true;
        }

        auto & n_retry = slot.prompt.n_draft_retry;

        const auto & types = self().params_base.speculative.types;
        if (std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE) == types.end()) {
            n_retry = -1; // what it lacks are states of the target, which are gone: it goes on with the next tokens
            return true;
        }

        // it stayed out of a batch whose tokens it could not follow. with M-RoPE it can follow what comes after an image
        const auto      rope    = llama_model_rope_type(llama_get_model(slot.ctx_dft));
        const bool      no_gaps = rope != LLAMA_ROPE_TYPE_MROPE && rope != LLAMA_ROPE_TYPE_IMROPE;
        const llama_pos pos_max = llama_memory_seq_pos_max(llama_get_memory(slot.ctx_dft), slot.id);
        if (n_retry == -1 && no_gaps && pos_max >= 0 && pos_max + 1 < slot.prompt.tokens.pos_next()) {
            n_retry = 0;
        }
        if (n_retry == -1) {
            return true;
        }

        slot.spec_draft_q.clear(); // those of an earlier draft, of which the accepted tokens can be in spec_draft

        const int32_t n_tokens = slot.prompt.n_tokens();
        if (n_tokens < n_retry || slot.prompt.tokens.has_media()) {
            return false;
        }

        int ret = 0;
        self().queue_tasks.yield_to_queue([&]() {
            ret = draft_process(slot);
        });

        // not with every token: each attempt costs a growth that fails
        n_retry = ret == 0 ? -1 : n_tokens + n_tokens/4 + 1;

        SLT_INF(slot, "draft: %s, n_tokens = %d\n", ret == 0 ? "caught up" : "still no memory", n_tokens);

        return ret == 0;
    }

    // the prompt stays as far as it was processed: the same request goes on there when it comes again
    void end_slot(server_slot & slot, int32_t off) {
        SLT_WRN(slot, "no memory for the next cell, n_tokens = %d, n_gen = %d\n", slot.prompt.n_tokens(), (int) slot.stats.n_gen);

        server_batch_drop(self().batch, slot.id, off);

        // the children wait for a prompt that will not be done, or have a copy of what there is of it
        for (auto & other : self().slots) {
            if (slot.stats.n_gen == 0 && other.is_processing() && other.task->id_parent == slot.task->id) {
                send_error(other);
                server_batch_drop(self().batch, other.id, off);
                other.release();
            }
        }

        const bool has_media = slot.prompt.tokens.has_media();
        if (!has_media) {
            const llama_pos pos_next = llama_memory_seq_pos_max(llama_get_memory(slot.ctx_tgt), slot.id) + 1;

            slot.prompt.tokens.keep_first(std::min<size_t>(slot.prompt.n_tokens(), pos_next));
        }

        if (slot.stats.n_gen > 0) {
            slot.truncated      = true;
            slot.stop           = STOP_TYPE_LIMIT;
            slot.has_next_token = false;

            slot.print_timings();
            self().send_final_response(slot);
        } else {
            send_error(slot);
        }
        slot.release();

        if (has_media) {
            slot.prompt_clear(); // may end within an image
        }
    }

private:
    bool is_held_for_spare = false; // the last batch

    // what is worth less than any cells, of which n were wanted
    bool drop_spare(int32_t n) {
        return self().pool_drop_saved(n) || (server_memory_is_short(self().ctx_tgt, n) && self().budget.drop_spare());
    }

    // for the next cell of the slot, which ends if there is nothing else to do
    void free_cells(server_slot & slot, int32_t off) {
        if (!self().try_clear_idle_slots() && !self().pool_pause(off)) {
            end_slot(slot, off);
        }
        self().pool_has_room();
    }

    // to a part of a chunk that is larger than a batch, in a memory that cannot go back
    bool has_lost_cells(const server_slot & slot) {
        const bool has_part = llama_memory_seq_pos_max(llama_get_memory(slot.ctx_tgt), slot.id) >= slot.prompt.tokens.pos_next();

        return has_part && (self().n_swa > 0 || self().ctx_tgt_seq_rm_type != COMMON_CONTEXT_SEQ_RM_TYPE_PART);
    }

    // a device that failed has taken the draft's cells of slots that go on in the batch. returns false if there are none
    bool draft_drop_lost(const common_batch & view) {
        const auto & tokens = view.tokens;

        bool res = false;

        for (auto & slot : self().slots) {
            const auto token = std::find_if(tokens.begin(), tokens.end(), [&](const auto & token) { return token.seq_id == slot.id; });

            if (token != tokens.end() && server_memory_is_lost(slot.ctx_dft, slot.id, token->pos[0])) {
                SLT_WRN(slot, "%s", "the cells of the draft are lost\n");
                draft_drop(slot);
                res = true;
            }
        }

        return res;
    }

    // slots that share cells have cells of their own in a draft that has caught up: it is full before the target is
    bool is_draft_full(const common_batch & view) {
        return server_memory_is_full(self().ctx_dft, view.size());
    }

    // the tokens of the slot that are not in the draft's cache
    static int draft_process(const server_slot & slot) {
        auto * mem = llama_get_memory(slot.ctx_dft);

        if (llama_memory_seq_pos_min(mem, slot.id) != 0) {
            llama_memory_seq_rm(mem, slot.id, -1, -1); // the start is missing
        }

        const int32_t n_batch  = llama_n_batch(slot.ctx_dft);
        const int32_t n_tokens = slot.prompt.n_tokens();
        const auto    tokens   = slot.prompt.tokens.get_text_tokens();

        common_batch batch(slot.ctx_dft);

        int ret = 0;
        for (int32_t i = llama_memory_seq_pos_max(mem, slot.id) + 1; i < n_tokens && ret == 0; ++i) {
            const bool is_last = i == n_tokens - 1;

            batch.add(tokens[i], i, slot.id, is_last);
            if (is_last || batch.size() == n_batch) {
                ret = llama_process(slot.ctx_dft, LLAMA_PROCESS_TYPE_DECODE, batch.get());
                batch.clear();
            }
        }

        return ret;
    }

    // without their drafts, the slots need one cell each. returns false if there is none in the batch from off on
    bool drop_drafts(int32_t off) {
        bool res = false;

        for (auto & slot : self().slots) {
            if (slot.spec_i_batch.empty() || slot.spec_i_batch[0] < off) {
                continue;
            }

            slot.i_batch = slot.spec_i_batch[0];
            server_batch_drop(self().batch, slot.id, slot.i_batch + 1);

            slot.prompt.tokens.keep_first(slot.prompt.n_tokens() - slot.spec_draft.size());
            if (!slot.spec_is_replay) {
                slot.stats.n_draft_tokens -= slot.spec_draft.size(); // nobody has looked at them
            }
            slot.spec_i_batch.clear();
            slot.spec_draft  .clear();
            slot.spec_draft_q.clear();
            slot.spec_is_replay = false;

            res = true;
        }

        return res;
    }

    void send_error(const server_slot & slot) {
        if (self().pool_is_never(slot)) {
            self().pool_refuse(slot);
        } else {
            self().send_error(slot, server_memory_error(slot.ctx_tgt), ERROR_TYPE_OUT_OF_MEMORY);
        }
    }

    const impl_t & self() const {
        return static_cast<const impl_t &>(*this);
    }

    impl_t & self() {
        return static_cast<impl_t &>(*this);
    }
};
