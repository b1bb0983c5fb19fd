#pragma once

// Dynamic KV cache (--kv-dynamic): the memory of the cells of one llama_kv_cache. See llama-kv-dynamic.h
//
// This class is a friend of llama_kv_cache and knows its cells. A cell has one row, which is its memory in the K and V tensors.
// The storage (llama-kv-storage.h) knows which rows exist. The other jobs have classes of their own:
//
//   requested rows that the next batch needs
//   copies    pending copies of streams and K-shifts
//   planned   rows without cells (DSV4)
//   state     rows for saved states
//   types     types of the cells and their rotation, if the layer `types` is applied
//
// All functions run on the thread that uses the context.

#include "llama-kv.h"

#include "llama-kv-cache-copies.h"
#include "llama-kv-cache.h"
#include "llama-kv-planned-rows.h"
#include "llama-kv-row-request.h"
#include "llama-kv-state-rows.h"
#include "llama-kv-storage.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

class llama_kv_cell_types;
class llama_kv_dynamic;

class llama_kv_dynamic_cache {
public:
    using slot_info_vec_t = llama_kv_cache::slot_info_vec_t;

    // create the object for a cache whose cells exist already
    // n_max:   number of cells of a stream
    // offload: the layers are in the memory of the model's devices, not of the host
    llama_kv_dynamic_cache(llama_kv_cache & kv, uint32_t n_max, bool offload);
    ~llama_kv_dynamic_cache();

    llama_kv_dynamic_cache(const llama_kv_dynamic_cache &) = delete;
    llama_kv_dynamic_cache & operator=(const llama_kv_dynamic_cache &) = delete;

    //
    // called by the cache
    //

    // allocate the tensors of ctx, see llama_kv_storage::alloc()
    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

    // return the number of rows of a stream in the tensors
    uint32_t n_rows() const { return owner ? owner->n_rows() : rows->n_rows(); }

    // return `sinfo` (the cells of a ubatch) together with the cells that llama_kv_cache::apply_ubatch() will purge when it
    // overwrites the cells of `sinfo`. The purged cells have left the window
    llama_kv_cache::slot_info with_purged(llama_kv_cache::slot_info sinfo) const;

    // request rows for the cells that llama_kv_cache::prepare() has chosen for the current batch
    // sinfos: the cells of each ubatch
    void request(const slot_info_vec_t & sinfos);

    // clear the cells that an incompletely restored state has written
    void clear_state(llama_seq_id seq_id);

    // clear the stream of a sequence. -1: all streams. returns false if the caller must clear as in a static cache
    bool clear(llama_seq_id seq_id = -1);

    // request the rows that another cache of the same shape has requested
    // One graph reads both caches, and takes the number of rows from one of them. So both caches need the same rows. For some
    // caches, prepare() is not called, for example for the indexer's cache in a hybrid memory. This function is then the only
    // one that requests rows for the cells of a batch.
    void follow(const llama_kv_dynamic_cache & other);

    //
    // growing and shrinking
    //

    // return the rows after the requested growth, or the current rows without a request
    // ahead: include the rows that the growth policy allocates in advance
    llama_kv_rows rows_after_growth(bool ahead) const;

    // check whether the growth policy would allocate more rows than were requested
    bool is_ahead() const;

    bool grow(bool ahead); // returns false if there is no memory. nothing has changed then
    void undo_growth();    // undo the last grow()
    void commit_growth();  // keep the result of the last grow()
    void forget();         // forget the request, and the data for undo_growth()

    // free the rows of freed cells, in all caches of a context
    // throws std::bad_alloc. Some rows are not freed then, but caches that must have the same size still have the same size
    static void release(const std::vector<llama_kv_dynamic_cache *> & caches);

    //
    // the storage
    //

    llama_kv_storage &       storage()       { return *rows; }
    const llama_kv_storage & storage() const { return *rows; }

    // check whether the storage can grow
    bool is_dynamic() const { return rows->can_grow(); }

    // replace a storage in place, which holds no data yet, by a storage by copy, in all layers
    // returns false if there is no memory. the cache cannot be used then
    bool restart_by_copy();

