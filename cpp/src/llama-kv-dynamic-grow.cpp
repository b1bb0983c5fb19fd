// How the storage of one cache grows and shrinks, when its context says so

#include "llama-kv-dynamic-cache.h"

#include "llama-impl.h"
#include "llama-kv-log.h"

#include <algorithm>
#include <new>
#include <utility>

std::vector<uint32_t> llama_kv_dynamic_cache::n_used() const {
    std::vector<uint32_t> res(kv.n_stream);

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        res[s] = is_compressed ? used_rows(n_max_cells) : kv.v_cells[s].used_max_p1();
    }

    // a copy of a stream waits for the next batch: what it reads stays, though the cells may be free by now
    for (size_t i = kv.sc_info.ssrc.size(); i-- > 0; ) {
        res[kv.sc_info.ssrc[i]] = std::max(res[kv.sc_info.ssrc[i]], res[kv.sc_info.sdst[i]]);
    }

    return res;
}

llama_kv_rows llama_kv_dynamic_cache::used() const {
    auto res = storage->rows().none();

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        const auto & cells = kv.v_cells[s];

        for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
            if (!cells.is_empty(i)) {
                res.add(s, i, i + 1);
            }
        }
    }

    // what a copy that waits is to read
    for (size_t i = kv.sc_info.ssrc.size(); i-- > 0; ) {
        auto read = res.none();
        read.set_stream(kv.sc_info.ssrc[i], res, kv.sc_info.sdst[i]);
        res |= read;
    }

    return res;
}

bool llama_kv_dynamic_cache::is_like(const llama_kv_dynamic_cache & other) const {
    return &other != this && other.n_max_cells == n_max_cells && other.kv.n_stream == kv.n_stream;
}

bool llama_kv_dynamic_cache::mirrors(const llama_kv_dynamic_cache & other) const {
    return is_like(other) && is_dynamic() && other.is_dynamic();
}

void llama_kv_dynamic_cache::follow(const llama_kv_dynamic_cache & other) {
    for (uint32_t s = 0; mirrors(other) && other.need && s < kv.n_stream; ++s) {
        other.need->each_run(s, [&](uint32_t i0, uint32_t i1) { want(s, i0, i1); });
    }
}

bool llama_kv_dynamic_cache::is_ahead() const try {
    return need && !(next(true) == next(false));
} catch (const std::bad_alloc &) {
    return false;
}

llama_kv_rows llama_kv_dynamic_cache::next(bool ahead) const {
    if (!storage->has_size()) {
        return storage->next(*need, ahead, size_cell());
    }

    // over all streams of the caches with as many cells: they mirror each other, so they take the same steps
    size_t n_bytes_row = 0;

    for (const auto * cache : dyn->caches) {
        if (cache->n_max_cells == n_max_cells) {
            n_bytes_row += cache->size_cell()*cache->kv.n_stream;
        }
    }

    return storage->next(*need, ahead, n_bytes_row);
}

bool llama_kv_dynamic_cache::try_resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, bool is_larger) {
    const bool res = storage->try_resize(rows, n_used);

    if (storage->moved()) {
        dyn->set_moved(is_larger && res);
    }

    return res;
}

bool llama_kv_dynamic_cache::grow(bool ahead) try {
    if (!need) {
        return true;
    }

    const auto rows = next(ahead);

    LLAMA_LOG_INFO("%s: " LLAMA_KV_LOG_RESIZE "\n", __func__, storage->rows().size(), rows.size());

    n_used_before = n_used();
    before        = storage->rows();

    n_copied_before = storage->n_bytes_copied();

    if (!try_resize(rows, n_used_before, true)) {
        LLAMA_LOG_WARN("%s: not enough memory for %u cells\n", __func__, rows.size());
        before.reset();
        return false;
    }

    return true;
} catch (const std::bad_alloc &) {
    LLAMA_LOG_WARN("%s: not enough host memory to grow the KV cache\n", __func__);
    before.reset();
    return false;
}

void llama_kv_dynamic_cache::undo() try {
    if (before) {
        try_resize(*before, n_used_before, false);
        before.reset();
    }
} catch (const std::bad_alloc &) {
    before.reset(); // it keeps more than it had
}

void llama_kv_dynamic_cache::settle() {
    if (before) {
        dyn->counters.n_bytes_copied += storage->n_bytes_copied() - n_copied_before;

        n_peak = need->end();
    }
}

void llama_kv_dynamic_cache::forget() {
    need.reset();
    before.reset();
}

llama_kv_rows llama_kv_dynamic_cache::rest() const {
    if (!is_dynamic() || (is_compressed && (used_rows(n_max_cells) > 0 || !kv.sc_info.empty()))) {
        return storage->rows();
    }

    uint32_t n_cells = 0;
    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        n_cells += kv.v_cells[s].get_used();
    }

    // before the cells are looked at one by one
    return storage->may_shrink(n_cells, n_peak) ? storage->rest(used(), n_peak) : storage->rows();
}

void llama_kv_dynamic_cache::release(const std::vector<llama_kv_dynamic_cache *> & caches) {
    struct plan {
        llama_kv_dynamic_cache * cache;
        llama_kv_rows            rows;
        std::vector<uint32_t>    n_used;
    };
    std::vector<plan> plans;

    for (auto * cache : caches) {
        cache->drop_late_copies();
    }

    // all of them before the first one shrinks, as no memory may be missing between caches of one size
    for (auto * cache : caches) {
        auto rows = cache->rest();
        for (const auto * other : caches) {
            if (cache->mirrors(*other) && cache->storage->has_size()) {
                rows.add(0, other->rest().end());
            }
        }

        if (rows.size() < cache->storage->rows().size()) {
            plans.push_back({ cache, std::move(rows), cache->n_used() });
        }
    }

    for (const auto & [cache, rows, n_used] : plans) {
        LLAMA_LOG_INFO("%s: " LLAMA_KV_LOG_RESIZE "\n", __func__, cache->storage->rows().size(), rows.size());

        cache->dyn->synchronize();

        const size_t n_copied = cache->storage->n_bytes_copied();

        cache->try_resize(rows, n_used, false);

        cache->dyn->count_shrink(cache->storage->n_bytes_copied() - n_copied);

        cache->n_peak = *std::max_element(n_used.begin(), n_used.end());
    }
}
