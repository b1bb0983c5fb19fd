#pragma once

// A pool of cells that is too small for all slots at once: who waits, who gives up cells, who ends.
//
// A part of server_context_impl (impl_t), included there once the slots are defined. In this order:
// 1. a prompt starts when it has a place beside those that run, the oldest request first. Nobody waits for a pool of his own
// 2. idle slots give up their cells, the least recently used first. They are saved to --cache-ram before
// 3. the youngest request is paused: what it has in its cells goes to memory that --cache-ram allows, and comes back when there
//    is a place again. It goes on where it was
// 4. the slot that lacks a cell ends (server_oom::end_slot())
//
// Rejected: keeping cells free for all that a request may generate. Clients ask for much more than they use, and slots that could
// run together would wait for each other. Which request runs out of cells is known when it does.

#include "server-memory.h"

#include "common.h"
#include "llama-kv.h"
#include "llama.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

template <typename impl_t>
class server_pool {
protected:
    // call before a batch is made
    void pool_resume() {
        pool_has_room();

        // what came on demand is worth less than a request
        for (auto & slot : self().slots) {
            while (slot.state == SLOT_STATE_STARTED && is_never(slot.task->n_tokens()) && self().budget.drop_spare()) {
            }
        }

        for (auto * slot = next_waiting(); slot && slot->paused; slot = next_waiting()) {
            const int32_t n_tokens = n_prompt(*slot, slot->paused->prompt, slot->state_paused);

            if (!find_place(*slot, n_tokens) && has_ahead(*slot)) {
                return;
            }
            // storage is taken in blocks, so there can be less than has_place() sees: not again with every batch
            if (has_ahead(*slot) && slot->task->id == id_no_place && ggml_time_us() < t_no_place_us + T_RETRY_US && pool_idle_slots(slot).empty()) {
                return;
            }
            if (!resume(*slot)) {
                return;
            }
        }
    }

    // call before a slot starts with its prompt. false: it waits, or it was refused
    bool pool_admit(server_slot & slot) {
        const int32_t n_tokens = slot.task->n_tokens();

        const bool has_media = lacks_media(slot, 0);
        if (has_media && !slot.mctx) {
            slot.mctx = self().mctx.get_loaded(); // it gave it up, below
        }
        const bool lacks_mctx = has_media && !slot.mctx;

        // unless somebody else uses a part that came on demand: it goes then, see pool_resume()
        const bool is_full = is_never(n_tokens);

        if (is_full && (slot.mctx || !self().mctx.is_on_demand())) {
            pool_refuse(slot);
            slot.release();

            return false;
        }

        const auto * first = next_waiting();

        const bool is_next = !first || first->task->id >= slot.task->id;

        // cells of its own are of no use to others in a cache of several streams. what is too long is refused at once
        const bool is_free = !self().params_base.kv_unified || n_tokens >= slot.n_ctx ||
            (is_next && !is_full && (!has_ahead(slot) || (!lacks_mctx && find_place(slot, n_needed(slot)))));

        if (slot.waits == is_free) {
            SLT_INF(slot, "%s, n_tokens = %d\n", is_free ? "has a place now" : "waits for cells", n_tokens);
        }
        const bool has_waited = std::exchange(slot.waits, !is_free);

        if (!is_free) {
            leave_mctx(slot);
            self().share_wait(slot);
        } else if (has_waited) {
            self().share_prefix(slot);
        }
        if (is_free && lacks_mctx && !self().take_mctx(slot, *slot.task)) {
            slot.release();

            return false;
        }

        return is_free;
    }

    // no cell was found. if that is for want of the memory that --cache-ram takes as well, what is saved there is the first to go
    // n: cells that were wanted
    bool pool_drop_saved(int32_t n) {
        is_ram_short = self().params_base.kv_budget_mib == 0 && pool_is_in_ram() && server_memory_is_short(self().ctx_tgt, n);

        auto & cache = self().prompt_cache;
        if (!cache || cache->states.empty() || !is_ram_short) {
            return false;
        }

        SRV_WRN("no memory, dropping the prompt cache, %zu prompts\n", cache->states.size());
        cache->states.clear();

        return true;
    }

