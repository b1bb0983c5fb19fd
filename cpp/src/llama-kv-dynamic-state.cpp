// Rows for the states of one cache: those that it writes, and those that it reads one into

#include "llama-kv-dynamic-cache.h"

#include "llama-io.h"

#include <stdexcept>

uint32_t llama_kv_dynamic_cache::rows_to_save(uint32_t n) {
    n = used_rows(n);

    if (is_dynamic && storage->reads_below()) {
        want(0, n);

        if (need && !dyn->grow(false)) {
            throw std::runtime_error("no memory for the rows of a state");
        }
    }

    return n;
}

void llama_kv_dynamic_cache::begin_write() {
    if (!is_dynamic || !storage->reads_below() || kv.sc_info.empty()) {
        return;
    }

    dyn->update();

    if (!kv.sc_info.empty()) {
        throw std::runtime_error("a copy of a sequence waits for memory");
    }
}

bool llama_kv_dynamic_cache::grow_now(llama_io_read_i & io) {
    if (!need) {
        return true;
    }

    // rows that were read but not written yet have offsets in the current layout
    io.flush();

    return dyn->grow(false);
}

llama_kv_dynamic_room llama_kv_dynamic_cache::reserve(llama_io_read_i & io, const llama_kv_cache::slot_info & sinfo) {
    if (dyn) {
        dyn->forget(); // what a batch asked for that did not run
    }
    request({ sinfo });

    return { grow_now(io) ? n_rows() : 0 };
}

bool llama_kv_dynamic_cache::reserve_rows(llama_io_read_i & io, uint32_t n) {
    if (n > n_max_cells) {
        return false;
    }

    request_rows(n);

    return grow_now(io);
}

llama_kv_dynamic_room llama_kv_dynamic_cache::room(const llama_kv_cache::slot_info & sinfo) const {
    for (size_t s = 0; s < sinfo.n_stream(); ++s) {
        for (const uint32_t idx : sinfo.idxs[s]) {
            if (!storage->has(sinfo.strm[s], idx)) {
                return { 0 };
            }
        }
    }

    return { n_rows() };
}
