#include "server-conversations.h"

#include "server-memory.h"

#include <algorithm>
#include <new>
#include <utility>

#ifdef __GLIBC__
#include <malloc.h>
#endif

server_conversations::server_conversations(const common_params & params, const server_contexts & ctxs, server_slots & slots)
    : params(params), ctxs(ctxs), slots(slots) {}

server_conversations::~server_conversations() {
    if (is_shared) {
        llama_memory_budget_set_reclaim(params.kv_budget.get(), nullptr, nullptr);
    }
}

void server_conversations::init() {
    is_enabled    = params.cache_ram_mib != 0;
    is_shared     = params.cache_ram_budget && params.kv_budget;
    n_bytes_limit = params.cache_ram_mib > 0 ? size_t(params.cache_ram_mib)*1024*1024 : 0;

    if (is_shared) {
        llama_memory_budget_set_reclaim(params.kv_budget.get(), [](size_t n_bytes, void * user_data) {
            return ((server_conversations *) user_data)->reclaim(n_bytes);
        }, this);
    }

#ifdef __GLIBC__
    // by default, malloc keeps freed blocks of some MiB for later use. Then the memory of the process exceeds --cache-ram
    if (is_enabled) {
        mallopt(M_MMAP_THRESHOLD, 128*1024);
    }
#endif
}

static bool is_stateless(const server_task & task) {
    return task.type == SERVER_TASK_TYPE_EMBEDDING || task.type == SERVER_TASK_TYPE_RERANK;
}

// return the first position of the state that copy() would make of a sequence
static llama_pos pos_min_of_copy(const server_contexts & ctxs, llama_seq_id id) {
    const auto * mem = llama_get_memory(ctxs.ctx_tgt);

    // A recurrent memory also keeps older states, to which it returns after a rejected draft. copy() does not copy them, so the
    // copy begins at the last position.
    return ctxs.ctx_tgt_seq_rm_type == COMMON_CONTEXT_SEQ_RM_TYPE_RS
        ? llama_memory_seq_pos_max(const_cast<llama_memory_t>(mem), id)
        : llama_memory_seq_pos_min(const_cast<llama_memory_t>(mem), id);
}

void server_conversations::load(int id_slot, const server_task & task, const std::vector<common_adapter_lora_info> & lora) {
    auto & slot = slots[id_slot];

    if (!can_save()) {
        return;
    }

    id_losing = id_slot;
    in_use    = nullptr;

    const bool is_usable = !is_stateless(task) && task.params.cache_prompt && !lora_all_alora(lora);

    const server_conversation_query query = { task.tokens, ctxs, lora };

    // the last token of a prompt is always computed, because its logits are needed
    const int32_t n_max = std::max(0, task.n_tokens() - 1);

    int32_t n_own = 0;
    if (is_usable) {
        n_own = std::min(n_usable(slot, query), n_max);
    } else if (!is_stateless(task) && task.params.cache_prompt) {
        n_own = slot.prompt.tokens.get_common_prefix(task.tokens);
    }

    const int32_t n_lost = slot.prompt.n_tokens() - n_own;

    int32_t n_tokens_max = slot.n_ctx; // a longer state does not fit into the slot

    bool is_saved = false;
    bool is_found = false;

    while (is_usable && n_own < n_max) {
        auto from = find(query, slot, n_own, n_tokens_max);
        if (from.n_usable == 0) {
            break;
        }
        from.n_usable = std::min(from.n_usable, n_max);

        if (from.is_stored()) {
            from.read = store->read(from.stored); // read now, because save() can remove the file to make room
            if (!from.read) {
                continue;
            }
        }

        in_use   = from.entry;
        is_saved = is_saved || save(slot);

        const auto res = restore(slot, from);

        in_use   = nullptr;
        is_found = res == RESTORED;

        if (is_found) {
            SLT_INF(slot, "continues a conversation, n_tokens = %d, before: %d\n", from.n_usable, n_own);

            n_hits++;
            n_tokens_saved += from.n_usable - n_own;
            if (from.is_stored()) {
                n_hits_disk++;
                n_tokens_saved_disk += from.n_usable - n_own;
            }
            if (!lora.empty()) {
                slot.lora = lora; // otherwise, launch_slot_with_task() clears the slot, because its adapters differ
            }
            break;
        }

        // Continue the search. If the state can never be restored (UNREADABLE), find() does not return it again. If it did not
        // fit (NO_PLACE), a shorter state may fit.
        if (res == NO_PLACE) {
            n_tokens_max = from.n_tokens - 1;
        }
        if (slot.prompt.n_tokens() == 0) {
            n_own = 0;
        }
    }

    if (!is_found && !is_saved && n_lost >= N_LEAST) {
        const bool is_large = 4*n_lost >= slot.prompt.n_tokens();
        auto * saved = save_entry(slot, is_large, is_large);
        if (saved && !is_large && saved->prompt.n_tokens() == slot.prompt.n_tokens()) {
            saved->t_last_used = 0; // the slot keeps most of this conversation, so the entry may be dropped first
        }
        if (!saved && is_large) {
            save_to_store(slot);
        }
    }
    if (!is_found && is_usable && n_own < std::min(N_LEAST, n_max)) {
        n_misses++;
    }

    id_losing = -1;
}