    // what that was true of is done: memory may be there again
    void pool_has_room() {
        is_ram_short = false;
    }

    // no idle slot has cells: one that waits gives up its own, or the youngest. false: there is none
    bool pool_pause(int32_t off) {
        return pool_clear_started() || pause_youngest(off);
    }

    // it has not begun, is paused, cannot be batched with what is in the batch, or waits for a prompt of which that is true: it has
    // no part in the batch
    bool pool_waits(const server_slot & slot) const {
        const auto & slots  = self().slots;
        const auto & tokens = self().batch.tokens;

        const auto is_out = [&](const server_slot & cur) {
            const bool is_begun = cur.state == SLOT_STATE_PROCESSING_PROMPT || (cur.state == SLOT_STATE_GENERATING && cur.i_batch == -1);

            return cur.state == SLOT_STATE_STARTED || cur.paused ||
                (is_begun && std::none_of(tokens.begin(), tokens.end(), [&](const auto & token) { return token.id_slot == cur.id; }));
        };

        return is_out(slot) || (slot.state == SLOT_STATE_WAIT_OTHER && std::any_of(slots.begin(), slots.end(), [&](const auto & other) {
            return other.is_processing() && other.task->id == slot.task->id_parent && is_out(other);
        }));
    }

    // another time is no better
    void pool_refuse(const server_slot & slot) {
        const int32_t n_tokens = slot.task->n_tokens();
        const int32_t n_max    = n_cells_max();

        // a cache begins with half a block
        const int32_t n_held = n_tokens > n_max ? n_max : std::min(n_tokens - 1, std::max(N_BLOCK/2, n_max - N_BLOCK));

        self().send_error(slot, string_format("request (%d tokens) exceeds what --kv-budget %d holds (%d tokens), try increasing it",
                n_tokens, self().params_base.kv_budget_mib, n_held), ERROR_TYPE_EXCEED_CONTEXT_SIZE);
    }

    // has a prompt found no cells that had all of them for itself?
    bool pool_is_never(const server_slot & slot) const {
        const auto & slots = self().slots;

        const bool is_alone = std::all_of(slots.begin(), slots.end(), [&](const server_slot & other) {
            return &other == &slot || other.prompt.n_tokens() == 0;
        });

        return is_alone && is_never(slot.task->n_tokens() + N_BLOCK, n_cells_max());
    }

    // idle slots that have cells, the least recently used first
    std::vector<std::reference_wrapper<server_slot>> pool_idle_slots(const server_slot * except = nullptr) {
        std::vector<std::reference_wrapper<server_slot>> res;
        for (auto & slot : self().slots) {
            if (&slot != except && !slot.is_processing() && slot.prompt.n_tokens() > 0) {
                res.push_back(slot);
            }
        }

        std::stable_sort(res.begin(), res.end(), [](const server_slot & a, const server_slot & b) {
            return a.t_last_used < b.t_last_used;
        });

        return res;
    }

    // a slot that has not started yet, or waits for its parent, has the prompt of its last request
    // with_kept: also one that frees nothing by itself
    bool pool_clear_started(const server_slot * except = nullptr, bool with_kept = true) {
        for (auto & slot : self().slots) {
            const bool is_waiting = slot.state == SLOT_STATE_STARTED || slot.state == SLOT_STATE_WAIT_OTHER;

            if (&slot != except && is_waiting && slot.prompt.n_tokens() > 0 && (with_kept || !is_kept(slot, except))) {
                SLT_WRN(slot, "not started yet, purging %d tokens\n", slot.prompt.n_tokens());
                pool_save(slot);
                slot.prompt_clear();
                return true;
            }
        }
        return false;
    }

    size_t pool_n_bytes_paused() const {
        size_t res = 0;
        for (const auto & slot : self().slots) {
            res += slot.paused ? slot.paused->size() : 0;
        }
        return res;
    }

    // what a slot is about to give up
    void pool_save(const server_slot & slot) {
        if (self().prompt_cache && !is_ram_short && slot.prompt_save(*self().prompt_cache)) {
            self().prompt_cache->update();
        }
    }

