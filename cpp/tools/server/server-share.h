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
// The slot becomes a copy of the other slot, in the same way as the child slots of a request with n_cmpl. Then update_slots()
// continues as if the slot had processed these tokens itself: it removes the tokens after the common prefix. If the memory
// cannot be cut there (sliding windows, recurrent states), update_slots() restores a checkpoint.
//
// A cell has one position for all of its sequences. So a slot does not change the positions of its cells while it shares some
// of them. Before a context shift, the slot gets its own copies of the shared cells. --cache-reuse has no effect on shared
// cells. No other operation writes to a cell that is in use.
//
// In these cases, a slot computes cells itself, as without the flag:
//   - its prompt is without cache_prompt, has media, uses an aLoRA, or belongs to another task than a completion
//   - the tokens are after the last usable checkpoint
//   - the cache has several streams (also the caches of DSV4), which cannot share cells
//   - an empty slot would compute the cells differently (server_prompt_provenance): the cells of the other slot were moved by a
//     context shift or --cache-reuse, were computed with another LoRA, or were read from a file
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

    // release the copied prefix of a slot, because its request waits for cells. The request may be waiting for exactly the
    // cells of this prefix. Do nothing if sequences can be cut after any token
    void give_back(server_slot_view & slot);

    // return true if --cache-reuse must not move the cells of the slot, because they are shared
    bool is_fixed(int id_slot);

    // replace the shared cells of a slot by its own copies, before their positions change
    // return false if there was no room for the copies. The slot has ended then
    bool make_own(int id_slot);

private:
    // minimum number of tokens that a copied prefix must save. With fewer tokens, sharing is not worth its cost: before the
    // slot changes the positions of its cells, it copies all shared cells
    static constexpr int32_t N_LEAST = 32;

    // return true if the slot may copy a prefix from another slot
    bool can_take(const server_slot_view & slot) const;

    // return the number of first tokens of a task that are in usable cells of `slot`, so that the task need not compute them
    // If the memory cannot be cut after these tokens, count the tokens of the last usable checkpoint of `slot`. update_slots()
    // counts in the same way.
    // is_other: true: another slot will run the task, and copies the cells of `slot`. false: `slot` will run the task
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