server_conversations::source server_conversations::find(
        const server_conversation_query & query, const server_slot_view & slot, int32_t n_own, int32_t n_tokens_max) {
    source best;

    const auto add = [&](const source & cur) {
        const int32_t n_max  = query.tokens.size() - 1;
        const int32_t n_gain = std::min(cur.n_usable, n_max) - n_own;

        // Skip sources that cost more to copy than they save: a gain of a few tokens, or a long state with a short usable prefix.
        // Unrelated prompts often begin with the same few tokens.
        const bool is_short = (n_gain < 4 && 2*n_gain < n_max) || 2*N_LEAST*n_gain < cur.n_tokens;
        if (n_gain <= 0 || is_short || cur.n_tokens > n_tokens_max) {
            return;
        }

        const bool is_shorter = best.entry && cur.entry && cur.n_tokens < best.n_tokens;
        if (cur.n_usable > best.n_usable || (cur.n_usable == best.n_usable && is_shorter)) {
            best = cur;
        }
    };

    for (auto & entry : entries) {
        source cur;
        cur.n_usable = query.n_usable(entry);
        cur.n_tokens = entry.prompt.n_tokens();
        cur.entry    = &entry;
        add(cur);
    }

    int32_t n_shared = 0; // tokens that the slot can share with the cells of another slot, without a copy

    for (auto & other : slots) {
        if (other.id == slot.id || !has_conversation(other)) {
            continue;
        }

        const auto & provenance = other.prompt.provenance;
        if (!query.lora.empty() && !server_has_same_lora(provenance.lora, query.lora)) {
            continue;
        }

        const int32_t n = std::min(n_usable(other, query), query.lora.empty() ? INT32_MAX : provenance.n_exact);
        if (!other.is_processing()) {
            source cur;
            cur.n_usable = n;
            cur.n_tokens = other.prompt.n_tokens();
            cur.slot     = &other;
            add(cur);
        }
        // with --cache-idle-slots, an idle slot loses its cells before the task starts, so that the task cannot share them
        const bool can_share = other.is_running() || (!params.cache_idle_slots && !other.is_processing() && other.task_prev);
        if (params.kv_share_prefix && can_share && !other.prompt.tokens.has_media()) {
            n_shared = std::max(n_shared, std::min(n, provenance.n_exact));
        }
    }

    if (store) {
        source cur;
        cur.stored   = store->find(query);
        cur.n_usable = cur.stored.n_usable;
        cur.n_tokens = cur.stored.n_tokens;
        add(cur);
    }

    return best.n_usable > n_shared ? best : source {};
}