    // what a slot had comes back: what came on demand and idle slots make room for it, before cells take smaller types for it
    // read: returns false if there is none, and the slot has no cells then
    bool pool_read(const server_slot & slot, const std::function<bool()> & read) {
        while (self().budget.has_spare() || !pool_idle_slots(&slot).empty()) {
            {
                const server_budget_hold hold(self().params_base.kv_budget.get(), true);
                if (read()) {
                    return true;
                }
            }
            const bool is_dropped = server_memory_is_short(self().ctx_tgt) && self().budget.drop_spare();
            if (!is_dropped && !self().clear_idle_slot(&slot)) {
                break;
            }
        }

        return read();
    }

    // the same for a file that a slot was saved to. tokens: as many as it has, is_short: memory is what it lacks
    // returns what llama_state_seq_load_file() does, throws if they are not those of a slot
    size_t pool_read_file(const server_slot & slot, const char * path, llama_tokens & tokens, bool & is_short) {
        size_t res = 0;

        pool_read(slot, [&]() {
            const auto before = llama_get_memory_usage(slot.ctx_tgt);

            size_t n_tokens = 0;
            res = llama_state_seq_load_file(slot.ctx_tgt, path, slot.id, tokens.data(), tokens.size(), &n_tokens);

            if (res != 0) {
                is_short = false;
                return true;
            }

            // a cache can have read its part
            llama_memory_seq_rm(llama_get_memory(slot.ctx_tgt), slot.id, -1, -1);

            const size_t n_cells  = server_tokens::deserialize(tokens, (bool) self().mctx).size();
            const bool   can_fit  = 0 < n_cells && n_cells <= std::min<size_t>(slot.n_ctx, before.n_cells_max);
            const bool   is_full  = before.n_cells_max - before.n_cells_used < n_cells;
            const bool   can_tell = self().params_base.kv_unified && llama_model_n_swa(llama_get_model(slot.ctx_tgt)) == 0;

            size_t n_idle = 0;
            for (const server_slot & other : pool_idle_slots(&slot)) {
                n_idle += llama_memory_seq_usage(slot.ctx_tgt, other.id).cells.n_cells;
            }
            const bool can_help = before.n_cells_max - before.n_cells_used + n_idle >= n_cells; // or it is for nothing

            is_short = can_fit && server_memory_is_short_for_state(slot.ctx_tgt, before, n_cells, can_tell);

            return !is_short && !(can_fit && is_full && can_help);
        });

        return res;
    }

    // are the caches in the memory that --cache-ram is in, too?
    // note: llama_supports_gpu_offload() is true for every build with the RPC backend, also without a server
    bool pool_is_in_ram() const {
        const auto & params = self().params_base;

        return params.no_kv_offload || params.n_gpu_layers == 0 ||
            (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) && !ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_IGPU));
    }

