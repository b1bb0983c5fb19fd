#pragma once

#include "server-batch-view.h"
#include "server-budget.h"
#include "server-contexts.h"
#include "server-conversation-disk.h"
#include "server-conversations.h"
#include "server-draft.h"
#include "server-draft-catch-up.h"
#include "server-idle.h"
#include "server-main-loop.h"
#include "server-memory-policy.h"
#include "server-memory-stats.h"
#include "server-oom.h"
#include "server-pause.h"
#include "server-pool.h"
#include "server-pool-capacity.h"
#include "server-projector.h"
#include "server-queue.h"
#include "server-replies.h"
#include "server-requantize.h"
#include "server-share.h"
#include "server-slot.h"
#include "server-slot-cells.h"
#include "server-task.h"

#include "common.h"

#include <vector>

// Creates the parts of llama-server that upstream does not have: the classes in server-*.h whose objects are members below. The
// constructor passes to each part the other parts that it needs.
//
// The server context owns the parts. Upstream's code calls their methods. The parts do not know the type of the server context:
// they work on views of its slots and its batch.
struct server_parts {
    // the arguments refer to members of the server context, which must outlive this object
    server_parts(
        common_params & params, const server_contexts & ctxs, server_memory_stats & stats, server_projector & projector, server_queue & queue_tasks, server_response & queue_results,
        const server_replies & replies);

    server_parts(const server_parts &) = delete;
    server_parts & operator=(const server_parts &) = delete;

    // connect the parts to the slots and the batch. load_model() calls this after it has created the slots
    template <typename slot_t, typename batch_t>
    void bind(std::vector<slot_t> & server_slots, batch_t & server_batch) {
        slots.bind(server_slots);
        batch.bind(server_batch, server_slots);
        conversations.set_store(disk.init() ? &disk : nullptr);
    }

    // free memory that was not used for some time. The main loop calls this at each tick
    void release_unused();

    server_contexts ctxs;
    server_replies  replies;

    // views of upstream's objects
    server_slots      slots;
    server_batch_view batch;

    // owners of memory
    server_conversations conversations;
    server_conversation_disk disk;
    server_slot_cells    cells;
    server_pause         pause;
    server_draft         draft;
    server_projector   & projector;

    // classes that handle missing memory
    server_pool_capacity  capacity;
    server_oom            oom;
    server_draft_catch_up catch_up;

    // decides in which order the owners free memory
    server_memory_policy policy;

    // users of the policy
    server_budget     budget;
    server_share      share;
    server_pool       pool;
    server_requantize requantize;
    server_idle       idle;
};