server_conversations::restore_result server_conversations::restore(server_slot_view & slot, const source & source) {
    if (source.entry) {
        return restore(slot, *source.entry);
    }

    if (source.slot) {
        in_use = save_entry(*source.slot, false, false);
        if (in_use) {
            return restore(slot, *in_use);
        }
    }

    if (source.is_stored()) {
        const auto res = restore(slot, *source.read);
        if (res == UNREADABLE) {
            store->forget(source.stored);
        }
        return res;
    }

    const auto from = copy(*source.slot);

    return from && restore(slot, *from) == RESTORED ? RESTORED : NO_PLACE;
}

server_conversations::restore_result server_conversations::restore(server_slot_view & slot, const server_conversation & from) {
    bool is_invalid = false;

    const bool ok = read_back(slot, [&]() {
        try {
            return write(slot, from, is_invalid);
        } catch (const std::bad_alloc &) {
            slot.prompt_clear(); // there is no memory for the tokens and the checkpoints
            return false;
        }
    });

    const auto it = std::find_if(entries.begin(), entries.end(), [&](const auto & cur) { return &cur == &from; });
    if (it != entries.end()) {
        if (ok) {
            it->t_last_used = ggml_time_us();
        } else if (is_invalid) {
            entries.erase(it); // otherwise, the restore fails again for each prompt that this entry matches best
        }
    }

    return ok ? RESTORED : is_invalid ? UNREADABLE : NO_PLACE;
}

bool server_conversations::write(server_slot_view & slot, const server_conversation & from, bool & is_invalid) {
    const auto read = [&](llama_context * ctx, const std::vector<uint8_t> & data) {
        return llama_state_seq_set_data_ext(ctx, data.data(), data.size(), slot.id, 0) == data.size();
    };

    const int32_t n_tokens = from.prompt.n_tokens();

    if (!read(slot.ctx_tgt, from.data.main)) {
        is_invalid = server_memory_is_free(slot.ctx_tgt, n_tokens);
        slot.prompt_clear();
        return false;
    }

    int32_t n_draft_retry = from.prompt.n_draft_retry;

    if (slot.ctx_dft) {
        // The draft model must compute the prompt again if the state lacks the draft's part, or if the draft lacked memory when
        // the state was saved. In the second case, it is not known which tokens the draft lacks.
        bool is_lacking = from.data.drft.empty() || n_draft_retry != -1;

        if (!is_lacking && !read(slot.ctx_dft, from.data.drft)) {
            if (!server_memory_is_short(slot.ctx_dft) && !server_memory_is_full(slot.ctx_dft, n_tokens)) {
                is_invalid = true;
                slot.prompt_clear();
                return false;
            }
            is_lacking = true; // the state of the target is restored, and only the draft lacks memory
        }
        if (is_lacking) {
            llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, -1, -1);
            n_draft_retry = 0;
        }
    }

    // The conversation is now also in the cells of the slot. So make_room() can drop its entry, and only the checkpoints exist
    // twice.
    slot.prompt.checkpoints.clear();
    const bool has_room = make_room(server_n_bytes_checkpoints(from.prompt));

    slot.prompt = from.prompt.clone();
    slot.prompt.n_draft_retry = n_draft_retry;

    while (!has_room && thin_out(slot.prompt)) {
    }
    for (auto & ckpt : slot.prompt.checkpoints) {
        if (!slot.ctx_dft) {
            ckpt.clear_dft();
        }
    }

    return true;
}

static bool has_checkpoint(const server_prompt & prompt, const common_prompt_checkpoint & ckpt) {
    return std::any_of(prompt.checkpoints.begin(), prompt.checkpoints.end(), [&](const auto & cur) {
        return cur.n_tokens == ckpt.n_tokens && cur.pos_min == ckpt.pos_min && cur.pos_max == ckpt.pos_max;
    });
}

bool server_conversations::save(server_slot_view & slot, bool may_drop) {
    return save_entry(slot, may_drop, true) || (may_drop && save_to_store(slot));
}

