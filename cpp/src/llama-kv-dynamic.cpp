#include "llama-kv-dynamic-cache.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

static thread_local std::shared_ptr<llama_kv_dynamic> llama_kv_dynamic_cur;

llama_kv_dynamic::llama_kv_dynamic(llama_context * lctx, bool enabled) : lctx(lctx), enabled(enabled) {
}

llama_kv_dynamic::~llama_kv_dynamic() {
    set_budget(nullptr);

    if (counters.n_grow > 0) {
        LLAMA_LOG_INFO("%s: the KV cache has grown %u times in %.2f ms (longest %.2f ms, %.2f MiB copied) and shrunk %u times\n", __func__,
                counters.n_grow, counters.t_grow_us/1e3, counters.t_grow_max_us/1e3, counters.n_bytes_copied/1024.0/1024.0, counters.n_shrink);
    }
}

llama_kv_dynamic::release_scope::release_scope(const llama_memory_i * mem, llama_seq_id seq_id, bool is_whole) :
    mem(mem), seq_id(seq_id), is_whole(is_whole) {
}

llama_kv_dynamic::release_scope::~release_scope() {
    const auto dyn = mem->kv_dynamic.lock();

    for (uint32_t s = 0; dyn && is_whole && s < dyn->seqs_lost.size(); ++s) {
        dyn->seqs_lost[s] = dyn->seqs_lost[s] && seq_id >= 0 && s != (uint32_t) seq_id;
    }

    if (!dyn || !dyn->enabled) {
        return;
    }

    try {
        dyn->forget(); // what a batch asked for that did not run
        llama_kv_dynamic_cache::release(dyn->caches);

        dyn->step_up();
        dyn->account();
    } catch (const std::exception & err) { // none leaves a destructor
        LLAMA_LOG_WARN("%s: no KV memory goes back: %s\n", __func__, err.what());
    }

    dyn->has_shrunk = false;
}

llama_kv_dynamic::scope::scope(std::shared_ptr<llama_kv_dynamic> dyn) :
    prev(std::exchange(llama_kv_dynamic_cur, std::move(dyn))) {
}

llama_kv_dynamic::scope::~scope() {
    const auto dyn = std::exchange(llama_kv_dynamic_cur, std::move(prev));

    if (dyn && dyn->lctx->get_memory()) {
        dyn->lctx->get_memory()->kv_dynamic = dyn;
    }
}

std::shared_ptr<llama_kv_dynamic> llama_kv_dynamic::current() {
    return llama_kv_dynamic_cur;
}

llama_kv_dynamic * llama_kv_dynamic::of(const llama_context & ctx) {
    return ctx.memory ? ctx.kv_dynamic.get() : nullptr;
}

void llama_kv_dynamic::add_reader(const std::shared_ptr<llama_kv_dynamic> & reader) {
    // each shared cache adds its own, and a draft comes and goes
    readers.erase(std::remove_if(readers.begin(), readers.end(), [&](const std::weak_ptr<llama_kv_dynamic> & cur) {
        return cur.expired() || cur.lock() == reader;
    }), readers.end());

    readers.push_back(reader);
}

void llama_kv_dynamic::set_moved(bool is_larger) {
    reset_graphs();

    this->is_larger = this->is_larger || is_larger;

    for (const auto & reader : readers) {
        if (const auto dyn = reader.lock()) {
            dyn->set_moved(is_larger);
        }
    }
}

void llama_kv_dynamic::forget() {
    for (auto * cache : caches) {
        cache->forget();
    }
}

