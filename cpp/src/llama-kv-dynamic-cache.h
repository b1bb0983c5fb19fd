#pragma once

// Dynamic KV cache (--kv-dynamic): one llama_kv_cache, what its batches, states and shifts need of the rows behind its cells, and
// the types and the basis of what is in them. See llama-kv-dynamic.h
//
// All of it runs on the thread that uses the context.

#include "llama-kv.h"

#include "llama-kv-cache.h"
#include "llama-kv-dynamic.h"
#include "llama-kv-storage.h"

#include <array>
#include <bitset>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

// the cells that a state can be read into, or cleared in, where llama_kv_cache has the cells of a static cache there. none
// where some of the cells at hand have no rows: they hold nothing
struct llama_kv_dynamic_room {
    uint32_t n_rows;

    uint32_t size() const {
        return n_rows;
    }
};

// per llama_kv_cache, whose friend it is. It knows the cells, the storage knows the rows
class llama_kv_dynamic_cache {
    friend llama_kv_dynamic;

public:
    using slot_info_vec_t = llama_kv_cache::slot_info_vec_t;
    using row_range       = std::pair<int64_t, int64_t>; // first row, number of rows, over all streams

    // for kv, which has its cells
    // offload: the layers are on the devices of the model
    llama_kv_dynamic_cache(llama_kv_cache & kv, uint32_t n_max, bool offload);
    ~llama_kv_dynamic_cache();

    llama_kv_dynamic_cache(const llama_kv_dynamic_cache &) = delete;
    llama_kv_dynamic_cache & operator=(const llama_kv_dynamic_cache &) = delete;

    //
    // what the cache calls
    //

    // memory for the tensors of ctx, see llama_kv_storage::alloc()
    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

    // rows of a stream that the tensors have
    uint32_t n_rows() const { return owner ? owner->n_rows() : storage->n_rows(); }

    // a slot with the cells that go with those that it overwrites: where there is a window, those of before
    llama_kv_cache::slot_info with_purged(llama_kv_cache::slot_info sinfo) const;

    // the batch at hand was given these cells
    void request(const slot_info_vec_t & sinfos);

    // have rows for a state. none if there is no memory
    llama_kv_dynamic_room reserve(llama_io_read_i & io, const llama_kv_cache::slot_info & sinfo);
    llama_kv_dynamic_room room(const llama_kv_cache::slot_info & sinfo) const;

    // false: to be cleared as usual
    bool clear(llama_seq_id seq_id = -1);

    // the copies that wait are at hand: those that find no memory go back, one by one, for which there is room then
    void begin_copies();

    // false: to be copied as usual
    bool copy_stream(uint32_t ssrc, uint32_t sdst);

    // a copy of a stream found no memory and waits: no batch runs, and no K-shift, which is to come after it
    bool is_late() const { return has_late_copy && !kv.sc_info.empty(); }

    // the copies at hand are made, as far as there was memory. returns false when one is late
    bool end_copies();

    // such a copy is from or to one of these streams, or a K-shift is to come after it
    bool is_late_in(const std::vector<llama_seq_id> & strm) const;

    bool has_shift(llama_seq_id seq_id = -1) const; // that is to be done, of all sequences (-1)

    // a copy to the stream of a sequence, or to any (-1), is still to be made, also one that waits for nothing but the next batch,
    // or a K-shift is to come after one that found no memory
    bool awaits_copy(llama_seq_id seq_id) const;

    bool has_cells(uint32_t s) const; // in use, in a stream

    // a state of a sequence is about to be written: its copy is made
    // throws std::runtime_error when there is no memory, or when such a state cannot be had
    void begin_write(llama_seq_id seq_id, llama_state_seq_flags flags);

    // copies of streams that found no memory and that nobody waits for any more
    void drop_late_copies();

    // K-shift runs over the rows that are there: a graph for each range. the largest first: if there is no memory for a graph,
    // then for the first one, and nothing was shifted
    std::vector<row_range> shift_ranges();

    void      begin_shift(ggml_backend_sched_t sched, const row_range & range);
    void      set_late_shift(); // no memory for the graph
    row_range shifted() const { return range; }
    void      set_shift(int32_t * data, int64_t i_row, int32_t shift) const;

    //
    // rows that are written without a cell being occupied (the compressed caches of DSV4)
    //

    using seq_rows = std::array<int64_t, LLAMA_MAX_SEQ>; // the first n of each sequence, -1: it has no part in the batch

    // have the rows that the plans of a batch contain the number of, and what else was asked for, before they are made
    //   rows: caches that have a row for every so many positions
    // returns false when there is no memory
    static bool grow_rows(const std::vector<std::pair<llama_kv_cache *, uint32_t>> & rows, const std::vector<llama_ubatch> & ubatches);

