#include "llama-kv-state-rows.h"

#include "llama-io.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"

#include <stdexcept>

void llama_kv_state_rows::begin_write(llama_seq_id seq_id, llama_state_seq_flags flags) {
    auto * dyn = cache.dyn.get();

    // llama_io_write_device divides the bytes of the rows by ggml_element_size(). For quantized cells, this is the size of a
    // quantization block, so the writer would count blocks instead of elements, and most of the rows would be missing.
    if ((flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) && dyn && (dyn->is_enabled() || dyn->usage.has_retyped()) && cache.has_types() &&
            (ggml_is_quantized(cache.cell_types().first) || ggml_is_quantized(cache.cell_types().second))) {
        throw std::runtime_error("a state on the device cannot have quantized cells");
    }

    if (!dyn || !dyn->is_enabled() || !dyn->copies.is_pending(seq_id)) { // check all caches, because this one may have a fixed size
        return;
    }

    // make the pending copy now. In a static cache, the copy would exist already: the batch that failed here for lack of memory
    // would have made the copy.
    dyn->copies.update();

    if (dyn->copies.is_pending(seq_id)) {
        throw std::runtime_error("a copy or a shift of the sequence waits for memory");
    }
}

void llama_kv_state_rows::begin_read(llama_seq_id seq_id, llama_state_seq_flags flags) {
    seq_id_read = seq_id;

    on_device = flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;
}

bool llama_kv_state_rows::grow(llama_io_read_i & io) {
    if (!cache.requested.is_pending()) {
        return true;
    }

    // write rows that were read but not written yet, because their offsets are those of the current layout
    io.flush();

    // If the state is in device memory, flush() has not written the rows of the state. These rows have the current types of the
    // cells, so the growth must not change these types.
    const bool res = cache.dyn->grow(false, !on_device);
    if (!res) {
        drop();
    }

    return res;
}

void llama_kv_state_rows::drop() {
    if (seq_id_read) {
        cache.dyn->drop_seq(*seq_id_read);
    }
}

llama_kv_dynamic_room llama_kv_state_rows::reserve(llama_io_read_i & io, const llama_kv_cache::slot_info & sinfo) {
    auto * dyn = cache.dyn.get();

    if (dyn) {
        dyn->forget(); // forget the rows that were requested for a batch that did not run
    }

    // find a late copy (see llama-kv-cache-copies.h) that reads or writes a stream in which the state will overwrite cells
    const auto is_late = [&](const auto * other) { return other->copies.is_late_in(sinfo.strm); };

    if (dyn && dyn->any(is_late)) {
        for (auto * other : dyn->caches()) {
            other->copies.drop_late();
        }

        io.flush();
        dyn->copies.update();

        if (dyn->any(is_late)) {
            dyn->usage.count_no_memory();
            drop();
            return { 0 };
        }
    }

    cache.request({ sinfo });

    return { grow(io) ? cache.n_rows() : 0 };
}

llama_kv_dynamic_room llama_kv_state_rows::room(const llama_kv_cache::slot_info & sinfo) const {
    if (cache.copies.is_late_in(sinfo.strm)) {
        return { 0 }; // the late copy, because of which the state was refused, still reads the cells
    }

    for (size_t s = 0; s < sinfo.n_stream(); ++s) {
        for (const uint32_t idx : sinfo.idxs[s]) {
            if (!cache.storage().has(sinfo.strm[s], idx)) {
                return { 0 };
            }
        }
    }

    return { cache.n_rows() };
}
