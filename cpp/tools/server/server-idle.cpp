#include "server-idle.h"

#include "ggml.h"

#include <algorithm>

server_idle::server_idle(const common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations, server_memory_stats & stats)
    : params(params), ctxs(ctxs), slots(slots), conversations(conversations), stats(stats) {}

void server_idle::release() {
    const int64_t t_max = params.kv_idle_release*int64_t(1000*1000);
    if (t_max < 0) {
        return;
    }

    const int64_t t_now = ggml_time_us();

    t_since.resize(slots.size(), t_now);

    for (auto & slot : slots) {
        auto & t = t_since[slot.id];

        const bool is_empty = slot.prompt.n_tokens() == 0;

        // t_last_used is also set when a slot is restored from a file, so the idle time of the slot starts again at the restore
        t = slot.is_processing() || is_empty ? t_now : std::max(t, slot.t_last_used);
        if (t_now - t >= t_max && !is_empty && !slot.is_processing()) {
            release(slot);
        }
    }
}

void server_idle::release(server_slot_view & slot) {
    SLT_INF(slot, "idle, giving back the cells of %d tokens\n", slot.prompt.n_tokens());

    conversations.save(slot);
    slot.prompt_clear();
    conversations.trim(); // with `--cache-ram budget`, less memory than that of the entry may have been freed

    stats.update(ctxs.ctx_tgt, ctxs.ctx_dft, true);
}
