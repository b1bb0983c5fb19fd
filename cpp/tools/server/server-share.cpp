#include "server-share.h"

#include "server-draft-catch-up.h"

#include "llama-kv.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

server_share::server_share(
        common_params & params, const server_contexts & ctxs, server_slots & slots, const server_replies & replies,
        server_memory_policy & policy)
    : params(params), ctxs(ctxs), slots(slots), replies(replies), policy(policy) {}

void server_share::init() {
    char arch[64] = {};
    llama_model_meta_val_str(ctxs.model_tgt, "general.architecture", arch, sizeof(arch));

    // the caches of DSV4 always have one stream per sequence, so they cannot share cells
    if (params.kv_share_prefix && (!params.kv_unified || std::string(arch) == "deepseek4")) {
        SRV_WRN("%s\n", "--kv-share-prefix needs a unified KV cache (--kv-unified), it will be disabled");
        params.kv_share_prefix = false;
    }
}

static bool is_completion(const server_task & task) {
    return task.type == SERVER_TASK_TYPE_COMPLETION || task.type == SERVER_TASK_TYPE_INFILL;
}

// return true if `slot` may use the cells of `other`
static bool can_give(const server_slot_view & other, const server_slot_view & slot) {
    if (other.id == slot.id || other.state == SLOT_STATE_WAIT_OTHER) {
        return false;
    }

    // if a slot has not started, its cells still contain the prompt of its last task
    const auto & task = other.task && other.state != SLOT_STATE_STARTED ? other.task : other.task_prev;

    return task && is_completion(*task) && !other.prompt.tokens.has_media() && are_lora_equal(other.prompt.provenance.lora, slot.lora);
}

// return the number of first tokens of a task that are in the cells of a slot
// is_other: true: another slot will run the task. Then count only cells that the other slot would compute in the same way
static int32_t n_common(const server_slot_view & slot, const server_task & task, bool is_other) {
    const int32_t n = std::min<int32_t>(slot.prompt.tokens.get_common_prefix(task.tokens), slot.n_computed());

    return is_other ? std::min(n, slot.prompt.provenance.n_exact) : n;
}

static bool has_room_for_copies(const llama_context * ctx, llama_seq_id id) {
    const auto usage = llama_get_memory_usage(ctx);

    return usage.n_cells_max - usage.n_cells_used >= server_n_shared_cells(ctx, id);
}

bool server_share::take_prefix(int id_slot) {
    auto & slot = slots[id_slot];

    if (!can_take(slot)) {
        return true;
    }

    const server_slot_view * from = nullptr;

    const int32_t n_own = n_usable(slot, *slot.task, false);

    int32_t n_best = n_own; // tokens of the best prefix that is in cells now
    int32_t n_soon = 0;     // tokens of the best prefix that is being computed

    for (const auto & other : slots) {
        if (!can_give(other, slot)) {
            continue;
        }

        const int32_t n_now = n_usable(other, *slot.task, true);
        if (n_now > n_best) {
            n_best = n_now;
            from   = &other;
        }

        // in the state DONE_PROMPT, the end of the prompt may be in the current batch, and is not computed yet
        const bool is_computing = other.state == SLOT_STATE_PROCESSING_PROMPT || other.state == SLOT_STATE_DONE_PROMPT;
        if (is_computing && ctxs.can_cut_anywhere()) {
            const int32_t n_lcp = other.task->tokens.get_common_prefix(slot.task->tokens);

            // the last token is always computed, because its logits are needed
            n_soon = std::max(n_soon, std::min({ n_lcp, other.prompt.provenance.n_exact, slot.task->n_tokens() - 1 }));
        }
    }

    // wait only if the prefix that another slot is computing saves N_LEAST tokens, and a quarter of the tokens that this slot
    // would compute without waiting. With a shorter prefix, both prompts fit into one batch
    if (n_soon > n_best && n_soon - n_own >= N_LEAST && 4*(n_soon - n_best) >= slot.task->n_tokens() - n_best) {
        return false;
    }

    if (from && n_best - n_own >= N_LEAST) {
        SLT_INF(slot, "shares the cells of slot %d, n_tokens = %d\n", from->id, n_best);
        take(slot, *from);
        id_taken[slot.id] = slot.task->id;
        if (server_draft_catch_up::lacks_tokens(slot)) {
            server_draft_catch_up::drop(slot);
        }
    }

    return true;
}

void server_share::give_back(server_slot_view & slot) {
    if (!ctxs.can_cut_anywhere() && std::exchange(id_taken[slot.id], -1) == slot.task->id) {
        slot.prompt_clear();
    }
}

bool server_share::is_fixed(int id_slot) {
    return params.kv_share_prefix && slots[id_slot].has_shared_cells();
}

