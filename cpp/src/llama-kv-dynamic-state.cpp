// Rows for the states of one cache: those that it writes, and those that it reads one into

#include "llama-kv-dynamic-cache.h"

#include "llama-context.h"
#include "llama-io.h"
#include "llama-memory.h"

#include <stdexcept>

bool llama_kv_dynamic::awaits(llama_seq_id seq_id) const {
    return any([&](const auto * cache) { return cache->awaits_copy(seq_id) || (is_late_shift && cache->has_shift(seq_id)); });
}

void llama_kv_dynamic::drop_seq(llama_seq_id seq_id) {
    // what was read is zero again: attention reads what is masked, too
    for (auto * cache : caches) {
        cache->kv.state_clear(seq_id);
    }

    if (seq_id < 0) {
        lctx->memory->clear(true);
    } else {
        lctx->memory->seq_rm(seq_id, -1, -1);
    }
}

uint32_t llama_kv_dynamic_cache::rows_to_save(uint32_t n, uint32_t s0, uint32_t n_stream) {
    n = used_rows(n);

    if (is_dynamic() && storage->reads_below()) {
        for (uint32_t s = s0; s < s0 + n_stream; ++s) {
            want(s, 0, n);
        }

        // the rows of other caches are noted already, in the types that they have
        if (is_wanting() && !dyn->grow(false, false)) {
            throw std::runtime_error("no memory for the rows of a state");
        }
    }

    return n;
}

bool llama_kv_dynamic_cache::has_cells(uint32_t s) const {
    return s < kv.n_stream && kv.v_cells[s].get_used() > 0;
}

void llama_kv_dynamic_cache::begin_write(llama_seq_id seq_id, llama_state_seq_flags flags) {
    // llama_io_write_device takes blocks for elements: most of the rows would not be in it
    if ((flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) && dyn && (dyn->enabled || dyn->counters.n_retype > 0) && has_types() &&
            (ggml_is_quantized(types().first) || ggml_is_quantized(types().second))) {
        throw std::runtime_error("a state on the device cannot have quantized cells");
    }

    if (!dyn || !dyn->enabled || !dyn->awaits(seq_id)) { // in any of the caches: this one may be of a fixed size
        return;
    }

    // in a static cache the batch that found no memory for it would have done that
    dyn->update();

    if (dyn->awaits(seq_id)) {
        throw std::runtime_error("a copy or a shift of the sequence waits for memory");
    }
}

bool llama_kv_dynamic_cache::grow_now(llama_io_read_i & io) {
    if (!is_wanting()) {
        return true;
    }

    // rows that were read but not written yet have offsets in the current layout
    io.flush();

    // what is noted of a state on the device is not flushed, and has the types of now
    const bool res = dyn->grow(false, !is_state_on_device);
    if (!res) {
        drop_read();
    }

    return res;
}

void llama_kv_dynamic_cache::drop_read() {
    // the other caches may have their part already
    if (seq_id_read) {
        dyn->drop_seq(*seq_id_read);
    }
}

llama_kv_dynamic_room llama_kv_dynamic_cache::reserve(llama_io_read_i & io, const llama_kv_cache::slot_info & sinfo) {
    if (dyn) {
        dyn->forget(); // what a batch asked for that did not run
    }

    // of what is about to be overwritten, or to it
    const auto is_late = [&](const auto * cache) { return cache->is_late_in(sinfo.strm); };

    if (dyn && dyn->any(is_late)) {
        for (auto * cache : dyn->caches) {
            cache->drop_late_copies();
        }

        io.flush();
        dyn->update();

        if (dyn->any(is_late)) {
            drop_read();
            return { 0 };
        }
    }

    request({ sinfo });

    return { grow_now(io) ? n_rows() : 0 };
}

bool llama_kv_dynamic_cache::reserve_rows(llama_io_read_i & io, uint32_t n) {
    if (n > n_max_cells) {
        return false;
    }

    const bool is_one = seq_id_read && *seq_id_read >= 0;

    seq_rows n_seq;
    n_seq.fill(is_one ? int64_t(-1) : int64_t(n));
    if (is_one) {
        n_seq[*seq_id_read] = n;
    }

    request_rows(n_seq);

    if (grow_now(io)) {
        return true;
    }
    take_back_rows();

    return false;
}

llama_kv_dynamic_room llama_kv_dynamic_cache::room(const llama_kv_cache::slot_info & sinfo) const {
    if (is_late_in(sinfo.strm)) {
        return { 0 }; // the copy that the state was refused for reads them yet
    }

    for (size_t s = 0; s < sinfo.n_stream(); ++s) {
        for (const uint32_t idx : sinfo.idxs[s]) {
            if (!storage->has(sinfo.strm[s], idx)) {
                return { 0 };
            }
        }
    }

    return { n_rows() };
}
