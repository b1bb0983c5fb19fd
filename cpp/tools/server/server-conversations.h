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
// One rule: a slot that starts a task receives the longest usable state, from its own cells, the cells of an idle slot, an entry in
// RAM or an entry of the store. States are copied, not moved. Before, the state that the slot loses becomes an entry.
//
// One limit: --cache-ram limits the bytes of the entries, the checkpoints of entries and slots, and the paused requests. Only one
// state that is being copied may exceed it. To make room, the class frees in this order:
//
//  1. entries that the cells of a slot contain as well
//  2. checkpoints, except the newest one of each conversation and the one before its last user message
//  3. entries, the least recently used first. they are offered to the store before, as are conversations that are too large for RAM
//
// Entries survive while the server sleeps. --cache-ram 0 turns entries off, and checkpoints are then limited by their number only.
class server_conversations {
public:
    // numbers for /metrics, /props and /slots
    struct usage {
        size_t n_bytes_limit       = 0; // 0: no limit
        size_t n_bytes_entries     = 0; // without checkpoints
        size_t n_bytes_checkpoints = 0; // of entries and slots
        size_t n_bytes_paused      = 0;
        size_t n_bytes_disk        = 0;
        size_t n_bytes_disk_limit  = 0; // 0: no limit, or no disk

        size_t n_entries      = 0;
        size_t n_entries_disk = 0;

        uint64_t n_hits         = 0; // tasks that continued from an entry or from the cells of another slot
        uint64_t n_misses       = 0; // tasks that found no usable state, also not in their slot
        uint64_t n_tokens_saved = 0; // tokens that the hits did not compute

        // the same for the store. its hits and saved tokens are also part of those above
        uint64_t n_hits_disk         = 0;
        uint64_t n_misses_disk       = 0;
        uint64_t n_tokens_saved_disk = 0;

        std::vector<size_t> n_bytes_checkpoints_by_slot;
        std::vector<size_t> n_bytes_paused_by_slot;
    };

    // restore the cells of a slot with read(), and free memory for that. return false if there was no place
    using read_back_t = std::function<bool(server_slot_view & slot, const std::function<bool()> & read)>;

    server_conversations(const common_params & params, const server_contexts & ctxs, server_slots & slots);

    void set_read_back(read_back_t fn) { read_back = std::move(fn); }

    // store: receives the entries that RAM drops, and is a source of load(). may be null
    void set_store(server_conversation_store * store) { this->store = store; }

    // called by load_model(), also when the server wakes up: apply --cache-ram. entries from before the sleep stay
    void init();

    // restore the longest usable state to the slot that was chosen for a task
    // lora: adapters of the task
    void load(int id_slot, const server_task & task, const std::vector<common_adapter_lora_info> & lora);

    // copy the conversation of a slot that is about to lose its cells. return false if it has no entry after that
    // may_drop: drop other entries if the limit demands it
    bool save(server_slot_view & slot, bool may_drop = true);

    // --cache-idle-slots: copy the conversations of idle slots as long as RAM has room. free their cells if other slots can use them
    void save_idle();

    // copy the conversations of all slots, and clear the slots, before their contexts are freed. the entries stay
    void sleep();

    // offer the conversations of all slots, and all entries, to the store, the last used ones first
    // call before the process ends
    void save_to_store();

    // return false without --cache-ram, or while RAM is short
    bool can_save() const { return is_enabled && !is_ram_short; }

    // make room for n_bytes of a paused request. return false if they do not fit. call only if can_save()
    bool reserve(size_t n_bytes);

    // make room for the next checkpoint of a slot, whose older checkpoints are dropped if nothing else helps
    // return false if the limit is too small for the checkpoint
    bool reserve_checkpoint(int id_slot);

    // drop what exceeds the limit, as checkpoints were copied between slots or read from a file
    void trim();

    // a batch found no place for n cells: find out whether RAM is short, and drop the oldest entry then
    // return false if nothing was dropped
    bool drop_if_short(int32_t n);

