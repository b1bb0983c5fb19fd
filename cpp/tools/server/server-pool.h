#pragma once

#include "server-batch-view.h"
#include "server-contexts.h"
#include "server-memory-policy.h"
#include "server-oom.h"
#include "server-pause.h"
#include "server-pool-capacity.h"
#include "server-projector.h"
#include "server-replies.h"
#include "server-share.h"
#include "server-slot.h"
#include "server-slot-cells.h"

#include "common.h"
#include "llama.h"

#include <cstddef>
#include <cstdint>

// Lets requests wait for cells, because the pool (the KV cells of all slots) is too small for all slots at once.
//
// A request starts when its prompt fits into the cells that the running requests leave free. A paused request resumes when its
// tokens fit. The oldest waiting request is the first. A request never waits when no other request is running.
//
// Rejected: keeping cells free for all that a request may generate. Clients ask for much more than they use, and slots that could
// run together would wait for each other. The server need not know in advance which request will run out of cells. It acts
// when that happens.
class server_pool {
public:
    server_pool(
        const common_params & params, const server_contexts & ctxs, server_slots & slots, server_batch_view & batch,
        server_projector & projector, server_slot_cells & cells, server_pause & pause, const server_pool_capacity & capacity,
        server_oom & oom, server_share & share, server_memory_policy & policy, const server_replies & replies);

    // resume paused requests for which there is room. Call this before a batch is made
    void resume();

    // return true if there is room for the prompt of a request, so that it may start. return false if it waits or was refused
    bool admit(int id_slot);

    // return true if the slot has no tokens in the current batch. There are four reasons: the request waits, the request is
    // paused, its tokens do not fit into the batch, or its parent slot has no tokens in the batch
    bool is_outside_batch(int id_slot);

    // acquire a reference to the projector for the media of a task. If that fails, send the error and return false
    bool take_projector(server_slot_view & slot, const server_task & task) const;

    // restore a slot from a file
    // tokens:   must have the size of the saved tokens, and receives them
    // is_short: is set to true if the slot lacks memory
    // return the result of llama_state_seq_load_file(). throw if the tokens cannot belong to a slot
    size_t read_file(int id_slot, const char * path, llama_tokens & tokens, bool & is_short);

private:
    static constexpr int64_t T_RETRY_US = 1000*1000; // time between two attempts to resume the same request

    // return true if the request of `other` has priority over the request of `slot`: it is running, or it starts with the same
    // batch and is older
    static bool is_ahead(const server_slot_view & other, const server_slot_view & slot);

    bool has_ahead(const server_slot_view & slot);

    // return the oldest request that waits for cells. The result is null if no request waits
    server_slot_view * next_waiting();

    // return the number of cells of the slot that its next prompt can use, and that the pool need not have free for this prompt
    // The slot uses the cells of the common prefix of its last and its next prompt again. It frees its other cells, so they
    // count, too. But if the slot shares cells with other slots, only the cells of the prefix count, because freeing shared
    // cells makes no room.
    int32_t n_kept(const server_slot_view & slot) const;

    // return the number of additional cells that the prompt of the slot needs
    int32_t n_needed(const server_slot_view & slot) const;

    // return true if n more cells for the request of the slot fit into the pool. The function keeps room for the used cells,
    // for the cells that requests with priority still need, and for generated tokens of the slot: at most 1/16 of the cells
    bool has_place(const server_slot_view & slot, int32_t n);

    // do the same as has_place(), but first free the cells of idle and unstarted slots. If that would not be enough, free nothing
    bool find_place(const server_slot_view & slot, int32_t n);

    // resume the paused request of a slot. return false if that failed
    bool resume(server_slot_view & slot);

    const common_params        & params;
    const server_contexts      & ctxs;
    server_slots               & slots;
    server_batch_view          & batch;
    server_projector           & projector;
    server_slot_cells          & cells;
    server_pause               & pause;
    const server_pool_capacity & capacity;
    server_oom                 & oom;
    server_share               & share;
    server_memory_policy       & policy;
    const server_replies       & replies;

    // the slot whose request could not be resumed at the last attempt, and the time of the attempt. -1 means: none
    int     id_no_place   = -1;
    int64_t t_no_place_us = 0;
};
