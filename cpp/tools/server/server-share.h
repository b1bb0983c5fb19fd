#pragma once

// Slots that share the cells of a common prompt prefix (--kv-share-prefix): a slot that starts takes what another one has already
// computed, also one that is generating, without a copy of the cells.
//
// A part of server_context_impl (impl_t), included there once the slots are defined. The slot becomes a copy of the other one,
// as the slots of n_cmpl do, and update_slots() goes on as if it had had these tokens before: it removes what differs and goes
// back to a checkpoint where the memory cannot be cut (windows, recurrent states).
//
// A cell has one position for all of its sequences. So no slot moves its cells while it shares some: for a context shift it gets
// cells of its own, and --cache-reuse has no effect. Nothing else writes to a cell that is used.
//
// Not shared, but computed as without the flag: with another LoRA or an aLoRA, without cache_prompt, prompts with media, other
// tasks than completions, where no checkpoint reaches, and in a cache of several streams (DSV4 too), which cannot share cells.
// Nor cells that would be others in an empty slot (server_prompt_provenance): moved by a context shift or --cache-reuse, computed
// with the LoRA of another time, or read from a file.

#include "llama-kv.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

template <typename impl_t>
class server_share {
protected:
    void share_init() {
        auto & params = self().params_base;

        char arch[64] = {};
        llama_model_meta_val_str(self().model_tgt, "general.architecture", arch, sizeof(arch));

        // the caches of DSV4 have a stream for each sequence, whatever is asked for
        if (params.kv_share_prefix && (!params.kv_unified || std::string(arch) == "deepseek4")) {
            SRV_WRN("%s\n", "--kv-share-prefix needs a unified KV cache (--kv-unified), it will be disabled");
            params.kv_share_prefix = false;
        }
    }

    // call before a slot starts with its prompt
    // false: it had better wait, another one is just computing what they have in common
    bool share_prefix(server_slot & slot) {
        if (!can_take(slot)) {
            return true;
        }

        const server_slot * from = nullptr;

        const int32_t n_own = n_usable(slot, *slot.task, false);

        int32_t n_best = n_own;
        int32_t n_soon = 0;

        for (const auto & other : self().slots) {
            if (!can_give(other, slot)) {
                continue;
            }

            const int32_t n_now = n_usable(other, *slot.task, true);
            if (n_now > n_best) {
                n_best = n_now;
                from   = &other;
            }

            // the end of its prompt may be in the batch at hand
            const bool is_computing = other.state == SLOT_STATE_PROCESSING_PROMPT || other.state == SLOT_STATE_DONE_PROMPT;
            if (is_computing && is_cut_anywhere()) {
                const int32_t n_lcp = other.task->tokens.get_common_prefix(slot.task->tokens);

                // the last token is computed anyway
                n_soon = std::max(n_soon, std::min({ n_lcp, other.prompt.provenance.n_exact, slot.task->n_tokens() - 1 }));
            }
        }

        // not for a few tokens: both prompts fit into one batch then
        if (n_soon > n_best && n_soon - n_own >= N_LEAST && 4*(n_soon - n_best) >= slot.task->n_tokens() - n_best) {
            return false;
        }

        if (from && n_best - n_own >= N_LEAST) {
            SLT_INF(slot, "shares the cells of slot %d, n_tokens = %d\n", from->id, n_best);
            take(slot, *from);
            id_taken[slot.id] = slot.task->id;
            if (self().draft_lacks_some(slot)) {
                self().draft_drop(slot);
            }
        }

        return true;
    }

    // a slot that waits for cells keeps none that it will not use: they could be those it waits for
    void share_wait(server_slot & slot) {
        if (!is_cut_anywhere() && std::exchange(id_taken[slot.id], -1) == slot.task->id) {
            slot.prompt_clear();
        }
    }

    bool share_has(const server_slot & slot) const {
        return n_shared(slot.ctx_tgt, slot.id) > 0 || n_shared(slot.ctx_dft, slot.id) > 0;
    }

    // call before the positions of a slot's cells change: it has them alone then
    // false: there was no room for that, and the slot has ended
    bool share_end(server_slot & slot) {
        if (!self().params_base.kv_share_prefix) {
            return true;
        }

        // those that it shares them with may not need them, and others no cells at all
        while (!has_room(slot.ctx_tgt, slot.id) && (self().clear_idle_slot(&slot) || self().pool_clear_started(&slot))) {
        }

        if (has_own(slot.ctx_tgt, slot)) {
            if (!has_own(slot.ctx_dft, slot)) {
                SLT_WRN(slot, "no room for cells of its own in the draft, n_tokens = %d\n", slot.prompt.n_tokens());
                self().draft_drop(slot);
            }
            return true;
        }

        SLT_WRN(slot, "no room for cells of its own, n_tokens = %d\n", slot.prompt.n_tokens());

        slot.truncated      = true;
        slot.stop           = STOP_TYPE_LIMIT;
        slot.has_next_token = false;

        slot.print_timings();
        self().send_final_response(slot);
        slot.release();
        slot.prompt_clear();

        return false;
    }

    // tokens of a slot that are in its cells: not those of the batch at hand, nor a draft
    static int32_t share_n_computed(const server_slot & slot) {
        const auto &    tokens = slot.prompt.tokens;
        const llama_pos n_pos  = llama_memory_seq_pos_max(llama_get_memory(slot.ctx_tgt), slot.id) + 1;

        // an image can have more cells than positions (M-RoPE)
        return n_pos > 0 && tokens.has_media() ? tokens.size_up_to_pos(n_pos) : std::min<int32_t>(tokens.size(), n_pos);
    }

private:
    // fewer tokens are not worth a copy of all cells before they are moved
    static constexpr int32_t N_LEAST = 32;

