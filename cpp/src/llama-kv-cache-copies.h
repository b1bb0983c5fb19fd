#pragma once

// Pending stream copies and K-shifts of one llama_kv_cache (--kv-dynamic), see llama-kv-copies.h
//
// The copies are made in the order in which they were requested. A copy that finds no memory is late, which means that it stays
// pending. All copies after a late copy also stay pending, because they may read its result. The K-shift also waits, because
// the K-shift must follow the copies.

#include "llama-kv-cache.h"

#include "ggml-backend.h"

#include <bitset>
#include <cstdint>
#include <utility>
#include <vector>

class llama_kv_dynamic_cache;

class llama_kv_cache_copies {
public:
    // first row, number of rows. Row i of stream s has the number s*n_rows + i, where n_rows is the size of a stream in rows
    using row_range = std::pair<int64_t, int64_t>;

    // pending: stream copies of the cache that are not done yet
    llama_kv_cache_copies(
            llama_kv_dynamic_cache & cache, llama_kv_cache & kv, const llama_hparams & hparams,
            llama_kv_cache::stream_copy_info & pending, const llama_kv_cells_vec & v_cells, const std::vector<uint32_t> & seq_to_stream) :
        cache(cache), kv(kv), hparams(hparams), pending(pending), v_cells(v_cells), seq_to_stream(seq_to_stream) {}

    //
    // copies of streams
    //

    // begin to make the pending copies: empty the list of pending copies
    // copy_stream() adds a copy that finds no memory to the list again. The list needs no new memory for that.
    void begin();

    // copy all rows of stream ssrc to stream sdst. returns false if the caller must copy them as in a static cache
    bool copy_stream(uint32_t ssrc, uint32_t sdst);

    // finish making the pending copies. returns false if a copy is late
    bool end();

    // drop late copies that are not needed any more, because the cells of their destination stream were freed
    void drop_late();

    // check whether a copy is late. Until it is done, no batch may run, and no K-shift, because both need its result
    bool is_late() const { return has_late && !pending.empty(); }

    // check whether a state of these streams must wait before it is written or read. This is the case if a late copy reads or
    // writes one of the streams, or if a K-shift must follow a late copy
    bool is_late_in(const std::vector<llama_seq_id> & strm) const;

    // check whether a copy to the stream of this sequence is pending: a late copy, or with llama_kv_storage::reads_below() also
    // a copy that only waits for the next batch. Also true if a K-shift waits for a late copy to any stream
    // -1: check the copies to all streams
    bool has_copy(llama_seq_id seq_id) const;

    // if a late copy reads the stream of this sequence, clear the stream after the copy instead of now. returns false if no late
    // copy reads it
    bool clear_later(llama_seq_id seq_id);

    bool is_empty() const { return pending.empty(); }

    // call f(source, destination) for each pending copy, beginning with the last one
    template <typename F>
    void each_reversed(F && f) const {
        for (size_t i = pending.ssrc.size(); i-- > 0; ) {
            f(pending.ssrc[i], pending.sdst[i]);
        }
    }

    //
    // K-shift over the existing rows: one graph for each range of rows
    //

    // check whether a K-shift of this sequence is pending. -1: of any sequence
    bool has_shift(llama_seq_id seq_id = -1) const;

    // return the ranges of rows to shift, the largest first
    // The largest range needs the most memory for its graph. So if memory is missing, it is missing for the first range, when
    // nothing is shifted yet.
    std::vector<row_range> shift_ranges() const;

    void begin_shift(ggml_backend_sched_t sched, const row_range & rows);

    // note that the shift must wait, because there was no memory for its graph
    void set_late_shift();

    // return the range that is being shifted
    row_range shifted() const { return range; }

    // set the shift of row i_row in the input of the graph, if the row is in the range that is being shifted
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