    // drop the draft's part of all entries, because the draft was unloaded
    void drop_drafts();

    // end the shortage of RAM: memory may have been freed since
    void end_shortage() { is_ram_short = false; }

    usage get_usage() const;

private:
    using entries_t = std::list<server_conversation>;

    // a state that a slot could receive
    struct source {
        int32_t n_usable = 0;
        int32_t n_tokens = 0;

        server_conversation              * entry = nullptr;
        server_slot_view                 * slot  = nullptr;
        server_conversation_store::found   stored;

        std::shared_ptr<const server_conversation> read; // the conversation of `stored`

        bool is_stored() const { return stored.n_usable > 0; }
    };

    enum restore_result {
        RESTORED,
        NO_PLACE,   // the slot has no cells now
        UNREADABLE, // no search finds this source again
    };

    // fewer tokens are not worth a copy of the state that has them
    static constexpr int32_t N_LEAST = 16;

    // return the conversation of a slot, null if it cannot be read or there is no memory
    std::unique_ptr<server_conversation> copy(server_slot_view & slot);

    // offer the conversation of a slot to the store, because RAM has no room for it. return false if there is none
    bool save_to_store(server_slot_view & slot);

    // return the entry that save() found or made, null if there is none
    server_conversation * save_entry(server_slot_view & slot, bool may_drop);

    // return true if the slot has cells of a conversation
    bool has_conversation(const server_slot_view & slot) const;

    // return the bytes that copy() needs, 0 if the slot cannot be copied
    size_t n_bytes_copy(const server_slot_view & slot) const;

    // return the tokens of a task that need not be computed with the cells of a slot
    int32_t n_usable(const server_slot_view & slot, const server_conversation_query & query) const;

    // return true if all tokens of one prompt are the first ones of another, computed with the same adapters
    bool is_start_of(const server_prompt & start, const server_prompt & prompt) const;

    // return the source with the most usable tokens, n_usable 0 if none is worth a copy
    // n_own:        number of usable tokens in the slot's own cells
    // n_tokens_max: number of tokens that a source may have
    source find(const server_conversation_query & query, const server_slot_view & slot, int32_t n_own, int32_t n_tokens_max);

    // replace the cells of a slot by a source
    restore_result restore(server_slot_view & slot, const source & source);
    restore_result restore(server_slot_view & slot, const server_conversation & from);

    // write the bytes of a conversation into the cells. return false without place
    // is_invalid: set if the state can never be restored
    bool write(server_slot_view & slot, const server_conversation & from, bool & is_invalid);

    // return the bytes that the limit counts
    size_t n_bytes() const;

    // return the same without the entries
    size_t n_bytes_of_slots() const;

    // return true if the limit allows more bytes
    bool fits(size_t n_bytes_more) const;

    // free memory until the limit allows more bytes. return false if it cannot allow them
    bool make_room(size_t n_bytes_more);

    // free the least valuable part. return false if there is none
    bool drop_one();

    // drop the least recently used entry. return false if there is none
    bool drop_oldest();

    // drop the oldest checkpoint that is not worth much. return false if there is none
    static bool thin_out(server_prompt & prompt);

    // return true if the caches of the contexts are in RAM as well
    bool is_cache_in_ram() const;

    const common_params   & params;
    const server_contexts & ctxs;
    server_slots          & slots;

    read_back_t                 read_back;
    server_conversation_store * store = nullptr;

    entries_t                   entries;
    const server_conversation * in_use = nullptr; // must not be dropped at the moment

    int id_losing = -1; // slot whose cells are about to be lost

    bool   is_enabled    = false;
    bool   is_ram_short  = false; // while room is made for a batch
    size_t n_bytes_limit = 0;     // 0: no limit

    uint64_t n_hits         = 0;
    uint64_t n_misses       = 0;
    uint64_t n_tokens_saved = 0;

    uint64_t n_hits_disk         = 0;
    uint64_t n_tokens_saved_disk = 0;
};