bool server_share::make_own(int id_slot) {
    if (!params.kv_share_prefix) {
        return true;
    }

    auto & slot = slots[id_slot];

    // Free cells of idle and unstarted slots. If such a slot shares cells with this slot, these cells need no copy after that.
    // If it does not, its cells become free, and the copies can use them.
    while (!has_room_for_copies(slot.ctx_tgt, slot.id) && policy.make_room_for_copies(slot)) {
    }

    if (copy_shared(slot.ctx_tgt, slot)) {
        if (!copy_shared(slot.ctx_dft, slot)) {
            SLT_WRN(slot, "no room for cells of its own in the draft, n_tokens = %d\n", slot.prompt.n_tokens());
            server_draft_catch_up::drop(slot);
        }
        return true;
    }

    SLT_WRN(slot, "no room for cells of its own, n_tokens = %d\n", slot.prompt.n_tokens());

    replies.truncated(slot);
    slot.release();
    slot.prompt_clear();

    return false;
}

bool server_share::can_take(const server_slot_view & slot) const {
    return params.kv_share_prefix && slot.task->params.cache_prompt && is_completion(*slot.task) &&
        !(slot.wait.is_unplaced && !ctxs.can_cut_anywhere()) && // see give_back()
        !slot.task->tokens.has_media() && !lora_all_alora(slot.lora) &&
        slot.task->n_tokens() > 0 && slot.task->n_tokens() < slot.n_ctx; // a longer prompt is refused, and the slot keeps its cells
}

// A recurrent memory also keeps the state before the draft tokens of a slot, to return to it if the target rejects them. This
// state is not copied to another slot. So if the memory is recurrent, a slot can use only a checkpoint of another slot.
int32_t server_share::n_usable(const server_slot_view & slot, const server_task & task, bool is_other) const {
    const int32_t n = n_common(slot, task, is_other);
    if (n == 0) {
        return 0;
    }

    const llama_pos pos_min = llama_memory_seq_pos_min(llama_get_memory(slot.ctx_tgt), slot.id);
    const llama_pos thold   = std::max(0, n - ctxs.n_swa - (n < task.n_tokens() ? 0 : 1));
    if (pos_min < thold && !(is_other && ctxs.ctx_tgt_seq_rm_type == COMMON_CONTEXT_SEQ_RM_TYPE_RS)) {
        return n;
    }

    const auto & ckpts = slot.prompt.checkpoints;
    const auto   ckpt  = std::find_if(ckpts.rbegin(), ckpts.rend(), [&](const auto & cur) {
        return cur.pos_max <= n && (cur.pos_min < thold || cur.pos_min == 0);
    });

    return ckpt == ckpts.rend() ? 0 : std::min<int32_t>({ n, std::max(ckpt->pos_min + 1, ckpt->pos_max), (int32_t) ckpt->n_tokens });
}

void server_share::take(server_slot_view & slot, const server_slot_view & from) const {
    const int32_t n = n_common(from, *slot.task, true);

    server_prompt prompt; // allocate memory first, because that may throw

    prompt.provenance = from.prompt.provenance;
    prompt.tokens     = from.prompt.tokens.clone();
    prompt.tokens.keep_first(n);
    std::copy_if(from.prompt.checkpoints.begin(), from.prompt.checkpoints.end(), std::back_inserter(prompt.checkpoints), [&](const auto & cur) {
        return cur.pos_max <= n;
    });

    prompt.n_draft_retry = from.prompt.n_draft_retry;

    slot.mem.seq_rm(slot.id, -1, -1);
    slot.mem.seq_cp(from.id, slot.id, -1, -1);

    // Remove this slot's sequence from the cells after the prefix, which only the other slot uses. Do this now, not when this
    // slot starts: while this slot waits, a third slot may need these cells.
    if (ctxs.can_cut_anywhere()) {
        llama_memory_seq_rm(llama_get_memory(slot.ctx_tgt), slot.id, n, -1);
    }
    if (ctxs.can_cut_anywhere() && slot.ctx_dft) {
        llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, n, -1);
    }

    slot.prompt = std::move(prompt);
}

// The copies are exact: the shared cells are written to a state, and the copies are read from this state.
bool server_share::copy_shared(llama_context * ctx, server_slot_view & slot) {
    const llama_seq_id id = slot.id;

    if (server_n_shared_cells(ctx, id) == 0) {
        return true;
    }
    if (!has_room_for_copies(ctx, id)) {
        return false;
    }

    std::vector<uint8_t> state(llama_state_seq_get_size(ctx, id));
    if (state.empty() || llama_state_seq_get_data(ctx, state.data(), state.size(), id) != state.size()) {
        return false;
    }
    llama_memory_seq_rm(llama_get_memory(ctx), id, -1, -1);

    const auto read = [&]() { return llama_state_seq_set_data(ctx, state.data(), state.size(), id) == state.size(); };

    return ctx == slot.ctx_tgt ? policy.read_back(slot, read) : read();
}