private:
    static constexpr int32_t N_BLOCK = 512; // cells that a growth takes or keeps beyond those that are asked for

    bool is_ram_short = false; // while room is made for a batch

    static constexpr int64_t T_RETRY_US = 1000*1000;

    // the last one that could not be resumed, and when
    int     id_no_place   = -1;
    int64_t t_no_place_us = 0;

    static bool is_running(const server_slot & slot) {
        return slot.state == SLOT_STATE_PROCESSING_PROMPT || slot.state == SLOT_STATE_DONE_PROMPT || slot.state == SLOT_STATE_GENERATING;
    }

    // are all cells of the slot also those of one that runs, or of the one that needs a place?
    bool is_kept(const server_slot & slot, const server_slot * except) const {
        if (!self().params_base.kv_share_prefix) {
            return false;
        }

        const auto usage = llama_memory_seq_usage(slot.ctx_tgt, slot.id);
        if (usage.cells.n_cells == 0 || usage.cells.n_shared < usage.cells.n_cells) {
            return false;
        }

        const auto & slots = self().slots;

        return std::any_of(slots.begin(), slots.end(), [&](const server_slot & other) {
            return &other != &slot && (&other == except || is_running(other)) && self().share_has(other) &&
                other.prompt.tokens.get_common_prefix(slot.prompt.tokens) >= slot.prompt.tokens.size();
        });
    }

    // does it have its place before the slot? also one that starts with the same batch, and was asked for before
    static bool is_ahead(const server_slot & other, const server_slot & slot) {
        return &other != &slot && (is_running(other) || (other.state == SLOT_STATE_STARTED && other.task->id < slot.task->id));
    }

    bool has_ahead(const server_slot & slot) const {
        return std::any_of(self().slots.begin(), self().slots.end(), [&](const server_slot & other) { return is_ahead(other, slot); });
    }

    // the oldest request that waits for cells
    server_slot * next_waiting() {
        server_slot * res = nullptr;
        for (auto & slot : self().slots) {
            if ((slot.paused || slot.waits) && (!res || slot.task->id < res->task->id)) {
                res = &slot;
            }
        }
        return res;
    }

    // cells that the context can have: all, or what the budget holds of the smallest types
    // ignore_draft: without what a draft's cells take, which go with the slots that have them
    int32_t n_cells_max(bool ignore_draft = false) const {
        const auto & params = self().params_base;
        const auto   usage  = llama_get_memory_usage(self().ctx_tgt);

        if (params.kv_budget_mib == 0 || usage.n_cells_max == 0) {
            return usage.n_cells_max;
        }

        const auto budget = llama_memory_budget_get_usage(params.kv_budget.get());

        double size_cell = double(usage.reserved)/usage.n_cells_max;
        size_t n_states  = 0; // of recurrent states, which are no part of the budget

        if (llama_model_is_hybrid(self().model_tgt)) {
            if (usage.n_cells >= usage.n_cells_max || usage.committed >= usage.reserved) {
                return usage.n_cells_max;
            }
            size_cell = double(usage.reserved - usage.committed)/(usage.n_cells_max - usage.n_cells);
            n_states  = usage.reserved - std::min<double>(usage.reserved, usage.n_cells_max*size_cell);
        }

        const size_t n_others = ignore_draft ? budget.other : budget.committed - std::min(budget.committed, usage.committed - std::min(usage.committed, n_states));
        const size_t n_bytes  = budget.n_bytes - std::min(budget.n_bytes, n_others);

        return std::min<double>(usage.n_cells_max, n_bytes/(size_cell*type_ratio()));
    }

    // size of a cell of the smallest types, against now
    double type_ratio() const {
        const auto size = [](ggml_type type) { return double(ggml_type_size(type))/ggml_blck_size(type); };

        ggml_type type_k = GGML_TYPE_COUNT;
        ggml_type type_v = GGML_TYPE_COUNT;
        llama_get_memory_type(self().ctx_tgt, &type_k, &type_v);

        const auto & types = self().params_base.kv_auto_quant;
        if (types.empty() || type_k == GGML_TYPE_COUNT) {
            return 1.0;
        }

        const double last = size(types.back());

        return (std::min(last, size(type_k)) + std::min(last, size(type_v)))/(size(type_k) + size(type_v));
    }

    // not of models with a recurrent state, whose cells alone are in the budget
    bool is_never(int32_t n_tokens, int32_t n_max) const {
        const auto * model = self().model_tgt;

        return self().params_base.kv_budget_mib > 0 && n_tokens > n_max && n_max > 0 &&
            !llama_model_is_recurrent(model) && !llama_model_is_hybrid(model);
    }

    bool is_never(int32_t n_tokens) const {
        return is_never(n_tokens, n_cells_max(true));
    }

    // cells of the slot that its prompt goes on with, or frees
    int32_t n_kept(const server_slot & slot) const {
        const bool is_shared = self().params_base.kv_share_prefix && self().share_has(slot);

        return is_shared ? std::min<int32_t>(slot.prompt.tokens.get_common_prefix(slot.task->tokens), impl_t::share_n_computed(slot)) : impl_t::share_n_computed(slot);
    }

    // tokens that it has, or will have: one that generates has dropped some of them where its context was shifted
    static int32_t n_prompt(const server_slot & slot, const server_prompt & prompt, slot_state state) {
        return state == SLOT_STATE_GENERATING ? prompt.n_tokens() : std::max(slot.task->n_tokens(), prompt.n_tokens());
    }

    // cells that its prompt still takes
    int32_t n_needed(const server_slot & slot) const {
        return is_running(slot) ? n_prompt(slot, slot.prompt, slot.state) - impl_t::share_n_computed(slot) : slot.task->n_tokens() - n_kept(slot);
    }

    // is there a place for n cells more, with what the others' prompts still need and a few tokens ahead?
    bool has_place(const server_slot & slot, int32_t n) const {
        const int32_t n_max = n_cells_max();
        if (n_max == 0) {
            return true; // no cells
        }

        int64_t n_all = (int64_t) llama_get_memory_usage(self().ctx_tgt).n_cells_used + n;
        for (const auto & other : self().slots) {
            if (is_ahead(other, slot)) {
                n_all += n_needed(other);
            }
        }

        const int32_t n_ahead = slot.n_remaining() < 0 ? n_max : slot.n_remaining();

        return n_all + std::min(n_ahead, n_max/16) <= n_max;
    }

    // idle slots, and those that have not started, make one. not for nothing
    bool find_place(const server_slot & slot, int32_t n) {
        int32_t n_free = 0; // at most
        for (const auto & other : self().slots) {
            if (&other != &slot && !is_running(other) && !is_kept(other, &slot)) {
                n_free += llama_memory_seq_usage(other.ctx_tgt, other.id).cells.n_cells;
            }
        }
        // note: in a budget more goes with them than their cells
        if (self().params_base.kv_budget_mib == 0 && !has_place(slot, n - n_free)) {
            return false;
        }

        while (!has_place(slot, n)) {
            if (!self().try_clear_idle_slots() && !pool_clear_started(&slot, false)) {
                return false;
            }
        }
        return true;
    }

    // has its prompt media beyond the first n tokens? these end at a chunk
    static bool lacks_media(const server_slot & slot, size_t n) {
        const auto & tokens = slot.task->tokens;

        return n < tokens.size() && (tokens[n] == LLAMA_TOKEN_NULL || tokens.find_next_media_chunk(n).first);
    }

    // while it has no place, a slot keeps no projector that comes on demand: those that have one, or wait before it, may need the
    // memory
    void leave_mctx(server_slot & slot) {
        if (self().mctx.is_auto()) {
            slot.mbatch.reset();
            slot.mctx = {};
        }
    }

    static bool can_pause(const server_slot & slot) {
        const auto & task = *slot.task;

        return (task.type == SERVER_TASK_TYPE_COMPLETION || task.type == SERVER_TASK_TYPE_INFILL) && !task.is_parent() && !task.is_child();
    }

    bool pause_youngest(int32_t off) {
        server_slot * youngest = nullptr;

        int n_running = 0;
        for (auto & slot : self().slots) {
            n_running += is_running(slot);
            if (is_running(slot) && can_pause(slot) && (!youngest || slot.task->id > youngest->task->id)) {
                youngest = &slot;
            }
        }

        return youngest && n_running > 1 && pause(*youngest, off);
    }

    // the slot gives up its cells, and its part of the batch from off on
    bool pause(server_slot & slot, int32_t off) {
        const auto & tokens = self().batch.tokens;

        const auto n_batch = std::count_if(tokens.begin() + off, tokens.end(), [&](const auto & token) { return token.id_slot == slot.id; });

        if (server_memory_is_lost(slot.ctx_tgt, slot.id, slot.prompt.n_tokens() - n_batch)) {
            return false; // there is nothing to come back with
        }

        auto saved = save(slot);
        if (!saved) {
            return false;
        }

        leave_mctx(slot);

        slot.prompt.tokens.keep_first(slot.prompt.n_tokens() - server_batch_drop(self().batch, slot.id, off));
        slot.i_batch = -1;

        SLT_WRN(slot, "no cells for all, paused, n_tokens = %d, n_gen = %d\n", slot.prompt.n_tokens(), (int) slot.stats.n_gen);

        saved->prompt = std::move(slot.prompt);
        slot.prompt_clear();

        slot.paused       = std::move(saved);
        slot.state_paused = slot.state == SLOT_STATE_DONE_PROMPT ? SLOT_STATE_PROCESSING_PROMPT : slot.state;
        slot.state        = SLOT_STATE_WAIT_OTHER;

        return true;
    }

    // returns null where --cache-ram has no room for it
    std::unique_ptr<server_prompt_cache_state> save(const server_slot & slot) {
        auto & cache = self().prompt_cache;
        if (!cache || is_ram_short) {
            return nullptr;
        }

        auto * ctx_dft = server_memory_is_lost(slot.ctx_dft, slot.id, slot.prompt.n_tokens()) ? nullptr : slot.ctx_dft;

        const auto size = [&](llama_context * ctx) { return ctx ? llama_state_seq_get_size(ctx, slot.id) : 0; };

        size_t n_bytes = size(slot.ctx_tgt) + size(ctx_dft);
        for (const auto & ckpt : slot.prompt.checkpoints) {
            n_bytes += ckpt.size();
        }
        if (cache->limit_size > 0 && cache->n_bytes_paused() + n_bytes > cache->limit_size) {
            return nullptr;
        }
        while (cache->limit_size > 0 && !cache->states.empty() && cache->size() + n_bytes > cache->limit_size) {
            cache->states.pop_front();
        }

        try {
            auto res = std::make_unique<server_prompt_cache_state>();

            const auto read = [&](llama_context * ctx, std::vector<uint8_t> & data) {
                data.resize(size(ctx));
                // none although there are cells: a copy of them waits for memory
                return !ctx || (!data.empty() && llama_state_seq_get_data(ctx, data.data(), data.size(), slot.id) == data.size());
            };

            if (!read(slot.ctx_tgt, res->data.main)) {
                return nullptr;
            }
            if (!read(ctx_dft, res->data.drft)) {
                res->data.drft.clear(); // it takes the prompt in anew
            }
            return res;
        } catch (const std::bad_alloc &) {
            return nullptr;
        }
    }

    // returns false if it could not be
    bool resume(server_slot & slot) {
        if (lacks_media(slot, slot.paused->prompt.n_tokens()) && !slot.mctx) {
            slot.mctx = self().mctx.get_loaded();

            // to load it takes memory from those that run
            if (!slot.mctx && self().params_base.kv_unified && has_ahead(slot)) {
                return false;
            }
            if (!slot.mctx && !self().take_mctx(slot, *slot.task)) {
                slot.release();
                return true;
            }
        }

        const auto write = [&](llama_context * ctx, const std::vector<uint8_t> & data) {
            return !data.empty() && llama_state_seq_set_data(ctx, data.data(), data.size(), slot.id) == data.size();
        };

        const auto write_tgt = [&]() { return write(slot.ctx_tgt, slot.paused->data.main); };

        bool ok = pool_read(slot, write_tgt);
        while (!ok && !has_ahead(slot) && pool_clear_started(&slot)) {
            ok = write_tgt();
        }
        if (!ok) {
            slot.mem.seq_rm(slot.id, -1, -1);
        }
        if (!ok && has_ahead(slot)) {
            leave_mctx(slot);
            id_no_place   = slot.task->id;
            t_no_place_us = ggml_time_us();
            return false; // until one of these ends
        }

        auto saved = std::move(slot.paused);

        slot.state  = slot.state_paused;
        slot.prompt = std::move(saved->prompt);

        if (!ok) {
            self().end_slot(slot, self().batch.size());
            slot.prompt_clear();
            return true;
        }

        SLT_INF(slot, "resumed, n_tokens = %d\n", slot.prompt.n_tokens());

        if (self().draft_lacks_some(slot) || (slot.ctx_dft && !write(slot.ctx_dft, saved->data.drft))) {
            self().draft_drop(slot);
        }
        if (slot.can_speculate() && slot.state == SLOT_STATE_GENERATING) {
            common_speculative_begin(slot.spec, slot.id, slot.prompt.tokens.get_text_tokens());
        }

        return true;
    }

    impl_t & self() {
        return static_cast<impl_t &>(*this);
    }

    const impl_t & self() const {
        return static_cast<const impl_t &>(*this);
    }
};
