#include "llama-kv-dynamic.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

static thread_local std::shared_ptr<llama_kv_dynamic> llama_kv_dynamic_cur;

bool llama_kv_dynamic_default() {
    const char * LLAMA_KV_DYNAMIC = getenv("LLAMA_KV_DYNAMIC");

    return LLAMA_KV_DYNAMIC && *LLAMA_KV_DYNAMIC && strcmp(LLAMA_KV_DYNAMIC, "0") != 0;
}

llama_kv_dynamic::llama_kv_dynamic(llama_context * lctx, bool enabled) :
    lctx(*lctx), compute(*lctx), copies(*this), usage(*lctx, all), enabled(enabled) {
}

llama_kv_dynamic::~llama_kv_dynamic() {
    usage.log();
}

llama_kv_dynamic::scope::scope(std::shared_ptr<llama_kv_dynamic> dyn) :
    prev(std::exchange(llama_kv_dynamic_cur, std::move(dyn))) {
}

llama_kv_dynamic::scope::~scope() {
    const auto dyn = std::exchange(llama_kv_dynamic_cur, std::move(prev));

    if (dyn && dyn->lctx.get_memory()) {
        dyn->lctx.get_memory()->kv_dynamic = dyn;
    }
}

std::shared_ptr<llama_kv_dynamic> llama_kv_dynamic::current() {
    return llama_kv_dynamic_cur;
}

std::shared_ptr<llama_kv_dynamic> llama_kv_dynamic::of(const llama_context & ctx) {
    return ctx.get_memory() ? ctx.get_memory()->kv_dynamic.lock() : nullptr;
}

llama_kv_dynamic::release_scope::release_scope(const llama_memory_i * mem, llama_seq_id seq_id, bool is_whole) :
    mem(mem), seq_id(seq_id), is_whole(is_whole) {
}

llama_kv_dynamic::release_scope::~release_scope() {
    const auto dyn = mem->kv_dynamic.lock();

    if (dyn && is_whole) {
        dyn->lost.forget(seq_id);
    }

    if (!dyn || !dyn->enabled) {
        return;
    }

    try {
        dyn->forget(); // forget the rows that were requested for a batch that did not run
        llama_kv_dynamic_cache::release(dyn->all);

        dyn->limit().step_up();
        dyn->limit().account();
    } catch (const std::exception & err) { // no exception may leave a destructor
        LLAMA_LOG_WARN("%s: no KV memory goes back: %s\n", __func__, err.what());
    }

    dyn->usage.end_release();
}

void llama_kv_dynamic::copy_seq(const llama_memory_i * mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst) {
    const auto dyn = mem->kv_dynamic.lock();

    if (dyn) {
        dyn->lost.copy(seq_id_src, seq_id_dst);
    }
}

//
// called by the context
//

void llama_kv_dynamic::begin() {
    if (!any([](const auto * cache) { return cache->has_gaps(); })) {
        return;
    }

    ggml_cgraph * gf = compute.build_graph(true);

    if (!any([&](const auto * cache) { return cache->has_gaps() && cache->reads_gaps_elsewhere(gf); })) {
        return;
    }

    LLAMA_LOG_WARN("%s: attention does not run where the cells are\n", __func__);

    // replace the storage of all caches, because caches with the same number of cells and streams must have the same size
    for (auto * cache : all) {
        if (cache->has_gaps() && !cache->restart_by_copy()) {
            throw std::runtime_error("failed to allocate buffer for kv cache");
        }
    }

    set_moved(false);
    compute.reset_sched();
}

int32_t llama_kv_dynamic::begin_batch(const llama_batch_allocr & balloc) {
    forget(); // forget the rows that were requested for a batch for which no cells were found

    bool has_memory = false;

    try {
        has_memory = copies.finish_update();
    } catch (const std::bad_alloc &) {
        LLAMA_LOG_WARN("%s: not enough host memory to go on\n", __func__);
    }

    return lost.uses_lost_seq(lctx, balloc) ? -3 : has_memory ? 0 : 1;
}

int32_t llama_kv_dynamic::grow_batch(const llama_batch_allocr & balloc) {
    const bool has_memory = grow();

    return lost.uses_lost_seq(lctx, balloc) ? -3 : has_memory ? 0 : 1;
}

bool llama_kv_dynamic::grow_max() {
    for (auto * cache : all) {
        cache->requested.add(0, cache->n_max_cells);
    }

    if (!grow(true, false)) { // false: a context that trains keeps its types
        return false;
    }

    for (auto * cache : all) {
        cache->storage().pin();
    }

    return true;
}

//
// called by the caches and by the members of this class
//

