#pragma once

// Pending stream copies and K-shifts of one llama_kv_cache (--kv-dynamic), see llama-kv-copies.h
//
// The copies are made in their order. A copy without memory is late: it stays pending, together with all copies after it, which may
// read its result, and with the K-shift after them.

#include "llama-kv-cache.h"

#include "ggml-backend.h"

#include <bitset>
#include <cstdint>
#include <utility>
#include <vector>

class llama_kv_dynamic_cache;

class llama_kv_cache_copies {
public:
    using row_range = std::pair<int64_t, int64_t>; // first row, number of rows, over all streams

    // pending: the copies of the cache that are not done yet
    llama_kv_cache_copies(
            llama_kv_dynamic_cache & cache, llama_kv_cache & kv, const llama_hparams & hparams,
            llama_kv_cache::stream_copy_info & pending, const llama_kv_cells_vec & v_cells, const std::vector<uint32_t> & seq_to_stream) :
        cache(cache), kv(kv), hparams(hparams), pending(pending), v_cells(v_cells), seq_to_stream(seq_to_stream) {}

    //
    // copies of streams
    //

    // begin to make the pending copies. a copy without memory becomes pending again, one by one, in space that exists already
    void begin();

    // copy a stream. returns false if the caller must copy it as in a static cache
    bool copy_stream(uint32_t ssrc, uint32_t sdst);

    // the copies are done, as far as there was memory. returns false when one is late
    bool end();

    // drop the late copies whose cells were freed meanwhile
    void drop_late();

    // check whether a copy is late. then no batch may run, and no K-shift, which must follow the copy
    bool is_late() const { return has_late && !pending.empty(); }

    // check whether a late copy reads or writes one of these streams, or a K-shift must follow it
    bool is_late_in(const std::vector<llama_seq_id> & strm) const;

    // check whether a copy to the stream of the sequence, or to any (-1), is pending, also if it only waits for the next batch
    bool has_copy(llama_seq_id seq_id) const;

    // have the stream of the sequence cleared after a late copy that reads it. returns false if there is none
    bool clear_later(llama_seq_id seq_id);

    bool is_empty() const { return pending.empty(); }

    // f(source, destination) of each pending copy, the last one first
    template <typename F>
    void each_reversed(F && f) const {
        for (size_t i = pending.ssrc.size(); i-- > 0; ) {
            f(pending.ssrc[i], pending.sdst[i]);
        }
    }

    //
    // K-shift over the existing rows: one graph for each range of rows
    //

    // check whether a shift of the sequence, or of any (-1), is pending
    bool has_shift(llama_seq_id seq_id = -1) const;

    // return the ranges, the largest first: if there is no memory for a graph, then for the first one, and nothing was shifted
    std::vector<row_range> shift_ranges() const;

    void begin_shift(ggml_backend_sched_t sched, const row_range & rows);

    // there was no memory for the graph
    void set_late_shift();

    // the range that is being shifted
    row_range shifted() const { return range; }

    // set the shift of a row in the input of the graph
    void set_shift(int32_t * data, int64_t i_row, int32_t shift) const;

private:
    llama_kv_dynamic_cache & cache;

    llama_kv_cache &                   kv;
    const llama_hparams &              hparams;
    llama_kv_cache::stream_copy_info & pending;
    const llama_kv_cells_vec &         v_cells;
    const std::vector<uint32_t> &      seq_to_stream;

    bool has_late = false;

    std::bitset<LLAMA_MAX_SEQ> late_clear; // streams to be cleared after the late copies

    row_range range = { 0, 0 };
};
