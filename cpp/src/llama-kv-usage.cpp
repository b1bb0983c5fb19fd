#include "llama-kv-usage.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"
#include "llama-memory.h"

#include <algorithm>
#include <new>
#include <utility>

size_t llama_kv_sum_bytes(const llama_memory_i & memory) {
    size_t res = 0;

    for (const auto & [_, size] : memory.memory_breakdown()) {
        res += size;
    }

    return res;
}

size_t llama_kv_share(size_t size, size_t n, size_t i) {
    return size/n + (i < size % n);
}

void llama_kv_usage::log() const {
    if (counters.n_grow > 0) {
        LLAMA_LOG_INFO("%s: the KV cache has grown %u times in %.2f ms (longest %.2f ms, %.2f MiB copied) and shrunk %u times\n", __func__,
                counters.n_grow, counters.t_grow_us/1e3, counters.t_grow_max_us/1e3, counters.n_bytes_copied/1024.0/1024.0, counters.n_shrink);
    }
}

void llama_kv_usage::count_no_memory() {
    counters.n_no_memory++;
}

void llama_kv_usage::count_growth(int64_t t_us) {
    counters.n_grow++;
    counters.t_grow_us     += t_us;
    counters.t_grow_max_us  = std::max(counters.t_grow_max_us, t_us);
}

void llama_kv_usage::count_copied(size_t n_bytes) {
    counters.n_bytes_copied += n_bytes;
}

void llama_kv_usage::count_shrink(size_t n_bytes_copied) {
    counters.n_shrink       += !std::exchange(has_shrunk, true);
    counters.n_bytes_copied += n_bytes_copied;
}

void llama_kv_usage::count_retype(int64_t t_us) {
    counters.n_retype++;
    counters.t_retype_us += t_us;
}

llama_memory_usage llama_kv_usage::total() const {
    llama_memory_usage res = counters;

    // bytes outside of these caches, which have a fixed size: recurrent states
    size_t fixed = llama_kv_sum_bytes(*lctx.get_memory());

    // part:        minimum over the caches without cells (DSV4): the fraction of their rows that have memory
    // part_layers: minimum over the caches with cells and layers: the fraction of their cells that have memory
    double part        = 1.0;
    double part_layers = 1.0;

    bool has_layers = true; // the largest cache has layers

    for (const auto * cache : caches) {
        const llama_memory_usage cur = cache->usage();

        res.reserved  += cur.reserved;
        res.committed += cur.committed;
        res.used      += cur.used;

        fixed -= std::min(fixed, cur.committed);

        if (!cache->planned.is_in_use()) {
            if (cur.n_cells_max > res.n_cells_max) {
                res.n_cells_max  = cur.n_cells_max;
                res.n_cells      = cur.n_cells;
                res.n_cells_used = cur.n_cells_used;

                has_layers = cur.reserved > 0;
            }
            if (cur.reserved > 0) {
                part_layers = std::min(part_layers, double(cur.n_cells)/cur.n_cells_max);
            }
        } else {
            part = std::min(part, double(cur.n_cells)/cur.n_cells_max);
        }
    }

    // A batch needs memory in all caches of the context. So report the number of tokens for which every cache has memory: the
    // cells of the largest cache, multiplied by `part`. If the largest cache has no layers, multiply its cells by the smaller
    // one of `part` and `part_layers`.
    res.n_cells = std::max<uint32_t>(res.n_cells_used, res.n_cells*(has_layers ? part : std::min(part, part_layers)));

    res.reserved  += fixed;
    res.committed += fixed;
    res.used      += fixed;

    return res;
}

llama_seq_usage llama_kv_usage::seq(llama_seq_id seq_id) const {
    llama_seq_usage res = {};

    const uint32_t n_seq_max = lctx.n_seq_max();

    if (seq_id < 0 || (uint32_t) seq_id >= n_seq_max) {
        return res;
    }

    size_t   rest     = total().used; // bytes of recurrent states
    size_t   bytes    = 0;            // bytes in caches without a window
    uint32_t n_all    = 0;
    uint32_t n_window = 0;

    for (const auto * cache : caches) {
        rest -= cache->usage().used;

        auto & n_max = cache->is_window() ? n_window : n_all;

        const auto cells = cache->seq_cells(seq_id, cache->is_window() ? res.bytes_window : bytes);

        if (cache->n_max_cells > n_max) {
            n_max = cache->n_max_cells;

            (cache->is_window() ? res.window : res.cells) = cells;
        }
    }

    // recurrent states have the same size for each sequence, even for an empty one
    res.bytes = bytes + res.bytes_window + llama_kv_share(rest, n_seq_max, seq_id);

    return res;
}

//
// C interface
//

llama_memory_usage llama_get_memory_usage(const llama_context * ctx) {
    try {
        const auto dyn = llama_kv_dynamic::of(*ctx);

        return dyn ? dyn->usage.total() : llama_memory_usage {};
    } catch (const std::bad_alloc &) { // memory_breakdown() uses a map, which needs memory
        return {};
    }
}

llama_seq_usage llama_memory_seq_usage(const llama_context * ctx, llama_seq_id seq_id) {
    try {
        const auto dyn = llama_kv_dynamic::of(*ctx);

        return dyn ? dyn->usage.seq(seq_id) : llama_seq_usage {};
    } catch (const std::bad_alloc &) {
        return {};
    }
}
