#pragma once

#include "server-contexts.h"
#include "server-conversation.h"
#include "server-slot.h"
#include "server-task.h"

#include "common.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <vector>

// The conversations in RAM (--cache-ram), and the search for the longest usable state of a prompt.
//
// A slot that starts a task continues from the state with the most usable tokens. This state can be in the slot's own cells, in
// the cells of an idle slot, in an entry in RAM, or in an entry of the store. The state is copied, not moved. Before the slot
// loses its own cells, their conversation becomes an entry.
//
// --cache-ram limits the sum of the bytes of the entries, the checkpoints of entries and slots, and the paused requests. While
// one state is being copied, the sum may exceed the limit by the size of this state. With `--cache-ram budget`, the limit is
// the part of --kv-budget that nothing else uses. If the cells later need more of --kv-budget, conversations are dropped.
//
// To make room, the class drops in this order:
//
//  1. entries whose state is also in the cells of a slot
//  2. checkpoints, except the newest one of each conversation and the one before its last user message
//  3. entries, the least recently used first
//
// An entry of step 3 is offered to the store before it is dropped. A conversation that is too large for RAM is also offered to
// the store.
//
// Entries survive while the server sleeps. With --cache-ram 0, there are no entries, and only the number of checkpoints is limited.
class server_conversations {
public:
    // numbers for /metrics, /props and /slots
    struct usage {
        size_t n_bytes_limit       = 0; // 0 means: no limit. With `--cache-ram budget`, the bytes that nothing else uses now
        size_t n_bytes_entries     = 0; // bytes of the entries, without their checkpoints
        size_t n_bytes_checkpoints = 0; // bytes of the checkpoints of entries and slots
        size_t n_bytes_paused      = 0;
        size_t n_bytes_disk        = 0;
        size_t n_bytes_disk_limit  = 0; // 0 means: no limit, or no store

        size_t n_entries      = 0;
        size_t n_entries_disk = 0;

        uint64_t n_hits         = 0; // tasks that continued from an entry or from the cells of another slot
        uint64_t n_misses       = 0; // tasks that found no usable state, not even in their own slot
        uint64_t n_tokens_saved = 0; // tokens that need not be computed because of the hits

        // the same numbers for the store (the conversations on disk). The hits and the saved tokens of the store are also counted
        // in the numbers above
        uint64_t n_hits_disk         = 0;
        uint64_t n_misses_disk       = 0;
        uint64_t n_tokens_saved_disk = 0;

        std::vector<size_t> n_bytes_checkpoints_by_slot;
        std::vector<size_t> n_bytes_paused_by_slot;
    };

    // a function that calls read() to restore the cells of a slot. If read() returns false, the function frees other memory
    // (the draft, the projector, or cells of idle slots), and calls read() again
    // The function returns false if read() still fails after everything was freed.
    using read_back_t = std::function<bool(server_slot_view & slot, const std::function<bool()> & read)>;

    server_conversations(const common_params & params, const server_contexts & ctxs, server_slots & slots);

    void set_read_back(read_back_t fn) { read_back = std::move(fn); }

    // set the store, which receives the entries that are dropped from RAM, and which load() searches. null means: no store
    void set_store(server_conversation_store * store) { this->store = store; }

    ~server_conversations();

    // apply --cache-ram. load_model() calls this function, also when the server wakes up. Entries from before the sleep stay
    void init();

    // copy the longest usable state into the cells of the slot that was chosen for a task
    // lora: LoRA adapters of the task
    void load(int id_slot, const server_task & task, const std::vector<common_adapter_lora_info> & lora);

    // save a copy of the conversation of a slot that is about to lose its cells
    // may_drop: other entries may be dropped to stay within the limit
    // return true if the conversation now has an entry, or is in the store
    bool save(server_slot_view & slot, bool may_drop = true);

    // copy the conversations of idle slots while RAM has room (--cache-idle-slots)
    // With a unified cache, also free the cells of these slots, because other slots can use them.
    void save_idle();

    // copy the conversations of all slots, and clear the slots. The entries stay
    // Call this function before the contexts of the slots are freed.
    void sleep();

    // offer the conversations of all slots, and then all entries, to the store, the most recently used ones first
    // Call this function before the process ends.
    void save_to_store();

    // return false if conversations cannot be saved, because of --cache-ram 0 or a shortage of RAM
    bool can_save() const { return is_enabled && !is_ram_short; }

    // make room for the state of a request that is about to be paused. return false if the state does not fit
    // n_bytes: size of the state
    // Call this function only if can_save() is true.
    bool reserve(const server_slot_view & slot, size_t n_bytes);

    // make room for the next checkpoint of a slot
    // If nothing else can be dropped, older checkpoints of the slot are dropped.
    // return false if the limit is too small for the new checkpoint
    bool reserve_checkpoint(int id_slot);

    // drop entries and checkpoints until their bytes do not exceed the limit
    // Call this function after checkpoints were copied between slots or read from a file. With `--cache-ram budget`,
    // call it after slots have freed the cells that they saved.
    // return true if something was dropped
    bool trim();

    // return the bytes that belong to the slots: their checkpoints and paused requests. The entries do not count
    size_t n_bytes_of_slots() const;

    // find out whether a batch failed because RAM is short. If so, drop the least recently used entry
    // With `--cache-ram budget`, drop a checkpoint of a running slot instead. The reason is that the failed growth of the
    // cells has already dropped all entries.
    // n: number of cells that the batch needs
    // return false if nothing was dropped
    bool drop_if_short(int32_t n);

