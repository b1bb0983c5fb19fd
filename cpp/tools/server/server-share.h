#pragma once

#include "server-contexts.h"
#include "server-memory-policy.h"
#include "server-replies.h"
#include "server-slot.h"
#include "server-task.h"

#include "common.h"
#include "llama.h"

#include <cstdint>
#include <map>

// Lets slots share the cells of a common prompt prefix (--kv-share-prefix). A slot that starts copies the prefix of another slot,
// even while the other slot is generating. The copy only adds references to the cells. No data is copied.
//
// The slot becomes a copy of the other slot, in the same way as the slots of n_cmpl. Then update_slots() continues as if the slot
// had had these tokens before: it removes the part that differs. If the memory cannot be cut (windows, recurrent states), it
// returns to a checkpoint.
//
// A cell has one position for all of its sequences. So a slot does not move its cells while it shares some of them. Before a
// context shift, it gets its own copies of the shared cells. --cache-reuse has no effect on shared cells. No other operation
// writes to a cell that is in use.
//
// Some cells are not shared, but computed as without the flag:
//   - prompts without cache_prompt, with media, with an aLoRA, or of other tasks than completions
//   - tokens after the last usable checkpoint
//   - caches of several streams (DSV4, too), which cannot share cells
//   - cells that an empty slot would compute differently (server_prompt_provenance): cells that were moved by a context shift or
//     --cache-reuse, computed with another LoRA, or read from a file
class server_share {
public:
    server_share(
        common_params & params, const server_contexts & ctxs, server_slots & slots, const server_replies & replies,
        server_memory_policy & policy);

    // disable the flag if the cache cannot share cells. load_model() calls this
    void init();

    // copy the longest prefix of a slot's prompt from another slot, before the slot starts
    // return false if the slot should wait, because another slot is computing the prefix now
    bool take_prefix(int id_slot);

    // release a copied prefix, because the request waits for cells. It may be waiting for exactly these cells
    void give_back(server_slot_view & slot);

    // return true if --cache-reuse must not move the cells of the slot, because they are shared
    bool is_fixed(int id_slot);

    // replace the shared cells of a slot by its own copies, before their positions change
    // return false if there was no room for the copies. The slot has ended then
    bool make_own(int id_slot);

private:
    // minimum number of tokens for which it is worth to copy all cells before they are moved
    static constexpr int32_t N_LEAST = 32;

    // return true if the slot may copy a prefix from another slot
    bool can_take(const server_slot_view & slot) const;

    // return the number of tokens of a task that need not be computed with the cells of the slot, as update_slots() counts them
    // is_other: the task would run in another slot, which copies the cells
    int32_t n_usable(const server_slot_view & slot, const server_task & task, bool is_other) const;

    void take(server_slot_view & slot, const server_slot_view & from) const;

    // replace the shared cells of the slot in one context by copies. return false if there is no room
    bool copy_shared(llama_context * ctx, server_slot_view & slot);

    common_params         & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    const server_replies  & replies;
    server_memory_policy  & policy;

    std::map<int, int> id_taken; // by slot: id of the last task that copied a prefix
};