bool llama_kv_dynamic::grow(bool is_batch, bool may_step_down) try {
    if (is_batch && !finish_copies()) {
        return false;
    }

    const bool is_wanting = any([](const auto * cache) { return cache->need.has_value(); });

    if (!is_wanting && !is_failed && !is_larger && !is_sched_lost) {
        return true;
    }

    if (is_sched_lost && !lctx->opt_ctx) {
        reset_sched();
    }

    const int64_t t_start_us = ggml_time_us();

    bool res = false;

    const bool was_larger = is_larger;

    for (auto * cache : caches) {
        for (const auto * other : caches) {
            cache->follow(*other);
        }
    }

    begin_account();

    if (!std::exchange(is_failed, false)) {
        do {
            const bool is_ahead = any([](const auto * cache) { return cache->is_ahead(); });

            res = (is_ahead && fits(true) && try_grow(true)) || (fits(false) && try_grow(false));
        } while (!res && may_step_down && step_down());
    }

    forget();

    if (!res) {
        is_larger = was_larger;

        LLAMA_LOG_WARN("%s: failed to grow the KV cache, it keeps its size\n", __func__);
    }

    if (is_sched_lost && !lctx->opt_ctx) {
        reset_sched();
    }

    if (res && is_wanting) {
        const int64_t t_us = ggml_time_us() - t_start_us;

        counters.n_grow++;
        counters.t_grow_us     += t_us;
        counters.t_grow_max_us  = std::max(counters.t_grow_max_us, t_us);
    }

    return res;
} catch (const std::bad_alloc &) { // to say how many bytes it would take, or takes
    LLAMA_LOG_WARN("%s: not enough host memory to grow the KV cache\n", __func__);
    synchronize();
    for (auto * cache : caches) {
        cache->undo();
    }
    forget();
    return false;
}

bool llama_kv_dynamic::try_grow(bool ahead) {
    const bool is_wanting = any([](const auto * cache) { return cache->need.has_value(); });

    if (is_wanting) {
        synchronize();
    }

    const size_t n_bytes_before = budget ? n_bytes_compute() : 0; // only the budget asks

    const bool has_memory = std::all_of(caches.begin(), caches.end(), [&](auto * cache) { return cache->grow(ahead); }) && reserve(!ahead);

    const bool res = has_memory && (!budget || is_within(n_bytes_caches()));

    if (!res && is_wanting) {
        synchronize();
    }

    for (auto * cache : caches) {
        res ? cache->settle() : cache->undo();
    }

    // the compute buffers of what was too much for the budget
    if (has_memory && !res && n_bytes_compute() > n_bytes_before) {
        reset_sched();
    }

    account();

    return res;
}

bool llama_kv_dynamic::grow_max() {
    for (auto * cache : caches) {
        cache->want(0, cache->n_max_cells);
    }

    if (!grow(true, false)) { // what trains keeps its types
        return false;
    }

    for (auto * cache : caches) {
        cache->storage->pin();
    }

    return true;
}

void llama_kv_dynamic::update() {
    lctx->sched_reserve(); // if it is due: the update does not expect another scheduler
    lctx->memory_update(false);
    synchronize();
}

int32_t llama_kv_dynamic::begin_batch(const llama_batch_allocr & balloc) {
    forget(); // what a batch asked for that found no cells

    const bool has_memory = finish_update();

    return goes_on_lost(balloc) ? -3 : has_memory ? 0 : 1;
}

int32_t llama_kv_dynamic::grow_batch(const llama_batch_allocr & balloc) {
    const bool has_memory = grow();

    return goes_on_lost(balloc) ? -3 : has_memory ? 0 : 1;
}

bool llama_kv_dynamic::finish_update() try {
    // before a batch is tried on the cells: to take it back loses a shift that waits behind a copy
    if (!finish_copies()) {
        return false;
    }

    // in smaller types there can be room for the shift
    while (enabled && is_late_shift && any([](const auto * cache) { return cache->has_shift(); })) {
        if (!step_down()) {
            return false;
        }
        is_late_shift = false;
        update();
    }
    is_late_shift = false;

    fit_compute();

    return true;
} catch (const std::bad_alloc &) {
    LLAMA_LOG_WARN("%s: not enough host memory to go on\n", __func__);
    return false;
}

std::pair<ggml_type, ggml_type> llama_kv_dynamic::types() const {
    for (const auto * cache : caches) {
        if (cache->has_types()) {
            return cache->types();
        }
    }

    return { GGML_TYPE_COUNT, GGML_TYPE_COUNT };
}