server_conversation * server_conversations::save_entry(server_slot_view & slot, bool may_drop, bool is_losing) {
    if (!can_save() || !has_conversation(slot)) {
        return nullptr;
    }

    for (auto & entry : entries) {
        if (server_has_all(ctxs, entry.prompt, entry.pos_min, slot.prompt)) {
            entry.t_last_used = std::max(entry.t_last_used, slot.t_last_used);
            return &entry;
        }
    }

    const size_t n_bytes_new = n_bytes_copy(slot);
    if (n_bytes_new == 0) {
        return nullptr;
    }

    // Find entries whose tokens the new entry will contain. These old entries stay until the new entry exists, because the
    // copy can fail. During the copy, their bytes are not counted, so the old entries and the copy together may exceed the
    // limit.
    const llama_pos pos_min = pos_min_of_copy(ctxs, slot.id);

    entries_t covered;
    for (auto it = entries.begin(); it != entries.end(); ) {
        const auto cur = it++;
        if (&*cur != in_use && cur->prompt.n_tokens() <= slot.n_computed() && server_has_all(ctxs, slot.prompt, pos_min, cur->prompt)) {
            covered.splice(covered.end(), entries, cur);
        }
    }

    const size_t n_bytes_freed = is_losing ? n_bytes_cells(slot) : 0;

    const auto conv = (may_drop ? make_room(n_bytes_new, n_bytes_freed) : fits(n_bytes_new, n_bytes_freed)) ? copy(slot) : nullptr;
    if (!conv) {
        entries.splice(entries.begin(), covered);
        trim();
        return nullptr;
    }

    // With a window (SWA), an earlier state of the conversation is useful only for a prompt that branches off. Let
    // drop_oldest() choose such entries first (t_last_used = 0), and drop those of their checkpoints that the new entry also
    // has.
    for (auto & entry : entries) {
        if (&entry != in_use && is_start_of(entry.prompt, conv->prompt)) {
            entry.t_last_used = 0;
            entry.prompt.checkpoints.remove_if([&](const auto & cur) { return has_checkpoint(conv->prompt, cur); });
        }
    }

    entries.push_back(std::move(*conv));

    return &entries.back();
}

void server_conversations::save_idle() {
    for (auto & slot : slots) {
        if (slot.is_processing() || !has_conversation(slot)) {
            continue;
        }

        SLT_TRC(slot, "%s", "saving idle slot to prompt cache\n");

        // false: do not drop other entries for this one, because no slot needs the cells of the idle slot yet
        if (save_entry(slot, false, params.kv_unified)) {
            SLT_DBG(slot, "%s", "__TEST_TAG_CACHE_IDLE_SLOT__\n");

            if (params.kv_unified) {
                slot.prompt_clear(); // [TAG_IDLE_SLOT_CLEAR]
            }
        }
    }
}

void server_conversations::sleep() {
    for (auto & slot : slots) {
        save(slot);
        slot.prompt_clear();
    }
}

void server_conversations::save_to_store() {
    if (!store) {
        return;
    }

    // begin with the most recently used conversations, because a router kills a process that needs more than ten seconds to end
    std::vector<server_slot_view *> last_used;
    for (auto & slot : slots) {
        last_used.push_back(&slot);
    }
    std::sort(last_used.begin(), last_used.end(), [](const auto * a, const auto * b) { return a->t_last_used > b->t_last_used; });
    entries.sort([](const auto & a, const auto & b) { return a.t_last_used > b.t_last_used; });

    for (auto * slot : last_used) {
        save_to_store(*slot);
    }
    for (const auto & entry : entries) {
        store->put(entry);
    }
}

bool server_conversations::save_to_store(server_slot_view & slot) {
    // A server that sleeps has no contexts. It has saved the conversations of its slots before it fell asleep.
    const bool can_copy = store && (can_save() || is_shared) && ctxs.ctx_tgt && has_conversation(slot);

    const auto conv = can_copy ? copy(slot) : nullptr;
    if (conv) {
        store->put(*conv);
    }

    return conv != nullptr;
}

bool server_conversations::reserve(const server_slot_view & slot, size_t n_bytes) {
    return make_room(n_bytes, n_bytes_cells(slot));
}

