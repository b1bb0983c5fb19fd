#pragma once

#include "server-common.h"
#include "server-projector-ref.h"
#include "server-task.h"

#include "common.h"
#include "llama.h"
#include "mtmd-helper.h"
#include "speculative.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// state diagram: https://github.com/ggml-org/llama.cpp/pull/9283
enum slot_state {
    SLOT_STATE_IDLE,
    SLOT_STATE_WAIT_OTHER, // after assigning a task, but waiting for parent slot to process prompt
    SLOT_STATE_STARTED,    // after assigning a task and about to process prompt
    SLOT_STATE_PROCESSING_PROMPT,
    SLOT_STATE_DONE_PROMPT,
    SLOT_STATE_GENERATING,
};

// state of a request that waits because other requests need the cells of the pool. It is a part of the slot
struct server_slot_wait {
    bool is_unplaced = false; // the request has not started, because there is no room for its prompt

    std::unique_ptr<server_prompt_cache_state> paused; // cells of a paused request. null means: the request is not paused

    slot_state state_paused = SLOT_STATE_IDLE; // state of the slot to return to after the pause

    explicit operator bool() const { return is_unplaced || paused; }
};

// A view of a slot of the server, for the classes in server-parts.h. It consists of references to upstream's slot.
struct server_slot_view {
    const int & id;

    llama_context * & ctx_tgt;
    llama_context * & ctx_dft;

    common_memory & mem;

    server_projector_ref & mctx;
    mtmd::batch_ptr      & mbatch;

    common_speculative *                       & spec;
    llama_tokens                               & spec_draft;
    std::vector<std::vector<llama_token_data>> & spec_draft_q;
    std::vector<int32_t>                       & spec_i_batch;
    common_prompt_checkpoint                   & spec_ckpt;
    bool                                       & spec_is_replay;

    std::unique_ptr<const server_task> & task;
    std::unique_ptr<const server_task> & task_prev;

    int64_t & t_last_used;

    int32_t & n_ctx;
    int32_t & i_batch;

    bool      & has_next_token;
    bool      & truncated;
    stop_type & stop;

    slot_state       & state;
    server_slot_wait & wait;

    server_prompt                         & prompt;
    std::vector<common_adapter_lora_info> & lora;
    server_slot_stats                     & stats;

    std::function<bool()>                      is_processing;
    std::function<bool()>                      can_speculate;
    std::function<bool()>                      can_split;
    std::function<int32_t()>                   n_remaining;
    std::function<void()>                      prompt_clear;
    std::function<void()>                      print_timings;
    std::function<void()>                      release;

    // slot: upstream's server_slot, which must outlive this object
    template <typename slot_t>
    explicit server_slot_view(slot_t & slot) :
        id(slot.id),
        ctx_tgt(slot.ctx_tgt),
        ctx_dft(slot.ctx_dft),
        mem(slot.mem),
        mctx(slot.mctx),
        mbatch(slot.mbatch),
        spec(slot.spec),
        spec_draft(slot.spec_draft),
        spec_draft_q(slot.spec_draft_q),
        spec_i_batch(slot.spec_i_batch),
        spec_ckpt(slot.spec_ckpt),
        spec_is_replay(slot.spec_is_replay),
        task(slot.task),
        task_prev(slot.task_prev),
        t_last_used(slot.t_last_used),
        n_ctx(slot.n_ctx),
        i_batch(slot.i_batch),
        has_next_token(slot.has_next_token),
        truncated(slot.truncated),
        stop(slot.stop),
        state(slot.state),
        wait(slot.wait),
        prompt(slot.prompt),
        lora(slot.lora),
        stats(slot.stats),
        is_processing([&slot]() { return slot.is_processing(); }),
        can_speculate([&slot]() { return slot.can_speculate(); }),
        can_split([&slot]() { return slot.can_split(); }),
        n_remaining([&slot]() { return slot.n_remaining(); }),
        prompt_clear([&slot]() { slot.prompt_clear(); }),
        print_timings([&slot]() { slot.print_timings(); }),
        release([&slot]() { slot.release(); }) {}

    // return true if the request has its cells in the pool: it has started and is not paused
    bool is_running() const;

    // return the number of tokens whose cells are computed. The tokens of the current batch and draft tokens do not count
    int32_t n_computed() const;

    // return true if other slots also use some of the cells of this slot
    bool has_shared_cells() const;
};

// return the number of cells that a sequence shares with other sequences. ctx may be null
uint32_t server_n_shared_cells(const llama_context * ctx, llama_seq_id id);

// The slots of the server, as views.
class server_slots {
public:
    // create the views. Call this after the slots were created. The slots must not move in memory after that
    template <typename slot_t>
    void bind(std::vector<slot_t> & slots) {
        views.clear();
        views.reserve(slots.size());
        for (auto & slot : slots) {
            views.emplace_back(slot);
        }
    }

    size_t size() const { return views.size(); }

    server_slot_view & operator[](int32_t id) { return views.at(id); }

    std::vector<server_slot_view>::iterator begin() { return views.begin(); }
    std::vector<server_slot_view>::iterator end  () { return views.end(); }

private:
    std::vector<server_slot_view> views; // the index is the id of the slot
};
