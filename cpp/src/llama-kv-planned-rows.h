#pragma once

// Rows of one compressed cache of DSV4. Such a cache is a llama_kv_cache in which batches write rows, but use no cells
//
// For each ubatch, llama_kv_cache_dsv4 makes a plan (comp_plan), which depends on the number of rows of the compressed caches.
// So the rows are requested before the plans are made. The rows are freed when the cache is cleared or a whole sequence is
// removed, but not when a part of a sequence is removed.

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

    // request the rows of compressed caches for a batch, and grow all caches of the context
    // The growth includes rows that were requested for other caches before. Call this before the plans of the batch are made.
    // rows: pairs of a compressed cache and a number n. the cache has one row for every n positions
    // returns false if there is no memory
    static bool grow(const std::vector<std::pair<llama_kv_cache *, uint32_t>> & rows, const std::vector<llama_ubatch> & ubatches);

    // allocate the first n rows for a state that is read, in the stream of its sequence or in all streams
    // returns false if there is no memory
    bool reserve(llama_io_read_i & io, uint32_t n);

    // return how many of the first n rows a state has to contain, and allocate these rows in the streams [s0, s0 + n_stream)
    // throws std::runtime_error if there is no memory for them
    uint32_t rows_to_save(uint32_t n, uint32_t s0, uint32_t n_stream);

    // check whether rows without cells were requested for this cache. Such a cache uses no cells
    bool is_in_use() const { return in_use; }

    // n_used():          return the number of used rows of stream s
    // n_used_of_first(): return how many of the first n rows of the tensors are used by at least one stream
    uint32_t n_used(uint32_t s) const { return n_rows[s]; }
    uint32_t n_used_of_first(uint32_t n) const;

    // note that a stream becomes a copy of another one
    void copy_stream(uint32_t ssrc, uint32_t sdst);

    // note that no row of the sequence is used any more. -1: of any sequence
    void clear(llama_seq_id seq_id);

private:
    // number of rows of each sequence, counted from the first row. -1: the sequence is not in the batch
    using seq_rows = std::array<int64_t, LLAMA_MAX_SEQ>;

    void request(const seq_rows & n);
    void undo_request(); // undo the last request(), because there was no memory

    llama_kv_dynamic_cache & cache;

    const std::vector<uint32_t> & seq_to_stream;

    bool in_use = false;

    std::vector<uint32_t> n_rows;        // used rows of each stream
    std::vector<uint32_t> n_rows_before; // used rows of each stream before the last request
};
