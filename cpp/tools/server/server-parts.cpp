#include "server-parts.h"

#include <exception>

server_parts::server_parts(
        common_params & params, const server_contexts & ctxs_new, server_memory_stats & stats, server_projector & projector, server_queue & queue_tasks, server_response & queue_results,
        const server_replies & replies_new) :
    ctxs      (ctxs_new),
    replies   (replies_new),
    conversations(params, ctxs, slots),
    disk      (params, ctxs),
    cells     (params, ctxs, slots, conversations),
    pause     (slots, batch, conversations, projector),
    draft     (params, ctxs, slots, conversations, stats, queue_tasks, queue_results),
    projector (projector),
    capacity  (params, ctxs, conversations),
    oom       (params, ctxs, slots, batch, capacity, replies),
    catch_up  (params, ctxs, slots, queue_tasks),
    policy    (params, ctxs, slots, batch, conversations, cells, pause, oom, draft, projector, stats),
    budget    (params, ctxs, policy, draft, projector, stats),
    share     (params, ctxs, slots, replies, policy),
    pool      (params, ctxs, slots, batch, projector, cells, pause, capacity, oom, share, policy, replies),
    requantize(ctxs, slots, stats, queue_tasks),
    idle      (params, ctxs, slots, conversations, stats) {
    projector.set_make_room([this]() { return policy.drop_spare_draft(); });
    conversations.set_read_back([this](server_slot_view & slot, const std::function<bool()> & read) { return policy.read_back(slot, read); });
}

void server_parts::release_unused() {
    try {
        projector.unload_unused();
        draft.unload_unused();
        idle.release();
    } catch (const std::exception & e) {
        SRV_WRN("nothing is given back now: %s\n", e.what());
    }
}
