#pragma once

// Rows of one llama_kv_cache that are written without a cell being occupied: the compressed caches of DSV4
//
// The plan of a batch contains the number of rows, so the rows are requested before the plans are made. They are freed with a clear
// or with a whole sequence, not with a part of one.

#include "llama-kv-cache.h"

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

class llama_io_read_i;
class llama_kv_dynamic_cache;

class llama_kv_planned_rows {
public:
    llama_kv_planned_rows(llama_kv_dynamic_cache & cache, const std::vector<uint32_t> & seq_to_stream, uint32_t n_stream) :
        cache(cache), seq_to_stream(seq_to_stream), n_rows(n_stream), n_rows_before(n_stream) {}

    // grow caches for a batch, and all else that was requested, before the plans of the batch are made
    //   rows: caches that have a row for every so many positions
    // returns false when there is no memory
    static bool grow(const std::vector<std::pair<llama_kv_cache *, uint32_t>> & rows, const std::vector<llama_ubatch> & ubatches);

    // have the first n rows of a stream for a state. returns false when there is no memory
    bool reserve(llama_io_read_i & io, uint32_t n);

    // return how many of the first n rows a state has to contain, and have them in the streams [s0, s0 + n_stream)
    // throws std::runtime_error when there is no memory for that
    uint32_t rows_to_save(uint32_t n, uint32_t s0, uint32_t n_stream);

    // the cache has such rows, and no cells
    bool is_in_use() const { return in_use; }

    // rows that are used: of a stream, and of the first n rows of the tensors
    uint32_t n_used(uint32_t s) const { return n_rows[s]; }
    uint32_t n_used_of_first(uint32_t n) const;

    // a stream becomes a copy of another one
    void copy_stream(uint32_t ssrc, uint32_t sdst);

    // no row of the sequence, or of all (-1), is used any more
    void clear(llama_seq_id seq_id);

private:
    using seq_rows = std::array<int64_t, LLAMA_MAX_SEQ>; // the first n of each sequence, -1: it has no part in the batch

    void request(const seq_rows & n);
    void undo_request(); // there was no memory

    llama_kv_dynamic_cache & cache;

    const std::vector<uint32_t> & seq_to_stream;

    bool in_use = false;

    std::vector<uint32_t> n_rows;        // that are used, of each stream
    std::vector<uint32_t> n_rows_before; // the last request
};
