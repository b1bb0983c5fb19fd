#pragma once

#include "server-contexts.h"
#include "server-task.h"

#include "common.h"
#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// A conversation outside of the cells: its tokens, and the state of its cells as bytes.
struct server_conversation {
    server_prompt      prompt;
    server_prompt_data data;

    // first position of the state: larger than 0 with a window or a recurrent state
    llama_pos pos_min = 0;

    // time of the last request that used the conversation, 0: drop it before all others
    int64_t t_last_used = 0;

    // return the bytes of the state and the checkpoints
    size_t size() const;
};

// return the bytes of all checkpoints of a prompt
size_t server_n_bytes_checkpoints(const server_prompt & prompt);

// return the checkpoints that are worth the most: the newest one, and the one before the last user message
std::vector<const common_prompt_checkpoint *> server_checkpoints_to_keep(const server_prompt & prompt);

// A search for the state that saves a prompt the most work.
struct server_conversation_query {
    const server_tokens   & tokens; // the prompt
    const server_contexts & ctxs;

    // adapters that the prompt is computed with, empty if the server has none
    const std::vector<common_adapter_lora_info> & lora;

    // return the number of tokens of the prompt that need not be computed with this state, as update_slots() counts them
    // n_max: number of tokens of `has` that are in its cells
    int32_t n_usable(const server_prompt & has, llama_pos pos_min, int32_t n_max = INT32_MAX) const;

    // return the same for a conversation outside of the cells: 0 if its adapters are others
    int32_t n_usable(const server_conversation & has) const;
};

// return true if a state makes the state of a prompt superfluous: it has all of its tokens, computed with the same adapters
bool server_has_all(const server_contexts & ctxs, const server_prompt & has, llama_pos pos_min, const server_prompt & prompt);

// return true if both lists have the same adapters with the same scales
// note: compares paths, because the pointers change when the server sleeps and wakes
bool server_has_same_lora(const std::vector<common_adapter_lora_info> & a, const std::vector<common_adapter_lora_info> & b);

// A place for conversations that RAM has no room for (--cache-disk). All methods run on the main loop.
class server_conversation_store {
public:
    // a conversation of the store that a search found
    struct found {
        int32_t  n_usable = 0; // tokens that need not be computed, 0: the store has nothing of use
        int32_t  n_tokens = 0; // tokens of the conversation
        std::string id;        // for read() and forget()
    };

    virtual ~server_conversation_store() = default;

    // keep a copy of a conversation that RAM drops now. must not throw
    virtual void put(const server_conversation & conversation) = 0;

    // return the conversation with the most usable tokens
    virtual found find(const server_conversation_query & query) = 0;

    // return the conversation of a search. must not throw
    // null: it cannot be read any more, and no later search finds it
    virtual std::unique_ptr<server_conversation> read(const found & found) = 0;

    // do not find a conversation again, because its state cannot be restored
    virtual void forget(const found & found) = 0;

    virtual size_t n_bytes_limit() const = 0; // 0: no limit
    virtual size_t n_bytes()       const = 0;
    virtual size_t n_entries()     const = 0;
};
