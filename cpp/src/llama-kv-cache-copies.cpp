#include "llama-kv-cache-copies.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"

#include <algorithm>
#include <new>

void llama_kv_cache_copies::begin() {
    pending.ssrc.clear();
    pending.sdst.clear();
}

bool llama_kv_cache_copies::copy_stream(uint32_t ssrc, uint32_t sdst) {
    late_clear.reset(sdst); // the stream is replaced completely, so it need not be cleared before

    cache.planned.copy_stream(ssrc, sdst);

    auto & storage = cache.storage();

    // storage by copy has the same rows in all streams, so the caller can copy the stream as in a static cache
    if (!cache.is_dynamic() || storage.has_size()) {
        return false;
    }

    if (pending.empty()) {
        try {
            auto rows = storage.rows();
            rows.set_stream(sdst, storage.rows(), ssrc);

            auto & limit = cache.dyn->limit();

            if (limit.fits_rows(cache, rows) && storage.try_resize(rows, {})) {
                limit.account();
                return storage.copy_stream(ssrc, sdst);
            }
        } catch (const std::bad_alloc &) {
        }
    }

    LLAMA_LOG_WARN("%s: not enough memory to copy a sequence, the next batch tries again\n", __func__);

    has_late = true;

    pending.ssrc.push_back(ssrc); // needs no memory, because the copy was in the list before
    pending.sdst.push_back(sdst);

    return true;
}

bool llama_kv_cache_copies::end() {
    has_late = !pending.empty(); // also false if the late copies were done

    for (size_t s = 0; !has_late && late_clear.any(); ++s) {
        if (late_clear.test(s)) {
            late_clear.reset(s);
            cache.clear(s);
        }
    }

    return !has_late;
}

void llama_kv_cache_copies::drop_late() {
    if (!has_late) {
        return;
    }

    auto & [ssrc, sdst] = pending;

    for (size_t i = ssrc.size(); i-- > 0; ) {
        const uint32_t s = sdst[i];
        // the compressed rows of DSV4 have no cells. So their copy is wanted if any cache of the context has cells in the
        // stream
        const bool is_wanted = cache.planned.is_in_use() ?
            cache.dyn->any([&](const auto * other) { return other->has_cells(s); }) : cache.has_cells(s);

        if (!is_wanted && std::find(ssrc.begin() + i + 1, ssrc.end(), s) == ssrc.end()) {
            ssrc.erase(ssrc.begin() + i);
            sdst.erase(sdst.begin() + i);
        }
    }

    end();
}

bool llama_kv_cache_copies::is_late_in(const std::vector<llama_seq_id> & strm) const {
    const auto has = [&](const auto & streams) {
        return std::find_first_of(streams.begin(), streams.end(), strm.begin(), strm.end()) != streams.end();
    };

    return is_late() && (has_shift() || has(pending.ssrc) || has(pending.sdst));
}

bool llama_kv_cache_copies::has_copy(llama_seq_id seq_id) const {
    const auto & sdst = pending.sdst;

    return cache.is_dynamic() && !sdst.empty() && (cache.storage().reads_below() || has_late) &&
        (seq_id < 0 || (has_late && has_shift()) || std::find(sdst.begin(), sdst.end(), seq_to_stream[seq_id]) != sdst.end());
}

bool llama_kv_cache_copies::clear_later(llama_seq_id seq_id) {
    const auto & ssrc = pending.ssrc;

    if (cache.is_dynamic() && seq_id >= 0 && is_late() && std::find(ssrc.begin(), ssrc.end(), (uint32_t) seq_id) != ssrc.end()) {
        late_clear.set(seq_id);
        return true;
    }

    return false;
}

bool llama_kv_cache_copies::has_shift(llama_seq_id seq_id) const {
    if (seq_id < 0 || !kv.get_has_shift()) {
        return kv.get_has_shift();
    }

    const auto & cells = v_cells[seq_to_stream[seq_id]];

    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (cells.seq_has(i, seq_id) && cells.get_shift(i) != 0) {
            return true;
        }
    }

    return false;
}

std::vector<llama_kv_cache_copies::row_range> llama_kv_cache_copies::shift_ranges() const {
    std::vector<row_range> res;

    // without layers, the graph does not use its input
    if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE || !cache.has_layers()) {
        return res;
    }

    for (uint32_t s = 0; s < kv.get_n_stream(); ++s) {
        cache.storage().rows().each_run(s, [&](uint32_t i0, uint32_t i1) {
            const int64_t ir = (int64_t) s*cache.n_rows() + i0;

            if (!res.empty() && res.back().first + res.back().second == ir) {
                res.back().second += i1 - i0;
            } else {
                res.emplace_back(ir, i1 - i0);
            }
        });
    }

    std::stable_sort(res.begin(), res.end(), [](const row_range & a, const row_range & b) { return a.second > b.second; });

    return res;
}

void llama_kv_cache_copies::begin_shift(ggml_backend_sched_t sched, const row_range & rows) {
    // wait until the previous range of rows is shifted, because the input of its graph is about to be overwritten
    if (rows.second < (int64_t) cache.n_rows()*kv.get_n_stream()) {
        ggml_backend_sched_synchronize(sched);
    }

    range = rows;

    // count the bytes of the compute buffers, because the graph of a shift can need more memory than any batch
    if (cache.dyn) {
        cache.dyn->copies.begin_shift();
    }
}

void llama_kv_cache_copies::set_late_shift() {
    if (cache.dyn) {
        cache.dyn->copies.set_late_shift();
    }
}

void llama_kv_cache_copies::set_shift(int32_t * data, int64_t i_row, int32_t shift) const {
    if (i_row >= range.first && i_row < range.first + range.second) {
        data[i_row - range.first] = shift;
    }
}