    // check whether the storage has gaps: rows without memory that nothing may read. Gaps are after the last existing row of
    // each stream, so also between two streams. Call this only before the first batch
    // The scheduler must not copy gaps to another device, not even together with the rows next to them.
    bool has_gaps() const { return by_copy && rows->reads_below(); }

    // check whether the scheduler copies gaps to another device, because a backend there reads the views of this cache
    // gf: a graph that the scheduler has split over the backends
    // With several streams, each view of the cells has gaps. With one stream, only a view of the whole storage has gaps. Such
    // views do not depend on the attention window (see kpool_access in llama-memory-hybrid-idx.cpp).
    // throws std::bad_alloc
    bool reads_gaps_elsewhere(ggml_cgraph * gf) const;

    //
    // contents
    //

    bool has_layers() const { return !kv.layers.empty(); }

    // throws std::bad_alloc
    std::vector<llama_kv_storage::layer> layers() const;

    // check whether the cells have types of their own, and do not belong to another context
    bool has_types() const { return !owner && has_layers(); }

    std::pair<ggml_type, ggml_type> cell_types() const;

    bool has_cells(uint32_t s) const; // check whether a stream has cells in use
    bool is_window() const { return kv.swa_type != LLAMA_SWA_TYPE_NONE; }

    // return for each stream the number of rows up to the last row with data
    std::vector<uint32_t> n_used() const;

    // return the usage of this cache alone, without the counters
    llama_memory_usage usage() const;

    // return the number of cells of a sequence, and add the bytes of these cells to `bytes`. For a cell of several sequences,
    // add only the share of this sequence
    llama_seq_cells seq_cells(llama_seq_id seq_id, size_t & bytes) const;

    //
    // members, see the list at the beginning of this file
    //

    const std::shared_ptr<llama_kv_dynamic> dyn; // coordinator of the context. null: the cache belongs to no context

    llama_kv_dynamic_cache * const owner; // cache of another context that owns the storage. null: this cache owns it

    const uint32_t n_max_cells;

    llama_kv_row_request  requested;
    llama_kv_cache_copies copies;
    llama_kv_planned_rows planned;
    llama_kv_state_rows   state;

    std::shared_ptr<llama_kv_cell_types> types; // null: the types cannot change

private:
    // data for undo_growth()
    struct growth {
        llama_kv_rows         rows;
        std::vector<uint32_t> n_used;
        size_t                n_bytes_copied; // bytes that the storage had copied before the growth
    };

    size_t size_cell() const; // bytes of the memory of one cell of one stream

    bool can_grow() const;
    std::unique_ptr<llama_kv_storage> create_inplace() const; // null: not possible for this memory, or not wanted
    std::vector<llama_kv_storage::layer> layers_of(ggml_context * ctx) const;
    void set_storage(std::unique_ptr<llama_kv_storage> from);

    void request_windows(const slot_info_vec_t & sinfos);

    llama_kv_rows next_rows(bool ahead) const;
    llama_kv_rows rows_after_shrink() const; // existing rows without the rows of freed cells
    llama_kv_rows used_rows() const;         // rows of cells in use, in whole blocks, without rows that have no cells

    // same_shape(): check whether the other cache has the same number of cells and streams
    // mirrors():    also check whether both caches can grow
    bool same_shape(const llama_kv_dynamic_cache & other) const;
    bool mirrors   (const llama_kv_dynamic_cache & other) const;

    // check whether this cache has storage by copy, and the other cache has the same number of cells and streams. Then a graph
    // can read both caches, so both must have storage by copy, with the same number of rows
    bool has_size_like(const llama_kv_dynamic_cache & other) const;

    // call llama_kv_storage::try_resize(), and then drop graphs whose tensors have moved
    bool try_resize(const llama_kv_rows & to, const std::vector<uint32_t> & n_used, bool is_growth);

    llama_kv_cache & kv;

    const bool offload;

    std::unique_ptr<llama_kv_storage> rows;
    std::unique_ptr<llama_kv_storage> by_copy; // replaces `rows` if growth in place is not possible. null: no replacement

    std::optional<growth> growing;

    // 1 + the highest row that was in use since the last resize, see llama_kv_growth::shrink()
    uint32_t n_peak = 0;
};
