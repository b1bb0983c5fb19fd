// What llama_kv_cache calls where its storage has to have rows, and where it would go over rows that are not there. The storage
// that it starts with: llama-kv-dynamic-start.cpp, its states: -state.cpp, copies of its streams: -copies.cpp

#include "llama-kv-dynamic-cache.h"

#include "llama-impl.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <map>
#include <new>
#include <utility>

llama_kv_dynamic_cache::llama_kv_dynamic_cache(llama_kv_cache & kv, uint32_t n_max, bool offload) :
    kv(kv), dyn(llama_kv_dynamic::current()), n_max_cells(n_max),
    storage(llama_kv_storage::create_fixed(kv.n_stream, n_max, kv.v_trans, kv.ctxs_bufs)), offload(offload) {
    if (const auto * other = kv.other) {
        owner = other->dyn.get();

        if (dyn && owner->dyn) {
            owner->dyn->add_reader(dyn);
        }
    } else if (dyn) {
        dyn->caches.push_back(this);
    }
}

llama_kv_dynamic_cache::~llama_kv_dynamic_cache() {
    if (dyn) {
        dyn->caches.erase(std::remove(dyn->caches.begin(), dyn->caches.end(), this), dyn->caches.end());
    }
}

llama_kv_cache::slot_info llama_kv_dynamic_cache::with_purged(llama_kv_cache::slot_info sinfo) const {
    for (size_t s = 0; s < sinfo.n_stream(); ++s) {
        const auto & cells = kv.v_cells[sinfo.strm[s]];

        // as llama_kv_cache::apply_ubatch(): the last position of each sequence that is overwritten
        std::map<llama_seq_id, llama_pos> pos_max;

        for (const uint32_t idx : sinfo.idxs[s]) {
            for (llama_seq_id seq_id = 0; seq_id < LLAMA_MAX_SEQ && !cells.is_empty(idx); ++seq_id) {
                if (cells.seq_has(idx, seq_id)) {
                    auto & pos = pos_max.emplace(seq_id, -1).first->second;

                    pos = std::max(pos, cells.pos_get(idx));
                }
            }
        }

        for (uint32_t i = 0; i < cells.used_max_p1() && !pos_max.empty(); ++i) {
            const bool is_purged = !cells.is_empty(i) && std::any_of(pos_max.begin(), pos_max.end(), [&](const auto & cur) {
                return cells.seq_has(i, cur.first) && cells.pos_get(i) <= cur.second;
            });

            if (is_purged) {
                sinfo.idxs[s].push_back(i);
            }
        }
    }

    return sinfo;
}

//
// ask for rows
//

void llama_kv_dynamic_cache::want(uint32_t s, uint32_t i0, uint32_t i1) try {
    const uint32_t n_block = storage->rows().n_block();

    for (uint32_t i = i0; i < i1; i = (i/n_block + 1)*n_block) {
        if (!storage->has(s, i)) {
            if (!need) {
                need = storage->rows().none();
            }
            need->add(s, i, i + 1);
        }
    }
} catch (const std::bad_alloc &) {
    dyn->is_failed = true;
}

void llama_kv_dynamic_cache::want(uint32_t i0, uint32_t i1) {
    for (uint32_t s = 0; s < kv.n_stream && is_dynamic(); ++s) {
        want(s, i0, i1);
    }
}

void llama_kv_dynamic_cache::request(const slot_info_vec_t & sinfos) {
    // a draft reads the cells of its target, also together where the target had them in one batch after the other
    if (dyn && owner && owner->dyn && owner->storage->reads_below()) {
        owner->need.reset();
        owner->want_windows(sinfos);

        if (owner->is_wanting() && !owner->dyn->grow()) {
            dyn->is_failed = true;
        }
    }

    if (!is_dynamic()) {
        return;
    }

    // what an attempt to place the batch asked for that came to nothing
    need.reset();

    for (const auto & sinfo : sinfos) {
        for (size_t s = 0; s < sinfo.n_stream(); ++s) {
            for (const uint32_t idx : sinfo.idxs[s]) {
                n_peak = std::max(n_peak, idx + 1);
                want(sinfo.strm[s], idx, idx + 1);
            }
        }
    }

    if (storage->reads_below()) {
        want_windows(sinfos);
    }
}

// all that attention covers: as many rows of each stream of a batch as the longest one has, with what comes before in the same batch
void llama_kv_dynamic_cache::want_windows(const slot_info_vec_t & sinfos) {
    uint32_t end = 0;

    for (const auto & sinfo : sinfos) {
        for (size_t s = 0; s < sinfo.n_stream(); ++s) {
            end = std::max(end, kv.v_cells[sinfo.strm[s]].used_max_p1());

            for (const uint32_t idx : sinfo.idxs[s]) {
                end = std::max(end, idx + 1);
            }
        }

        for (size_t s = 0; s < sinfo.n_stream(); ++s) {
            want(sinfo.strm[s], 0, end);
        }
    }
}

