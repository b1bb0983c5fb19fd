#pragma once

#include "server-contexts.h"
#include "server-slot.h"
#include "server-task.h"

#include "common.h"

#include <cstddef>
#include <cstdint>
#include <memory>

// The conversations in RAM (--cache-ram): saved there before a slot gives up its cells, and dropped if that RAM runs out.
class server_saved_prompts {
public:
    // cache: null with --cache-ram 0
    server_saved_prompts(const common_params & params, const server_contexts & ctxs, std::unique_ptr<server_prompt_cache> & cache);

    // return false without --cache-ram, or while RAM is short
    bool can_save() const { return cache && !is_ram_short; }

    // save a slot that is about to give up its cells. do nothing unless can_save()
    void save(server_slot_view & slot);

    // a batch found no place for n cells: find out whether RAM is short, and drop all saved prompts then
    // return false if nothing was dropped
    bool drop_if_short(int32_t n);

    // drop all saved prompts because nobody uses the server. return false if there are none
    bool drop_unused();

    // make room for n_bytes of a paused request by dropping the oldest prompts. return false if it does not fit
    // call only if can_save()
    bool reserve(size_t n_bytes);

    // end the shortage of RAM: memory may have been freed since
    void end_shortage() { is_ram_short = false; }

    // return true if the caches of the contexts are in RAM as well
    bool is_cache_in_ram() const;

private:
    const common_params   & params;
    const server_contexts & ctxs;

    std::unique_ptr<server_prompt_cache> & cache;

    bool is_ram_short = false; // while room is made for a batch
};
