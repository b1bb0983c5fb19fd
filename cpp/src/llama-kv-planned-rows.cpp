#include "llama-kv-planned-rows.h"

#include "llama-io.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"

#include <algorithm>
#include <stdexcept>

void llama_kv_planned_rows::request(const seq_rows & n) {
    // attention reads the same number of rows in each stream of a batch, namely as many as the longest stream has
    const int64_t end = std::min<int64_t>(*std::max_element(n.begin(), n.end()), cache.n_max_cells);

    in_use = true;

    n_rows_before = n_rows;

    cache.requested.clear();

    for (size_t i = 0; i < std::min(n.size(), seq_to_stream.size()); ++i) {
        if (n[i] < 0) {
            continue;
        }

        const uint32_t s     = seq_to_stream[i];
        const uint32_t n_cur = std::min<int64_t>(n[i], cache.n_max_cells);

        n_rows[s] = std::max(n_rows[s], n_cur);

        if (cache.is_dynamic()) {
            cache.requested.add(s, 0, cache.storage().reads_below() ? end : n_cur);
        }
    }

    // Dummy writes use the last row of the tensors. It is outside of the attention window, in which unwritten rows must be zero.
    if (!cache.storage().has_size()) {
        cache.requested.add(cache.n_max_cells - 1, cache.n_max_cells);
    }
}

void llama_kv_planned_rows::undo_request() {
    for (size_t s = 0; s < n_rows.size(); ++s) {
        n_rows[s] = std::min(n_rows[s], n_rows_before[s]); // fewer rows if the sequence was removed since
    }
}

uint32_t llama_kv_planned_rows::n_used_of_first(uint32_t n) const {
    if (!cache.is_dynamic()) {
        return n;
    }

    const uint32_t n_all = cache.n_rows();

    // exclude the last row, which receives dummy writes
    return std::min({ n, *std::max_element(n_rows.begin(), n_rows.end()), n_all < cache.n_max_cells ? n_all - 1 : cache.n_max_cells });
}

bool llama_kv_planned_rows::grow(
        const std::vector<std::pair<llama_kv_cache *, uint32_t>> & rows,
        const std::vector<llama_ubatch> & ubatches) {
    seq_rows pos_max;
    pos_max.fill(-1);

    for (const auto & ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
                auto & cur = pos_max[ubatch.seq_id[i][s]];
                cur = std::max<int64_t>(cur, ubatch.pos[i]);
            }
        }
    }

    for (const auto & [kv, ratio] : rows) {
        auto n = pos_max;
        for (auto & cur : n) {
            cur = cur < 0 ? -1 : (cur + 1)/ratio;
        }

        kv->dyn->planned.request(n);
    }

    const auto & dyn = rows[0].first->dyn->dyn; // all caches belong to the same context

    if (!dyn || dyn->grow()) {
        return true;
    }

    for (const auto & [kv, ratio] : rows) {
        kv->dyn->planned.undo_request();
    }

    return false;
}

bool llama_kv_planned_rows::reserve(llama_io_read_i & io, uint32_t n) {
    if (n > cache.n_max_cells) {
        return false;
    }

    const auto seq_id = cache.state.seq_id();

    const bool is_one = seq_id && *seq_id >= 0;

    seq_rows n_seq;
    n_seq.fill(is_one ? int64_t(-1) : int64_t(n));
    if (is_one) {
        n_seq[*seq_id] = n;
    }

    request(n_seq);

    if (cache.state.grow(io)) {
        return true;
    }
    undo_request();

    return false;
}

uint32_t llama_kv_planned_rows::rows_to_save(uint32_t n, uint32_t s0, uint32_t n_stream) {
    n = n_used_of_first(n);

    if (cache.is_dynamic() && cache.storage().reads_below()) {
        for (uint32_t s = s0; s < s0 + n_stream; ++s) {
            cache.requested.add(s, 0, n);
        }

        // The state contains the rows of other caches already, in the current types. Some writers note only the offset and the
        // size of these rows, and copy the rows later. So this growth must not change the types of the cells.
        if (cache.requested.is_pending() && !cache.dyn->grow(false, false)) {
            throw std::runtime_error("no memory for the rows of a state");
        }
    }

    return n;
}

void llama_kv_planned_rows::copy_stream(uint32_t ssrc, uint32_t sdst) {
    n_rows[sdst] = std::max(n_rows[sdst], n_rows[ssrc]);
}

void llama_kv_planned_rows::clear(llama_seq_id seq_id) {
    for (size_t s = 0; s < n_rows.size(); ++s) {
        n_rows[s] = seq_id < 0 || seq_to_stream[seq_id] == s ? 0 : n_rows[s];
    }
}
