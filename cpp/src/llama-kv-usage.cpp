// Accounting of the memory behind a context: llama_get_memory_usage(), for static and dynamic caches

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-memory.h"

#include <algorithm>
#include <new>

static size_t sum(const std::map<ggml_backend_buffer_type_t, size_t> & breakdown) {
    size_t res = 0;

    for (const auto & [_, size] : breakdown) {
        res += size;
    }

    return res;
}

size_t llama_kv_dynamic_cache::size_cell() const {
    size_t res = 0;

    for (const auto & layer : kv.layers) {
        res += layer.k->nb[1] + (layer.v ? layer.v->nb[1] : 0);
    }

    return res;
}

llama_memory_usage llama_kv_dynamic_cache::usage() const {
    llama_memory_usage res = {};

    res.n_cells_max = n_max_cells*kv.n_stream;
    res.n_cells     = storage->rows().size();

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        res.n_cells_used += is_compressed ? n_rows_used[s] : kv.v_cells[s].get_used();
    }

    res.reserved  = res.n_cells_max*size_cell();
    res.committed = sum(kv.memory_breakdown());
    res.used      = res.n_cells_used*size_cell();

    return res;
}

llama_memory_usage llama_kv_dynamic::usage() const {
    llama_memory_usage res = counters;

    // what is neither of the caches here is of a fixed size: recurrent states
    size_t fixed = sum(static_cast<const llama_memory_i *>(lctx->get_memory())->memory_breakdown());

    double part        = 1.0; // of the positions, that rows without cells have memory for
    double part_layers = 1.0; // the same of cells that are in front of layers

    bool has_layers = true; // the largest cache

    for (const auto * cache : caches) {
        const llama_memory_usage cur = cache->usage();

        res.reserved  += cur.reserved;
        res.committed += cur.committed;
        res.used      += cur.used;

        fixed -= std::min(fixed, cur.committed);

        if (!cache->is_compressed) {
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

    // with layers or without, the largest cache is the one whose cells a batch can lack
    res.n_cells = std::max<uint32_t>(res.n_cells_used, res.n_cells*(has_layers ? part : std::min(part, part_layers)));

    res.reserved  += fixed;
    res.committed += fixed;
    res.used      += fixed;

    return res;
}

void llama_kv_dynamic::count_shrink(size_t n_bytes_copied) {
    counters.n_shrink       += !std::exchange(has_shrunk, true);
    counters.n_bytes_copied += n_bytes_copied;
}

//
// interface
//

llama_memory_usage llama_get_memory_usage(const llama_context * ctx) try {
    const auto * dyn = llama_kv_dynamic::of(*ctx);

    return dyn ? dyn->usage() : llama_memory_usage {};
} catch (const std::bad_alloc &) { // the buffers are counted in a map
    return {};
}
