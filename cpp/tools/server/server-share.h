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

// Let slots share the cells of a common prompt prefix (--kv-share-prefix). A slot that starts copies the prefix of another slot, even
// if that one is generating. No cell is copied, only references.
//
// The slot becomes a copy of the other one, as the slots of n_cmpl do. Then update_slots() continues as if the slot had had these
// tokens before: it removes the differing part, and returns to a checkpoint if the memory cannot be cut (windows, recurrent states).
//
// A cell has one position for all of its sequences. So a slot does not move its cells while it shares some of them: before a
// context shift it gets its own copies, and --cache-reuse has no effect. Nothing else writes to a cell that is in use.
//
// These are not shared, but computed as without the flag: cells with another LoRA or an aLoRA, without cache_prompt, prompts
// with media, other tasks than completions, tokens beyond the last usable checkpoint, and caches of several streams (DSV4,
// too), which cannot share cells. Neither are cells that an empty slot would compute differently (server_prompt_provenance):
// moved by a context shift or --cache-reuse, computed with another LoRA, or read from a file.
class server_share {
public:
    server_share(
        common_params & params, const server_contexts & ctxs, server_slots & slots, const server_replies & replies,
        server_memory_policy & policy);

    // load_model(): disable the flag if the cache cannot share cells
    void init();

    // give a slot the longest prefix of its prompt from another slot, before it starts
    // return false if it should wait: another slot is computing the prefix at the moment
    bool take_prefix(int id_slot);

    // release a prefix that the request will not use, because it waits for cells, perhaps for exactly these cells
    void give_back(server_slot_view & slot);

    // return true if --cache-reuse must not move the cells of the slot
    bool is_fixed(int id_slot);

    // replace shared cells of a slot by its own copies, before their positions change
    // return false if there was no room. the slot has ended then
    bool make_own(int id_slot);

private:
    // fewer tokens are not worth copying all cells before they are moved
    static constexpr int32_t N_LEAST = 32;

    // return true if the slot may copy a prefix
    bool can_take(const server_slot_view & slot) const;

    // return the number of tokens of a task that need not be computed with the cells of the slot, as update_slots() counts them
    // is_other: with the cells of another slot
    int32_t n_usable(const server_slot_view & slot, const server_task & task, bool is_other) const;

    void take(server_slot_view & slot, const server_slot_view & from) const;

    // replace the shared cells of the slot in a context by copies. return false if there is no room
    bool copy_shared(llama_context * ctx, server_slot_view & slot);

    common_params         & params;
    const server_contexts & ctxs;
    server_slots          & slots;
    const server_replies  & replies;
    server_memory_policy  & policy;

    std::map<int, int> id_taken; // by slot: the last task that took a prefix
};
