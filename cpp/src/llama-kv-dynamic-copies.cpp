// Copies of streams. One that finds no memory is late: it waits, with those behind it and the K-shift after it, for the next batch, which
// does not run before they are made

#include "llama-kv-dynamic-cache.h"

#include "llama-impl.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

void llama_kv_dynamic_cache::begin_copies() {
    kv.sc_info.ssrc.clear();
    kv.sc_info.sdst.clear();
}

bool llama_kv_dynamic_cache::copy_stream(uint32_t ssrc, uint32_t sdst) {
    late_clear.reset(sdst); // all of it becomes the other one

    n_rows_used[sdst] = std::max(n_rows_used[sdst], n_rows_used[ssrc]);

    // by copy all streams have the same rows
    if (!is_dynamic() || storage->has_size()) {
        return false;
    }

    // in their order: what waits behind one that failed may be a copy of it
    if (kv.sc_info.empty()) {
        try {
            auto rows = storage->rows();
            rows.set_stream(sdst, storage->rows(), ssrc);

            const auto n_bytes = [&](const llama_kv_rows & r) { return storage->n_bytes(r, dyn->types().first, dyn->types().second); };

            // without a budget there can be no types to count in
            const bool fits = !dyn->budget || rows == storage->rows() || dyn->is_within(dyn->n_bytes_caches() - n_bytes(storage->rows()) + n_bytes(rows));

            if (fits && storage->try_resize(rows, {})) {
                dyn->account();
                return storage->copy_stream(ssrc, sdst);
            }
        } catch (const std::bad_alloc &) {
        }
    }

    LLAMA_LOG_WARN("%s: not enough memory to copy a sequence, the next batch tries again\n", __func__);

    has_late_copy = true;

    kv.sc_info.ssrc.push_back(ssrc); // it was there: needs no memory
    kv.sc_info.sdst.push_back(sdst);

    return true;
}

bool llama_kv_dynamic_cache::end_copies() {
    has_late_copy = !kv.sc_info.empty(); // or they have been made

    for (size_t s = 0; !has_late_copy && late_clear.any(); ++s) {
        if (late_clear.test(s)) {
            late_clear.reset(s);
            clear(s);
        }
    }

    return !has_late_copy;
}

void llama_kv_dynamic_cache::drop_late_copies() {
    if (!has_late_copy) {
        return;
    }

    auto & [ssrc, sdst] = kv.sc_info;

    for (size_t i = ssrc.size(); i-- > 0; ) {
        const uint32_t s = sdst[i];
        // compressed rows (DSV4) go with the cells of other caches
        const bool is_wanted = is_compressed ? dyn->any([&](const auto * cache) { return cache->has_cells(s); }) : has_cells(s);

        if (!is_wanted && std::find(ssrc.begin() + i + 1, ssrc.end(), s) == ssrc.end()) {
            ssrc.erase(ssrc.begin() + i);
            sdst.erase(sdst.begin() + i);
        }
    }

    end_copies();
}

bool llama_kv_dynamic_cache::is_late_in(const std::vector<llama_seq_id> & strm) const {
    const auto has = [&](const auto & streams) {
        return std::find_first_of(streams.begin(), streams.end(), strm.begin(), strm.end()) != streams.end();
    };

    return is_late() && (has_shift() || has(kv.sc_info.ssrc) || has(kv.sc_info.sdst));
}

bool llama_kv_dynamic_cache::awaits_copy(llama_seq_id seq_id) const {
    const auto & sdst = kv.sc_info.sdst;

    return is_dynamic() && !sdst.empty() && (storage->reads_below() || has_late_copy) &&
        (seq_id < 0 || (has_late_copy && has_shift()) || std::find(sdst.begin(), sdst.end(), kv.seq_to_stream[seq_id]) != sdst.end());
}

//
// llama_kv_dynamic
//

bool llama_kv_dynamic::finish_copies() {
    // in smaller types there can be room for those that wait
    while (any([](const auto * cache) { return cache->is_late(); })) {
        if (!step_down()) {
            forget();
            return false;
        }
        update();
    }

    return true;
}
