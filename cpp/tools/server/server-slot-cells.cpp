#include "server-slot-cells.h"

#include "server-memory.h"

#include "llama-kv.h"

#include <algorithm>

server_slot_cells::server_slot_cells(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations)
    : params(params), ctxs(ctxs), slots(slots), conversations(conversations) {}

std::vector<std::reference_wrapper<server_slot_view>> server_slot_cells::idle_slots(const server_slot_view * except) {
    std::vector<std::reference_wrapper<server_slot_view>> res;
    for (auto & slot : slots) {
        if (&slot != except && !slot.is_processing() && slot.prompt.n_tokens() > 0) {
            res.push_back(slot);
        }
    }

    std::stable_sort(res.begin(), res.end(), [](const server_slot_view & a, const server_slot_view & b) {
        return a.t_last_used < b.t_last_used;
    });

    return res;
}

bool server_slot_cells::clear_idle(const server_slot_view * except) {
    const auto idle = idle_slots(except);
    if (idle.empty()) {
        return false;
    }

    server_slot_view & slot = idle.front();

    SRV_WRN("purging slot %d with %zu tokens\n", slot.id, slot.prompt.tokens.size());

    conversations.save(slot);
    slot.prompt_clear();

    return true;
}

bool server_slot_cells::clear_idle_for_others() {
    return (params.kv_unified || server_memory_is_short(ctxs.ctx_tgt)) && clear_idle();
}

bool server_slot_cells::clear_unstarted(const server_slot_view * except, bool with_kept) {
    for (auto & slot : slots) {
        const bool is_waiting = slot.state == SLOT_STATE_STARTED || slot.state == SLOT_STATE_WAIT_OTHER;

        if (&slot != except && is_waiting && slot.prompt.n_tokens() > 0 && (with_kept || !is_kept(slot, except))) {
            SLT_WRN(slot, "not started yet, purging %d tokens\n", slot.prompt.n_tokens());
            conversations.save(slot);
            slot.prompt_clear();
            return true;
        }
    }
    return false;
}

bool server_slot_cells::is_kept(const server_slot_view & slot, const server_slot_view * except) {
    if (!params.kv_share_prefix) {
        return false;
    }

    const auto usage = llama_memory_seq_usage(slot.ctx_tgt, slot.id);
    if (usage.cells.n_cells == 0 || usage.cells.n_shared < usage.cells.n_cells) {
        return false;
    }

    return std::any_of(slots.begin(), slots.end(), [&](const server_slot_view & other) {
        return &other != &slot && (&other == except || other.is_running()) && other.has_shared_cells() &&
            other.prompt.tokens.get_common_prefix(slot.prompt.tokens) >= slot.prompt.tokens.size();
    });
}