    void     request_rows(const seq_rows & n);
    void     take_back_rows(); // of the last request: there was no memory
    bool     reserve_rows(llama_io_read_i & io, uint32_t n); // for a state
    uint32_t used_rows   (uint32_t n) const;                 // of the first n

    // the same, and they are there in the streams [s0, s0 + n_stream). throws std::runtime_error when there is no memory for that
    uint32_t rows_to_save(uint32_t n, uint32_t s0, uint32_t n_stream);

    //
    // what the context calls
    //

    // caches with as many cells mirror each other, and the graphs take the number of rows from either: ask for what another one
    // has asked for. so a cache that nobody prepares (the indexer's of a hybrid memory) has rows as well
    void follow(const llama_kv_dynamic_cache & other);

    bool is_ahead() const;            // the policy would take more of them than needed
    bool grow(bool ahead);            // false: no memory, nothing has changed
    void undo();                      // the last grow()
    void settle();                    // the last grow() holds
    void forget();                    // what was asked for

    // the rows of freed cells of all caches of a context
    // throws std::bad_alloc: then not of all of them, but by copy they have one size all the same
    static void release(const std::vector<llama_kv_dynamic_cache *> & caches);

    // by copy: graphs are built over caches of one size, so others of the same cells start so, too
    bool has_size_like(const llama_kv_dynamic_cache & other) const;

    // between the rows of two streams and behind the last one there can be some that nothing may read, not even to copy what is
    // around them to where a graph reads it. nothing is decoded yet
    bool has_gaps() const;

    llama_memory_usage usage() const; // of this cache alone, without the counters

    // the cells of a sequence. adds its part of the bytes behind them
    llama_seq_cells seq_cells(llama_seq_id seq_id, size_t & bytes) const;
    bool            is_window() const { return kv.swa_type != LLAMA_SWA_TYPE_NONE; }

    //
    // other types, see llama-kv-types.cpp
    //

    // false: it has no cells of its own
    bool has_types() const;

    std::pair<ggml_type, ggml_type> types() const;

    // LLAMA_MEMORY_TYPE_OK, or what the sizes of the heads forbid
    int32_t check_types(ggml_type type_k, ggml_type type_v) const;

    // whether a device writes such cells where they are
    // throws std::bad_alloc
    bool can_write(ggml_backend_sched_t sched, ggml_type type_k, ggml_type type_v) const;

    // say that the tensors have these types, and that the graphs are to rotate accordingly, while the data stays what it is
    void pretend_types(ggml_type type_k, ggml_type type_v);

    // views of the cells here of which a graph that is split reads a copy, on another device
    // throws std::bad_alloc
    std::unordered_set<const ggml_tensor *> read_elsewhere(ggml_cgraph * gf) const;

    // whether attention, which then is no flash attention whatever the context says (T5), makes a transposed copy of V
    bool transposes_v(ggml_cgraph * gf) const;

    // whether rows that can be missing are among them: those between the rows of two streams, and where the view is over all of the
    // storage whatever the window is (see kpool_access in llama-memory-hybrid-idx.cpp) those behind the last one
    bool reads_gaps_elsewhere(ggml_cgraph * gf) const;

    // whether K is stored in a rotated basis where its type wants it. shift_ranges() has found out
    bool is_rotated() const { return is_rotated_k; }

    // have the graphs rotate if they can, and see which do
    void begin_find_rotation();
    void end_find_rotation(ggml_backend_sched_t sched); // null: there is no graph

    // the graph that is built now rotates with t. null: it does not
    void note_rot_k(ggml_tensor * t) { noted_rot_k = t; }
    void note_rot_v(ggml_tensor * t) { noted_rot_v = t; }

    //
    // states of other types, which are converted when they are read. a state that is on the device is refused
    //

    void begin_read     (llama_seq_id seq_id, llama_state_seq_flags flags);
    void begin_read_data(uint32_t n_rot_k, uint32_t n_rot_v); // what the types of the state wanted

    bool is_foreign(int32_t type, int32_t type_state, bool is_v) const;

    // the rows of the runs [from, to), one after the other, of a tensor of one stream
    // returns false when that type cannot be read
    template <typename T>
    bool read_foreign(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, bool is_v, const std::vector<T> & runs) {
        std::vector<row_range> rows;
        for (const auto & run : runs) {
            rows.emplace_back(run.from, run.to - run.from);
        }
        return read_rows(io, t, type_state, is_v, is_v ? n_rot_v_state : n_rot_k_state, true, rows);
    }

