#include "server-draft-catch-up.h"

#include "server-memory.h"
#include "server-queue.h"

#include "llama.h"

#include <algorithm>
#include <new>

server_draft_catch_up::server_draft_catch_up(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_queue & queue_tasks)
    : params(params), ctxs(ctxs), slots(slots), queue_tasks(queue_tasks) {}

void server_draft_catch_up::drop(server_slot_view & slot) {
    llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, -1, -1);
    slot.prompt.n_draft_retry = 0;
}

bool server_draft_catch_up::lacks_tokens(const server_slot_view & slot) {
    return slot.ctx_dft && slot.prompt.n_draft_retry != -1;
}

bool server_draft_catch_up::can_skip(const common_batch & view) {
    const auto & types = params.speculative.types;
    const auto   has   = [&](common_speculative_type type) { return std::find(types.begin(), types.end(), type) != types.end(); };

    const bool is_simple = has(COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE);
    const bool is_mtp    = has(COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
    const bool is_other  = has(COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3) ||
                           has(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) ||
                           has(COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK);

    const bool has_lost = ctxs.ctx_dft && drop_lost(view);

    // The context of the draft can run out of cells before the context of the target. Slots that share cells in the target have
    // their own cells in the draft if the draft has processed the prompts of these slots itself.
    if (is_simple == is_mtp || is_other ||
            (!has_lost && !server_memory_is_short(ctxs.ctx_dft) && !server_memory_is_full(ctxs.ctx_dft, view.size()))) {
        return false;
    }

    SRV_WRN("%s", "no memory for the draft, the batch continues without it\n");

    for (const auto & token : view.tokens) {
        auto & slot = slots[token.seq_id];
        if (is_mtp) {
            // free the cells of the MTP layers, because the states of the target that they need are gone now. The MTP layers
            // continue with the next batch
            llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, -1, -1);
        } else if (slot.prompt.n_draft_retry == -1) {
            slot.prompt.n_draft_retry = 0;
        }
    }

    return true;
}

// let the draft process the tokens of the slot that are not in the cache of the draft. return the result of llama_process()
static int process_missing_tokens(const server_slot_view & slot) {
    auto * mem = llama_get_memory(slot.ctx_dft);

    if (llama_memory_seq_pos_min(mem, slot.id) != 0) {
        llama_memory_seq_rm(mem, slot.id, -1, -1); // the start of the prompt is missing, so process all of it
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

bool server_draft_catch_up::catch_up(int id_slot) {
    auto & slot = slots[id_slot];

    if (!slot.ctx_dft) {
        return true;
    }

    auto & n_retry = slot.prompt.n_draft_retry;

    const auto & types = params.speculative.types;
    if (std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE) == types.end()) {
        // continue with the next tokens. Drafters other than draft-simple cannot process the missed tokens, because they need
        // states of the target that are gone
        n_retry = -1;
        return true;
    }

    // The draft has missed a batch if the last position in its cells is not directly before the position of the next token.
    // With M-RoPE, this check is not made: positions jump after an image, and the draft can process the text after an image.
    const auto      rope    = llama_model_rope_type(llama_get_model(slot.ctx_dft));
    const bool      no_gaps = rope != LLAMA_ROPE_TYPE_MROPE && rope != LLAMA_ROPE_TYPE_IMROPE;
    const llama_pos pos_max = llama_memory_seq_pos_max(llama_get_memory(slot.ctx_dft), slot.id);
    if (n_retry == -1 && no_gaps && pos_max >= 0 && pos_max + 1 < slot.prompt.tokens.pos_next()) {
        n_retry = 0;
    }
    if (n_retry == -1) {
        return true;
    }

    slot.spec_draft_q.clear(); // drop an earlier draft, whose accepted tokens can be in spec_draft

    const int32_t n_tokens = slot.prompt.n_tokens();
    if (n_tokens < n_retry || slot.prompt.tokens.has_media()) {
        return false;
    }

    int ret = 0;
    queue_tasks.yield_to_queue([&]() {
        ret = process_missing_tokens(slot);
    });

    // try again when the prompt has a quarter more tokens, not earlier: each attempt costs the time of a growth that fails
    n_retry = ret == 0 ? -1 : n_tokens + n_tokens/4 + 1;

    SLT_INF(slot, "draft: %s, n_tokens = %d\n", ret == 0 ? "caught up" : "still no memory", n_tokens);

    return ret == 0;
}

bool server_draft_catch_up::make_checkpoint(int id_slot, const std::function<void()> & make) const {
    auto & slot = slots[id_slot];

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

void server_draft_catch_up::restore_draft(int id_slot) const {
    auto & slot = slots[id_slot];

    // if there was no memory to restore the checkpoint, load_dft() has already freed the draft's cells of the slot
    if (!slot.spec_ckpt.load_dft(slot.ctx_dft, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        drop(slot);
    }
}

bool server_draft_catch_up::drop_lost(const common_batch & view) {
    const auto & tokens = view.tokens;

    bool res = false;

    for (auto & slot : slots) {
        const auto token = std::find_if(tokens.begin(), tokens.end(), [&](const auto & token) { return token.seq_id == slot.id; });

        if (token != tokens.end() && server_memory_is_lost(slot.ctx_dft, slot.id, token->pos[0])) {
            SLT_WRN(slot, "%s", "the cells of the draft are lost\n");
            drop(slot);
            res = true;
        }
    }

    return res;
}