bool server_conversations::reserve_checkpoint(int id_slot) {
    auto & slot = slots[id_slot];

    size_t n_bytes_new = llama_state_seq_get_size_ext(slot.ctx_tgt, id_slot, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (slot.ctx_dft) {
        n_bytes_new += llama_state_seq_get_size_ext(slot.ctx_dft, id_slot, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    }

    auto & ckpts = slot.prompt.checkpoints;
    while (!make_room(n_bytes_new)) {
        if (ckpts.empty()) {
            return false;
        }
        ckpts.pop_front(); // the new checkpoint is worth more than older ones
    }

    return true;
}

bool server_conversations::trim() {
    bool res = false;
    while (!fits(0) && drop_one()) {
        res = true;
    }

    return res;
}

bool server_conversations::drop_if_short(int32_t n) {
    is_ram_short = (is_shared || (params.kv_budget_mib == 0 && server_memory_is_host(params))) && server_memory_is_short(ctxs.ctx_tgt, n);

    if (is_ram_short && is_shared) {
        return drop_one();
    }
    if (!is_ram_short || entries.empty()) {
        return false;
    }

    SRV_WRN("no memory, dropping the oldest of %zu conversations in the prompt cache\n", entries.size());

    return drop_oldest();
}

void server_conversations::drop_drafts() {
    for (auto & entry : entries) {
        entry.data.drft = {};
        entry.prompt.n_draft_retry = -1;
        for (auto & ckpt : entry.prompt.checkpoints) {
            ckpt.clear_dft();
        }
    }
}

server_conversations::usage server_conversations::get_usage() const {
    usage res;

    res.n_bytes_limit  = is_shared ? std::max<size_t>(1, limit()) : n_bytes_limit; // 0 would mean no limit
    res.n_entries      = entries.size();
    res.n_hits         = n_hits;
    res.n_misses       = n_misses;
    res.n_tokens_saved = n_tokens_saved;

    if (store) {
        res.n_bytes_disk        = store->n_bytes();
        res.n_bytes_disk_limit  = store->n_bytes_limit();
        res.n_entries_disk      = store->n_entries();
        res.n_hits_disk         = n_hits_disk;
        res.n_misses_disk       = n_misses; // each search includes the store, so the number of misses is the same
        res.n_tokens_saved_disk = n_tokens_saved_disk;
    }

    for (const auto & entry : entries) {
        res.n_bytes_entries     += entry.data.size();
        res.n_bytes_checkpoints += server_n_bytes_checkpoints(entry.prompt);
    }
    for (const auto & slot : slots) {
        res.n_bytes_checkpoints_by_slot.push_back(server_n_bytes_checkpoints(slot.prompt));
        res.n_bytes_paused_by_slot     .push_back(slot.wait.paused ? slot.wait.paused->size() : 0);
        res.n_bytes_checkpoints += res.n_bytes_checkpoints_by_slot.back();
        res.n_bytes_paused      += res.n_bytes_paused_by_slot     .back();
    }

    return res;
}

bool server_conversations::has_conversation(const server_slot_view & slot) const {
    return slot.ctx_tgt && llama_get_memory(slot.ctx_tgt) && slot.prompt.n_tokens() > 0 &&
        !server_memory_is_lost(slot.ctx_tgt, slot.id, slot.prompt.n_tokens());
}

static bool has_draft(const server_slot_view & slot) {
    return slot.ctx_dft && !server_memory_is_lost(slot.ctx_dft, slot.id, slot.prompt.n_tokens());
}

size_t server_conversations::n_bytes_copy(const server_slot_view & slot) const {
    const size_t n_bytes_tgt = llama_state_seq_get_size_ext(slot.ctx_tgt, slot.id, LLAMA_STATE_SEQ_FLAGS_NONE);
    if (n_bytes_tgt == 0) {
        return 0; // a pending copy of the sequence waits for memory, so that the state cannot be read
    }

    return n_bytes_tgt + server_n_bytes_checkpoints(slot.prompt) +
        (has_draft(slot) ? llama_state_seq_get_size_ext(slot.ctx_dft, slot.id, LLAMA_STATE_SEQ_FLAGS_NONE) : 0);
}

std::unique_ptr<server_conversation> server_conversations::copy(server_slot_view & slot) {
    const int32_t n = slot.n_computed();
    if (n <= 0 || (n < slot.prompt.n_tokens() && slot.prompt.tokens.has_media())) {
        return nullptr;
    }

    try {
        auto res = std::make_unique<server_conversation>();

        // Reading a state can fail if memory is short. If a pending copy of the sequence waits for memory, the size of the
        // state is 0.
        const auto read = [&](llama_context * ctx, std::vector<uint8_t> & data) {
            data.resize(llama_state_seq_get_size_ext(ctx, slot.id, LLAMA_STATE_SEQ_FLAGS_NONE));
            return !data.empty() && llama_state_seq_get_data_ext(ctx, data.data(), data.size(), slot.id, LLAMA_STATE_SEQ_FLAGS_NONE) == data.size();
        };

        if (!read(slot.ctx_tgt, res->data.main)) {
            return nullptr;
        }
        if (has_draft(slot) && !read(slot.ctx_dft, res->data.drft)) {
            res->data.drft = {};
        }

        res->pos_min = pos_min_of_copy(ctxs, slot.id);
        res->prompt  = slot.prompt.clone();
        res->t_last_used = slot.t_last_used;
        res->prompt.tokens.keep_first(n);
        res->prompt.checkpoints.remove_if([&](const auto & cur) { return cur.n_tokens > n; });

        return res;
    } catch (const std::bad_alloc &) {
        n_bytes_limit = std::max<size_t>(1, 0.4*n_bytes());

        SRV_WRN("no memory for a conversation, the limit of the prompt cache is now %.3f MiB\n", n_bytes_limit / (1024.0 * 1024.0));

        return nullptr;
    }
}

int32_t server_conversations::n_usable(const server_slot_view & slot, const server_conversation_query & query) const {
    if (!has_conversation(slot)) {
        return 0;
    }
    if (!query.lora.empty() && !server_has_same_lora(slot.prompt.provenance.lora, query.lora)) {
        return 0;
    }

    const llama_pos pos_min = slot.id == id_losing
        ? llama_memory_seq_pos_min(llama_get_memory(slot.ctx_tgt), slot.id)
        : pos_min_of_copy(ctxs, slot.id);

    return query.n_usable(slot.prompt, pos_min, slot.n_computed());
}

bool server_conversations::is_start_of(const server_prompt & start, const server_prompt & prompt) const {
    return
        (params.lora_adapters.empty() || server_has_same_lora(start.provenance.lora, prompt.provenance.lora)) &&
        start.tokens.get_common_prefix(prompt.tokens) == start.tokens.size();
}

size_t server_conversations::n_bytes_of_slots() const {
    size_t res = 0;
    for (const auto & slot : slots) {
        res += server_n_bytes_checkpoints(slot.prompt) + (slot.wait.paused ? slot.wait.paused->size() : 0);
    }
    return res;
}

size_t server_conversations::n_bytes() const {
    size_t res = n_bytes_of_slots();
    for (const auto & entry : entries) {
        res += entry.size();
    }
    return res;
}

size_t server_conversations::limit(size_t n_bytes_freed) const {
    size_t res = n_bytes_limit > 0 ? n_bytes_limit : SIZE_MAX;

    if (is_shared) {
        const auto usage = llama_memory_budget_get_usage(params.kv_budget.get());

        const size_t n_bytes_others = usage.committed - usage.reclaimable;
        const size_t n_bytes_left   = n_bytes_others - std::min(n_bytes_others, n_bytes_freed);

        res = std::min(res, usage.n_bytes - std::min(usage.n_bytes, n_bytes_left));
    }

    return res;
}

size_t server_conversations::n_bytes_cells(const server_slot_view & slot) const {
    return !is_shared ? 0 : llama_memory_seq_usage(slot.ctx_tgt, slot.id).bytes +
        (slot.ctx_dft ? llama_memory_seq_usage(slot.ctx_dft, slot.id).bytes : 0);
}

size_t server_conversations::reclaim(size_t n_bytes) {
    const size_t n_bytes_old = this->n_bytes();

    if (n_bytes > 0) {
        SRV_DBG("the cells reclaim %.3f MiB of conversations\n", n_bytes / (1024.0 * 1024.0));
    }
    while (this->n_bytes() + n_bytes > n_bytes_old && drop_one(false)) {
    }

    // While a state is copied to the cells, it exists twice: in the conversation `in_use` and in the cells. Do not count
    // the conversation.
    const size_t n_bytes_now = this->n_bytes();
    return n_bytes_now - std::min(n_bytes_now, in_use ? in_use->size() : 0);
}

bool server_conversations::fits(size_t n_bytes_more, size_t n_bytes_freed) const {
    return !is_enabled || n_bytes() + n_bytes_more <= limit(n_bytes_freed);
}

bool server_conversations::make_room(size_t n_bytes_more, size_t n_bytes_freed) {
    if (!fits(n_bytes_more, n_bytes_freed)) {
        // Find out whether the bytes fit after everything that may be dropped is dropped. If they do not fit, return now, and
        // drop nothing.
        size_t n_bytes_least = in_use ? in_use->size() : 0;
        for (const auto & slot : slots) {
            n_bytes_least += slot.wait.paused ? slot.wait.paused->size() : 0;
            for (const auto * ckpt : server_checkpoints_to_keep(slot.prompt)) {
                n_bytes_least += ckpt->size();
            }
        }
        if (n_bytes_least + n_bytes_more > limit(n_bytes_freed)) {
            return false;
        }
    }

    while (!fits(n_bytes_more, n_bytes_freed)) {
        if (!drop_one()) {
            return false;
        }
    }

    return true;
}

bool server_conversations::drop_one(bool with_running) {
    // 1. entries that are also in the cells of a slot
    // Before a request starts, its slot still has the cells of the previous request. The slot is about to lose these cells, so
    // they do not count.
    for (auto it = entries.begin(); it != entries.end(); ++it) {
        const bool is_twice = &*it != in_use && std::any_of(slots.begin(), slots.end(), [&](const server_slot_view & slot) {
            return slot.id != id_losing && (!slot.is_processing() || slot.is_running()) && has_conversation(slot) &&
                slot.n_computed() >= it->prompt.n_tokens() && server_has_all(ctxs, slot.prompt, pos_min_of_copy(ctxs, slot.id), it->prompt);
        });
        if (is_twice) {
            entries.erase(it);
            return true;
        }
    }

    // 2. checkpoints of entries, then checkpoints of slots
    for (auto & entry : entries) {
        if (&entry != in_use && thin_out(entry.prompt)) {
            return true;
        }
    }
    for (auto & slot : slots) {
        if ((with_running || !slot.is_processing()) && thin_out(slot.prompt)) {
            return true;
        }
    }

    // 3. the least recently used entry
    return drop_oldest();
}

bool server_conversations::drop_oldest() {
    auto it = entries.end();
    for (auto cur = entries.begin(); cur != entries.end(); ++cur) {
        if (&*cur != in_use && (it == entries.end() || cur->t_last_used < it->t_last_used)) {
            it = cur;
        }
    }
    if (it == entries.end()) {
        return false;
    }

    SRV_INF("dropping the oldest conversation of the prompt cache, n_tokens = %d, size = %.3f MiB\n",
            it->prompt.n_tokens(), it->size() / (1024.0 * 1024.0));

    if (store) {
        store->put(*it);
    }
    entries.erase(it);

    return true;
}

bool server_conversations::thin_out(server_prompt & prompt) {
    const auto keep = server_checkpoints_to_keep(prompt);

    auto & ckpts = prompt.checkpoints;

    const auto it = std::find_if(ckpts.begin(), ckpts.end(), [&](const auto & cur) {
        return std::find(keep.begin(), keep.end(), &cur) == keep.end();
    });
    if (it == ckpts.end()) {
        return false;
    }

    ckpts.erase(it);

    return true;
}