void llama_kv_dynamic::add_cache(llama_kv_dynamic_cache * cache) {
    all.push_back(cache);
}

void llama_kv_dynamic::remove_cache(llama_kv_dynamic_cache * cache) {
    all.erase(std::remove(all.begin(), all.end(), cache), all.end());
}

void llama_kv_dynamic::add_reader(const std::shared_ptr<llama_kv_dynamic> & reader) {
    // remove readers that were freed, for example a draft. Each shared cache registers the same reader, so add it only once
    readers.erase(std::remove_if(readers.begin(), readers.end(), [&](const std::weak_ptr<llama_kv_dynamic> & cur) {
        return cur.expired() || cur.lock() == reader;
    }), readers.end());

    readers.push_back(reader);
}

void llama_kv_dynamic::set_moved(bool too_small) {
    compute.drop_graphs();
    compute.set_too_small(compute.is_too_small() || too_small);

    for (const auto & reader : readers) {
        if (const auto dyn = reader.lock()) {
            dyn->set_moved(too_small);
        }
    }
}

void llama_kv_dynamic::synchronize() const {
    compute.synchronize();

    for (const auto & reader : readers) {
        if (const auto dyn = reader.lock()) {
            dyn->synchronize();
        }
    }
}

void llama_kv_dynamic::forget() {
    for (auto * cache : all) {
        cache->forget();
    }
}

void llama_kv_dynamic::drop_seq(llama_seq_id seq_id) {
    // set rows that the state has already filled to zero, because attention also reads rows that the mask excludes
    for (auto * cache : all) {
        cache->clear_state(seq_id);
    }

    if (seq_id < 0) {
        lctx.get_memory()->clear(true);
    } else {
        lctx.get_memory()->seq_rm(seq_id, -1, -1);
    }
}

//
// growing
//

bool llama_kv_dynamic::has_request() const {
    return any([](const auto * cache) { return cache->requested.has_rows(); });
}

bool llama_kv_dynamic::grow(bool is_batch, bool may_step_down) {
    try {
        if (is_batch && !copies.finish_copies()) {
            usage.count_no_memory();
            return false;
        }

        if (!has_request() && !has_failed && !compute.is_too_small() && !compute.is_lost()) {
            return true;
        }

        const bool res = grow_requested(may_step_down);
        if (!res) {
            usage.count_no_memory();
        }

        return res;
    } catch (const std::bad_alloc &) { // there was no host memory to count the bytes
        LLAMA_LOG_WARN("%s: not enough host memory to grow the KV cache\n", __func__);
    }

    synchronize();
    for (auto * cache : all) {
        cache->undo_growth();
    }
    forget();

    usage.count_no_memory();

    return false;
}

bool llama_kv_dynamic::grow_requested(bool may_step_down) {
    const bool is_requested = has_request();

    if (compute.is_lost() && !compute.is_training()) {
        compute.reset_sched();
    }

    const int64_t t_start_us = ggml_time_us();

    bool res = false;

    const bool was_too_small = compute.is_too_small();

    for (auto * cache : all) {
        for (const auto * other : all) {
            cache->follow(*other);
        }
    }

    limit().begin_account();

    if (!std::exchange(has_failed, false)) {
        do {
            const bool is_ahead = any([](const auto * cache) { return cache->is_ahead(); });

            res = (is_ahead && limit().fits(true) && try_grow(true)) || (limit().fits(false) && try_grow(false));
        } while (!res && may_step_down && limit().step_down());
    }

    forget();

    if (!res) {
        compute.set_too_small(was_too_small);

        LLAMA_LOG_WARN("%s: failed to grow the KV cache, it keeps its size\n", __func__);
    }

    if (compute.is_lost() && !compute.is_training()) {
        compute.reset_sched();
    }

    if (res && is_requested) {
        usage.count_growth(ggml_time_us() - t_start_us);
    }

    return res;
}

bool llama_kv_dynamic::try_grow(bool ahead) {
    const bool is_requested = has_request();

    if (is_requested) {
        synchronize();
    }

    const size_t n_bytes_before = limit().n_bytes_compute();

    const bool has_memory = std::all_of(all.begin(), all.end(), [&](auto * cache) { return cache->grow(ahead); }) && compute.reserve(!ahead);

    const bool res = has_memory && limit().is_kept(ahead);

    if (!res && is_requested) {
        synchronize();
    }

    for (auto * cache : all) {
        res ? cache->commit_growth() : cache->undo_growth();
    }

    // free the compute buffers if they have grown for rows that the limit does not allow
    if (has_memory && !res && limit().n_bytes_compute() > n_bytes_before) {
        compute.reset_sched();
    }

    limit().account();

    return res;
}
