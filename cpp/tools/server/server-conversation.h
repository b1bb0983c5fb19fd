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

// A conversation outside of the KV cells: the tokens, and the state of the cells as bytes.
struct server_conversation {
    server_prompt      prompt;
    server_prompt_data data;

    // first position in the state. It is larger than 0 with a window (SWA) or a recurrent state
    llama_pos pos_min = 0;

    // time of the last request that used the conversation. 0 means: drop this conversation before all others
    int64_t t_last_used = 0;

    // return the bytes of the state and the checkpoints
    size_t size() const;
};

// return the bytes of all checkpoints of a prompt
size_t server_n_bytes_checkpoints(const server_prompt & prompt);

// return the two checkpoints of a prompt that save the most work: the newest one, and the last one before the last user message
std::vector<const common_prompt_checkpoint *> server_checkpoints_to_keep(const server_prompt & prompt);

// A search for the state from which the most tokens of a prompt can be reused.
struct server_conversation_query {
    const server_tokens   & tokens; // the prompt
    const server_contexts & ctxs;

    // LoRA adapters that the prompt is computed with. The list is empty if the server has no adapters
    const std::vector<common_adapter_lora_info> & lora;

    // return the number of tokens of the prompt that need not be computed if the slot continues from the state of `has`
    // The rules are those of update_slots(), which decides later how many tokens the slot really reuses.
    // has:     tokens and checkpoints that belong to the state
    // pos_min: first position in the state
    // n_max:   maximum of the result, for example the number of tokens of `has` whose cells are computed
    int32_t n_usable(const server_prompt & has, llama_pos pos_min, int32_t n_max = INT32_MAX) const;

    // return the number of tokens of the prompt that need not be computed if the slot continues from a saved conversation
    // The number is 0 if the conversation was computed with other LoRA adapters than the prompt.
    int32_t n_usable(const server_conversation & has) const;
};

// return true if the state of `prompt` can be dropped, because the state of `has` contains it
// For this, `has` must contain all tokens of `prompt`, computed with the same adapters.
// pos_min: first position in the state of `has`
bool server_has_all(const server_contexts & ctxs, const server_prompt & has, llama_pos pos_min, const server_prompt & prompt);

// return true if the two lists contain the same adapters with the same scales
// The function compares the paths of the adapters, because the pointers change when the server sleeps and wakes up.
bool server_has_same_lora(const std::vector<common_adapter_lora_info> & a, const std::vector<common_adapter_lora_info> & b);

// An interface to a storage for conversations that do not fit into RAM (--cache-disk).
// All methods run on the main loop.
class server_conversation_store {
public:
    // a conversation that find() has found
    struct found {
        int32_t  n_usable = 0; // number of tokens that need not be computed. 0 means: the store has no useful conversation
        int32_t  n_tokens = 0; // number of tokens of the conversation
        std::string id;        // identifies the conversation for read() and forget()
    };

    virtual ~server_conversation_store() = default;

    // store a copy of a conversation, before the caller drops the conversation from RAM. must not throw
    virtual void put(const server_conversation & conversation) = 0;

    // return the stored conversation from which the most tokens of the prompt can be reused
    virtual found find(const server_conversation_query & query) = 0;

    // return a conversation that find() has found. must not throw
    // The result is null if the conversation cannot be read any more. Later calls of find() do not return such a conversation.
    virtual std::unique_ptr<server_conversation> read(const found & found) = 0;

    // exclude a conversation from later searches, because its state cannot be restored
    virtual void forget(const found & found) = 0;

    virtual size_t n_bytes_limit() const = 0; // 0 means: no limit
    virtual size_t n_bytes()       const = 0;
    virtual size_t n_entries()     const = 0;
};