    // rows [0, n) of the streams [s0, s0 + n_stream) of K
    // throws std::runtime_error when that type cannot be read
    // size_row: what the state says
    void read_foreign_rows(
            llama_io_read_i & io, ggml_tensor * t, int32_t type_state, uint64_t size_row, uint32_t s0, uint32_t n_stream, uint32_t n);

    // compute buffers for the change, and what llama_kv_storage::prepare_types() has
    bool prepare_types(class llama_kv_converter & converter, ggml_type type_k, ggml_type type_v);
    void set_types(class llama_kv_converter & converter, ggml_type type_k, ggml_type type_v);

private:
    size_t size_cell() const; // bytes behind one cell of one stream

    bool is_dynamic() const { return storage->can_grow(); }
    bool is_wanting() const { return need || (dyn && dyn->is_failed); } // rows were asked for, or could not be

    bool can_grow() const;
    std::unique_ptr<llama_kv_storage> create_inplace() const; // null: not here, or nobody wants it
    std::vector<llama_kv_storage::layer> layers_of(ggml_context * ctx) const;
    void take_storage(std::unique_ptr<llama_kv_storage> from);
    bool restart(); // with storage by copy. false: there is no memory, and the cache cannot be used

    // rows [i0, i1) of one stream or of all
    void want(uint32_t s, uint32_t i0, uint32_t i1);
    void want(uint32_t i0, uint32_t i1);
    void want_windows(const slot_info_vec_t & sinfos);

    llama_kv_rows next(bool ahead) const; // than what is there
    llama_kv_rows rest() const;           // of what is there, when the rows of freed cells go

    bool is_like(const llama_kv_dynamic_cache & other) const; // of the same cells
    bool mirrors(const llama_kv_dynamic_cache & other) const;

    bool grow_now(llama_io_read_i & io);

    void drop_read(); // what the state that is read has in the caches so far

    // llama_kv_storage::try_resize(), after which graphs and compute buffers follow
    bool try_resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, bool is_larger);

    std::vector<uint32_t> n_used() const; // rows of each stream that hold something, at most
    llama_kv_rows         used() const;   // the same, block by block. not of rows without cells

    // the size of the blocks of a row that are rotated in one of both, but not in the other. 0: no change of the basis
    struct rotations {
        uint32_t k;
        uint32_t v;
    };

    bool read_rows(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, bool is_v, uint32_t n_rot_state, bool has_size_row, const std::vector<row_range> & rows);

    rotations wanted_blocks(ggml_type type_k, ggml_type type_v);   // if graphs rotate

    // from blocks of this size to blocks of that one. they are those of the heads, whatever the type: one of both is 0, or they
    // are equal
    static uint32_t turned(uint32_t from, uint32_t to);

    void          init_rot(ggml_type type_k, ggml_type type_v); // throws std::bad_alloc, and nothing has changed then
    const float * rot_matrix(uint32_t n) const { return n > 0 ? kv.attn_rot_hadamard.at(n).data() : nullptr; }

    llama_kv_cache & kv;

    std::shared_ptr<llama_kv_dynamic> dyn; // null: of no context

    llama_kv_dynamic_cache * owner = nullptr; // of the storage. null: this one

    const uint32_t n_max_cells;

    std::unique_ptr<llama_kv_storage> storage;
    std::unique_ptr<llama_kv_storage> by_copy; // while the other one can turn out not to do

    const bool offload;

    std::optional<llama_kv_rows> need;

    // by the growth at hand, to go back to
    std::optional<llama_kv_rows> before;
    std::vector<uint32_t>        n_used_before;
    size_t                       n_copied_before = 0;

    // the most cells that had to stay since the last resize, see llama_kv_growth::shrink()
    uint32_t n_peak = 0;

    bool is_compressed = false; // rows and no cells (DSV4)

    std::vector<uint32_t> n_rows_used   = std::vector<uint32_t>(kv.n_stream); // of each stream
    std::vector<uint32_t> n_rows_before = std::vector<uint32_t>(kv.n_stream); // the last request

    bool has_late_copy = false; // a copy of a stream found no memory: it waits for the next batch

    std::bitset<LLAMA_MAX_SEQ> late_clear; // streams to be cleared after that, which reads them

    row_range range = { 0, 0 }; // that the K-shift at hand is for

    bool is_rotated_k = false; // by the graphs, where the types want it
    bool is_rotated_v = false;

    bool     is_state_on_device = false;
    std::optional<llama_seq_id> seq_id_read; // that a state is read for, -1: all
    uint32_t n_rot_k_state      = 0;
    uint32_t n_rot_v_state      = 0;

    rotations rot_next = { 0, 0 }; // by prepare_types()

    ggml_tensor * noted_rot_k = nullptr;
    ggml_tensor * noted_rot_v = nullptr;
};
