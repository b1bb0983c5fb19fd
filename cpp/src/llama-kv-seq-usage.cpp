// What one sequence takes of the memory behind a context: llama_memory_seq_usage(), for static and dynamic caches
//
// Nothing is counted while cells come and go: the cells are looked at when somebody asks.

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-memory.h"

#include <new>

// what the i-th of n takes of size, in whole bytes: those that are left over go to the first ones, so that all n sum to size
static size_t part(size_t size, size_t n, size_t i) {
    return size/n + (i < size % n);
}

// sequences of a cell that come before seq_id
static size_t rank(const llama_kv_cells & cells, uint32_t i, llama_seq_id seq_id) {
    size_t res = 0;

    for (llama_seq_id other = 0; other < seq_id; ++other) {
        res += cells.seq_has(i, other);
    }

    return res;
}

llama_seq_cells llama_kv_dynamic_cache::seq_cells(llama_seq_id seq_id, size_t & bytes) const {
    llama_seq_cells res = {};

    const uint32_t s = kv.seq_to_stream[seq_id];

    const auto & cells = kv.v_cells[s];
    const size_t size  = size_cell();

    // rows without cells (DSV4) are of the sequences of the stream
    const uint32_t n_seqs = kv.n_seq_max/kv.n_stream;

    bytes += is_compressed ? part(n_rows_used[s]*size, n_seqs, seq_id % n_seqs) : 0;

    bool is_run = false;

    for (uint32_t i = cells.used_min(); i < cells.used_max_p1(); ++i) {
        const bool is_own = cells.seq_has(i, seq_id);

        if (is_own) {
            const size_t n = cells.seq_count(i);

            res.n_cells++;
            res.n_shared += n > 1;
            res.n_runs   += !is_run;

            bytes += n > 1 ? part(size, n, rank(cells, i, seq_id)) : size;
        }

        is_run = is_own;
    }

    return res;
}

llama_seq_usage llama_kv_dynamic::seq_usage(llama_seq_id seq_id) const {
    llama_seq_usage res = {};

    const uint32_t n_seq_max = lctx->n_seq_max();

    if (seq_id < 0 || (uint32_t) seq_id >= n_seq_max) {
        return res;
    }

    size_t   rest     = usage().used; // that no cells are in front of
    size_t   bytes    = 0;            // in caches without a window
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

    // recurrent states are of one size for each sequence, whatever it holds
    res.bytes = bytes + res.bytes_window + part(rest, n_seq_max, seq_id);

    return res;
}

//
// interface
//

llama_seq_usage llama_memory_seq_usage(const llama_context * ctx, llama_seq_id seq_id) try {
    const auto * dyn = llama_kv_dynamic::of(*ctx);

    return dyn ? dyn->seq_usage(seq_id) : llama_seq_usage {};
} catch (const std::bad_alloc &) {
    return {};
}