    // drop the states of the draft model from all entries and their checkpoints, because the draft model was unloaded
    void drop_drafts();

    // forget that RAM was short, because memory may have been freed since then
    void end_shortage() { is_ram_short = false; }

    usage get_usage() const;

private:
    using entries_t = std::list<server_conversation>;

    // a state that a slot can continue from. Exactly one of entry, slot and stored is set
    struct source {
        int32_t n_usable = 0;
        int32_t n_tokens = 0;

        server_conversation              * entry = nullptr;
        server_slot_view                 * slot  = nullptr;
        server_conversation_store::found   stored;

        std::shared_ptr<const server_conversation> read; // the conversation that was read from the store

        bool is_stored() const { return stored.n_usable > 0; }
    };

    enum restore_result {
        RESTORED,
        NO_PLACE,   // the state does not fit. The slot has no cells after that
        UNREADABLE, // the state can never be restored, and find() does not return it again
    };

    // minimum number of tokens for which a copy of a state is worth its cost
    static constexpr int32_t N_LEAST = 16;

    // return a copy of the conversation of a slot
    // The result is null if the state cannot be read, or if there is no memory for the copy.
    std::unique_ptr<server_conversation> copy(server_slot_view & slot);

    // offer the conversation of a slot to the store, because RAM has no room for it
    // return false if nothing was offered
    bool save_to_store(server_slot_view & slot);

    // return the entry that contains the conversation of a slot. Create the entry if none exists
    // may_drop: other entries may be dropped to stay within the limit
    // is_losing: the slot frees its cells after that
    // The result is null if the conversation has no entry.
    server_conversation * save_entry(server_slot_view & slot, bool may_drop, bool is_losing);

    // return true if the slot has a conversation, and its cells were not lost (server_memory_is_lost())
    bool has_conversation(const server_slot_view & slot) const;

    // return the number of bytes that copy() would need. 0 means: the slot cannot be copied
    size_t n_bytes_copy(const server_slot_view & slot) const;

    // return the number of tokens of a prompt that need not be computed if it continues from the cells of the slot
    int32_t n_usable(const server_slot_view & slot, const server_conversation_query & query) const;

    // return true if `prompt` begins with all tokens of `start`, computed with the same LoRA adapters
    bool is_start_of(const server_prompt & start, const server_prompt & prompt) const;

    // return the source with the most usable tokens. n_usable is 0 if no source is worth a copy
    // n_own:        number of usable tokens in the slot's own cells
    // n_tokens_max: maximum number of tokens of a source
    source find(const server_conversation_query & query, const server_slot_view & slot, int32_t n_own, int32_t n_tokens_max);

    // replace the cells of a slot by the state of a source
    restore_result restore(server_slot_view & slot, const source & source);
    restore_result restore(server_slot_view & slot, const server_conversation & from);

    // write the state of a conversation into the cells of a slot. return false if the state does not fit or is invalid
    // is_invalid: is set to true if the state can never be restored
    bool write(server_slot_view & slot, const server_conversation & from, bool & is_invalid);

    // return the number of bytes that the limit applies to
    size_t n_bytes() const;

    // return the limit in bytes
    // n_bytes_freed: number of bytes of cells that are freed soon. With `--cache-ram budget`, the limit includes these bytes
    size_t limit(size_t n_bytes_freed = 0) const;

    // return the number of bytes of a slot's cells, which conversations can use after the slot has freed the cells
    // The number is 0 without `--cache-ram budget`, because cells then have no limit in common with conversations.
    size_t n_bytes_cells(const server_slot_view & slot) const;

    // drop entries and checkpoints of at least n_bytes bytes, if possible, so that the cells can use these bytes of --kv-budget
    // Checkpoints of slots with a task stay, because the cells can grow while such a checkpoint is being read.
    // return the number of bytes that --kv-budget counts for the remaining conversations
    size_t reclaim(size_t n_bytes);

    // return true if n_bytes_more bytes can be added without exceeding limit(n_bytes_freed)
    bool fits(size_t n_bytes_more, size_t n_bytes_freed = 0) const;

    // drop entries and checkpoints until n_bytes_more bytes can be added without exceeding limit(n_bytes_freed)
    // return false if dropping cannot make enough room
    bool make_room(size_t n_bytes_more, size_t n_bytes_freed = 0);

    // drop the least valuable entry or checkpoint. return false if nothing can be dropped
    // with_running: include checkpoints of slots with a task
    bool drop_one(bool with_running = true);

    // drop the least recently used entry. return false if there is none
    bool drop_oldest();

    // drop the oldest checkpoint of a prompt, except those of server_checkpoints_to_keep()
    // return false if there is no such checkpoint
    static bool thin_out(server_prompt & prompt);

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;

    read_back_t                 read_back;
    server_conversation_store * store = nullptr;

    entries_t                   entries;
    const server_conversation * in_use = nullptr; // this conversation must not be dropped while it is being restored

    int id_losing = -1; // slot whose cells are about to be lost. -1 means: none

    bool   is_enabled    = false;
    bool   is_shared     = false; // the limit is a part of --kv-budget
    bool   is_ram_short  = false; // RAM is short, and room is being made for a batch
    size_t n_bytes_limit = 0;     // 0 means: no limit

    uint64_t n_hits         = 0;
    uint64_t n_misses       = 0;
    uint64_t n_tokens_saved = 0;

    uint64_t n_hits_disk         = 0;
    uint64_t n_tokens_saved_disk = 0;
};