void llama_kv_dynamic_cache::request_rows(const seq_rows & n) {
    // attention covers as many rows of each stream of a batch as the longest one has
    const int64_t end = std::min<int64_t>(*std::max_element(n.begin(), n.end()), n_max_cells);

    is_compressed = true;

    n_rows_before = n_rows_used;

    need.reset();

    for (size_t i = 0; i < std::min(n.size(), kv.seq_to_stream.size()); ++i) {
        if (n[i] < 0) {
            continue;
        }

        const uint32_t s     = kv.seq_to_stream[i];
        const uint32_t n_cur = std::min<int64_t>(n[i], n_max_cells);

        n_rows_used[s] = std::max(n_rows_used[s], n_cur);

        if (is_dynamic()) {
            want(s, 0, storage->reads_below() ? end : n_cur);
        }
    }

    // dummy writes go to the last row of the tensors: out of the attention window, where what was not written has to be zero
    if (!storage->has_size()) {
        want(n_max_cells - 1, n_max_cells);
    }
}

void llama_kv_dynamic_cache::take_back_rows() {
    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        n_rows_used[s] = std::min(n_rows_used[s], n_rows_before[s]); // or fewer: the sequence has gone
    }
}

uint32_t llama_kv_dynamic_cache::used_rows(uint32_t n) const {
    if (!is_dynamic()) {
        return n;
    }

    // not the last one, which takes dummy writes
    return std::min({ n, *std::max_element(n_rows_used.begin(), n_rows_used.end()), n_rows() < n_max_cells ? n_rows() - 1 : n_max_cells });
}

bool llama_kv_dynamic_cache::grow_rows(
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

        kv->dyn->request_rows(n);
    }

    const auto & dyn = rows[0].first->dyn->dyn; // that of all

    if (!dyn || dyn->grow()) {
        return true;
    }

    for (const auto & [kv, ratio] : rows) {
        kv->dyn->take_back_rows();
    }

    return false;
}

bool llama_kv_dynamic_cache::clear(llama_seq_id seq_id) {
    const auto & ssrc = kv.sc_info.ssrc;

    if (is_dynamic() && seq_id >= 0 && is_late() && std::find(ssrc.begin(), ssrc.end(), (uint32_t) seq_id) != ssrc.end()) {
        late_clear.set(seq_id); // what waits is to read it
        return true;
    }

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        n_rows_used[s] = seq_id < 0 || kv.seq_to_stream[seq_id] == s ? 0 : n_rows_used[s];
    }

    if (!dyn || !dyn->enabled) {
        return false;
    }

    dyn->synchronize();

    try {
        const uint32_t n_cells = storage->rows().size();

        const bool res = storage->clear(seq_id);

        if (storage->rows().size() < n_cells) {
            dyn->count_shrink(0);
        }

        return res;
    } catch (const std::bad_alloc &) {
        return false; // then without giving anything back
    }
}

//
// what runs over all cells of a stream
//

bool llama_kv_dynamic_cache::has_shift(llama_seq_id seq_id) const {
    if (seq_id < 0 || !kv.get_has_shift()) {
        return kv.get_has_shift();
    }

    const auto & cells = kv.v_cells[kv.seq_to_stream[seq_id]];

    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (cells.seq_has(i, seq_id) && cells.get_shift(i) != 0) {
            return true;
        }
    }

    return false;
}

std::vector<llama_kv_dynamic_cache::row_range> llama_kv_dynamic_cache::shift_ranges() {
    std::vector<row_range> res;

    if (dyn && has_types() && ggml_is_quantized(types().first)) {
        dyn->find_rotation();
    }

    // without layers the graph has no use for its input
    if (kv.hparams.rope_type == LLAMA_ROPE_TYPE_NONE || kv.layers.empty()) {
        return res;
    }

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        storage->rows().each_run(s, [&](uint32_t i0, uint32_t i1) {
            const int64_t ir = (int64_t) s*n_rows() + i0;

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

void llama_kv_dynamic_cache::begin_shift(ggml_backend_sched_t sched, const row_range & rows) {
    // the input of the previous range is about to be overwritten
    if (rows.second < (int64_t) n_rows()*kv.n_stream) {
        ggml_backend_sched_synchronize(sched);
    }

    range = rows;

    // by a graph that can need more than any batch. once: with a range that is shifted already, nothing may throw
    if (dyn && !std::exchange(dyn->is_shifted, true)) {
        dyn->begin_account();
    }
}

void llama_kv_dynamic_cache::set_late_shift() {
    if (dyn) {
        dyn->is_late_shift = true;
        dyn->set_sched_lost();
    }
}

void llama_kv_dynamic_cache::set_shift(int32_t * data, int64_t i_row, int32_t shift) const {
    if (i_row >= range.first && i_row < range.first + range.second) {
        data[i_row - range.first] = shift;
    }
}

bool llama_kv_dynamic_cache::has_types() const {
    return !owner && !kv.layers.empty();
}

std::pair<ggml_type, ggml_type> llama_kv_dynamic_cache::types() const {
    const auto & layer = kv.layers.front();

    return { layer.k->type, layer.v ? layer.v->type : layer.k->type };
}

//
// llama_kv_cache
//

uint32_t llama_kv_cache::get_size_max() const {
    return v_cells[seq_to_stream[0]].size();
}