    std::map<int, int> id_taken; // by slot: the last task that took a prefix

    static bool is_completion(const server_task & task) {
        return task.type == SERVER_TASK_TYPE_COMPLETION || task.type == SERVER_TASK_TYPE_INFILL;
    }

    bool can_take(const server_slot & slot) const {
        return self().params_base.kv_share_prefix && slot.task->params.cache_prompt && is_completion(*slot.task) &&
            !(slot.waits && !is_cut_anywhere()) && // see share_wait()
            !slot.task->tokens.has_media() && !lora_all_alora(slot.lora) &&
            slot.task->n_tokens() > 0 && slot.task->n_tokens() < slot.n_ctx; // or it is refused, and keeps what it has
    }

    static bool can_give(const server_slot & other, const server_slot & slot) {
        if (other.id == slot.id || other.state == SLOT_STATE_WAIT_OTHER) {
            return false;
        }

        // one that has not started yet has the prompt of its last task
        const auto & task = other.task && other.state != SLOT_STATE_STARTED ? other.task : other.task_prev;

        return task && is_completion(*task) && !other.prompt.tokens.has_media() && are_lora_equal(other.prompt.provenance.lora, slot.lora);
    }

    // a sequence can be cut after any token, without a checkpoint
    bool is_cut_anywhere() const {
        return self().n_swa == 0 && self().ctx_tgt_seq_rm_type == COMMON_CONTEXT_SEQ_RM_TYPE_PART;
    }

    // tokens of a task that are in the cells of a slot. of another one, only where they are what the task would compute
    static int32_t n_common(const server_slot & slot, const server_task & task, bool is_other) {
        const int32_t n = std::min<int32_t>(slot.prompt.tokens.get_common_prefix(task.tokens), share_n_computed(slot));

        return is_other ? std::min(n, slot.prompt.provenance.n_exact) : n;
    }

    // tokens of a task that need not be computed with the cells of a slot: what update_slots() makes of them
    // is_other: by another slot. the state that a recurrent memory goes back to when a draft was wrong is not copied, so only a
    // checkpoint is of use then
    int32_t n_usable(const server_slot & slot, const server_task & task, bool is_other) const {
        const int32_t n = n_common(slot, task, is_other);
        if (n == 0) {
            return 0;
        }

        const llama_pos pos_min = llama_memory_seq_pos_min(llama_get_memory(slot.ctx_tgt), slot.id);
        const llama_pos thold   = std::max(0, n - self().n_swa - (n < task.n_tokens() ? 0 : 1));
        if (pos_min < thold && !(is_other && self().ctx_tgt_seq_rm_type == COMMON_CONTEXT_SEQ_RM_TYPE_RS)) {
            return n;
        }

        const auto & ckpts = slot.prompt.checkpoints;
        const auto   ckpt  = std::find_if(ckpts.rbegin(), ckpts.rend(), [&](const auto & cur) {
            return cur.pos_max <= n && (cur.pos_min < thold || cur.pos_min == 0);
        });

        return ckpt == ckpts.rend() ? 0 : std::min<int32_t>({ n, std::max(ckpt->pos_min + 1, ckpt->pos_max), (int32_t) ckpt->n_tokens });
    }

    void take(server_slot & slot, const server_slot & from) const {
        const int32_t n = n_common(from, *slot.task, true);

        server_prompt prompt; // may throw

        prompt.provenance = from.prompt.provenance;
        prompt.tokens = from.prompt.tokens.clone();
        prompt.tokens.keep_first(n);
        std::copy_if(from.prompt.checkpoints.begin(), from.prompt.checkpoints.end(), std::back_inserter(prompt.checkpoints), [&](const auto & cur) {
            return cur.pos_max <= n;
        });

        prompt.n_draft_retry = from.prompt.n_draft_retry;

        slot.mem.seq_rm(slot.id, -1, -1);
        slot.mem.seq_cp(from.id, slot.id, -1, -1);

        // what is beyond is the other one's alone, and not to be kept from whoever needs it while this one waits
        if (is_cut_anywhere()) {
            llama_memory_seq_rm(llama_get_memory(slot.ctx_tgt), slot.id, n, -1);
        }
        if (is_cut_anywhere() && slot.ctx_dft) {
            llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, n, -1); // or when it starts
        }

        slot.prompt = std::move(prompt);
    }

    static uint32_t n_shared(const llama_context * ctx, llama_seq_id id) {
        if (!ctx) {
            return 0;
        }

        const auto usage = llama_memory_seq_usage(ctx, id);

        return std::max(usage.cells.n_shared, usage.window.n_shared);
    }

    static bool has_room(const llama_context * ctx, llama_seq_id id) {
        const auto usage = llama_get_memory_usage(ctx);

        return usage.n_cells_max - usage.n_cells_used >= n_shared(ctx, id);
    }

    // exact: what is read is what was written
    bool has_own(llama_context * ctx, const server_slot & slot) {
        const llama_seq_id id = slot.id;

        if (n_shared(ctx, id) == 0) {
            return true;
        }
        if (!has_room(ctx, id)) {
            return false;
        }

        std::vector<uint8_t> state(llama_state_seq_get_size(ctx, id));
        if (state.empty() || llama_state_seq_get_data(ctx, state.data(), state.size(), id) != state.size()) {
            return false;
        }
        llama_memory_seq_rm(llama_get_memory(ctx), id, -1, -1);

        const auto read = [&]() { return llama_state_seq_set_data(ctx, state.data(), state.size(), id) == state.size(); };

        return ctx == slot.ctx_tgt ? self().pool_read(slot, read) : read();
    }

    impl_t & self() {
        return static_cast<impl_t &>(*this);
    }

    const impl_t & self() const {
        return static_cast<const impl_t &>(*this);
    }
};
