#include "server-pause.h"

#include "server-memory.h"

#include <new>
#include <utility>
#include <vector>

server_pause::server_pause(server_slots & slots, server_batch_view & batch, server_conversations & conversations, const server_projector & projector)
    : slots(slots), batch(batch), conversations(conversations), projector(projector) {}

// return true if a request can be paused: it is a completion, and does not share its prompt with other requests of a task (n_cmpl)
static bool can_pause(const server_task & task) {
    return (task.type == SERVER_TASK_TYPE_COMPLETION || task.type == SERVER_TASK_TYPE_INFILL) && !task.is_parent() && !task.is_child();
}

bool server_pause::pause_youngest(int32_t off) {
    server_slot_view * youngest = nullptr;

    int n_running = 0;
    for (auto & slot : slots) {
        n_running += slot.is_running();
        if (slot.is_running() && can_pause(*slot.task) && (!youngest || slot.task->id > youngest->task->id)) {
            youngest = &slot;
        }
    }

    return youngest && n_running > 1 && pause(*youngest, off);
}

void server_pause::leave_projector(server_slot_view & slot) const {
    if (projector.is_auto()) {
        slot.mbatch.reset();
        slot.mctx = {};
    }
}

bool server_pause::pause(server_slot_view & slot, int32_t off) {
    if (server_memory_is_lost(slot.ctx_tgt, slot.id, slot.prompt.n_tokens() - batch.count(slot.id, off))) {
        return false; // there are no cells that could be restored
    }

    auto state = save(slot);
    if (!state) {
        return false;
    }

    leave_projector(slot);

    slot.prompt.tokens.keep_first(slot.prompt.n_tokens() - batch.drop(slot.id, off));
    slot.i_batch = -1;

    SLT_WRN(slot, "no cells for all, paused, n_tokens = %d, n_gen = %d\n", slot.prompt.n_tokens(), (int) slot.stats.n_gen);

    state->prompt = std::move(slot.prompt);
    slot.prompt_clear();

    slot.wait.paused       = std::move(state);
    slot.wait.state_paused = slot.state == SLOT_STATE_DONE_PROMPT ? SLOT_STATE_PROCESSING_PROMPT : slot.state;
    slot.state             = SLOT_STATE_WAIT_OTHER;

    return true;
}

std::unique_ptr<server_prompt_cache_state> server_pause::save(const server_slot_view & slot) {
    if (!conversations.can_save()) {
        return nullptr;
    }

    auto * ctx_dft = server_memory_is_lost(slot.ctx_dft, slot.id, slot.prompt.n_tokens()) ? nullptr : slot.ctx_dft;

    const auto size = [&](llama_context * ctx) { return ctx ? llama_state_seq_get_size(ctx, slot.id) : 0; };

    // the bytes of the checkpoints do not count here, because the checkpoints are moved, not copied
    if (!conversations.reserve(slot, size(slot.ctx_tgt) + size(ctx_dft))) {
        return nullptr;
    }

    try {
        auto res = std::make_unique<server_prompt_cache_state>();

        const auto read = [&](llama_context * ctx, std::vector<uint8_t> & data) {
            data.resize(size(ctx));
            // the size is 0 if a copy of the sequence is pending, although the sequence has cells
            return !ctx || (!data.empty() && llama_state_seq_get_data(ctx, data.data(), data.size(), slot.id) == data.size());
        };

        if (!read(slot.ctx_tgt, res->data.main)) {
            return nullptr;
        }
        if (!read(ctx_dft, res->data.drft)) {
            res->data.drft.clear(); // the draft processes the prompt again after the pause
        }
        return res;
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}
