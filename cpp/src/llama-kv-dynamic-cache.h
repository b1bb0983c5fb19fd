#pragma once

// Dynamic KV cache (--kv-dynamic): the rows behind the cells of one llama_kv_cache. See llama-kv-dynamic.h
//
// This class is the friend of llama_kv_cache. It knows the cells, the storage knows the rows. Its parts are classes of their own:
//
//   requested rows that the next batch needs
//   copies    pending copies of streams and K-shifts
//   planned   rows without cells (DSV4)
//   state     rows for saved states
//   types     types of the cells and their rotation, if the layer `types` is applied
//
// All of it runs on the thread that uses the context.

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

    // for kv, which has its cells
    // offload: the layers are on the devices of the model
    llama_kv_dynamic_cache(llama_kv_cache & kv, uint32_t n_max, bool offload);
    ~llama_kv_dynamic_cache();

    llama_kv_dynamic_cache(const llama_kv_dynamic_cache &) = delete;
    llama_kv_dynamic_cache & operator=(const llama_kv_dynamic_cache &) = delete;

    //
    // called by the cache
    //

    // allocate the tensors of ctx, see llama_kv_storage::alloc()
    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

    // rows of a stream that the tensors have
    uint32_t n_rows() const { return owner ? owner->n_rows() : rows->n_rows(); }

    // add to a slot the cells that llama_kv_cache::apply_ubatch() purges when it overwrites the slot: cells before the window
    llama_kv_cache::slot_info with_purged(llama_kv_cache::slot_info sinfo) const;

    // request rows for the cells that the batch at hand was given
    void request(const slot_info_vec_t & sinfos);

    // clear the cells that an incomplete state has written
    void clear_state(llama_seq_id seq_id);

    // clear the stream of a sequence, or all (-1). returns false if the caller must clear it as in a static cache
    bool clear(llama_seq_id seq_id = -1);

    // request the rows that another cache of the same shape has requested: the graphs read the number of rows from either cache.
    // a cache without prepare(), for example the indexer's in a hybrid memory, receives its rows in this way
    void follow(const llama_kv_dynamic_cache & other);

    //
    // growing and shrinking
    //

    // return the rows after the requested growth, or the current rows without a request
    // ahead: include the rows that the growth policy allocates in advance
    llama_kv_rows rows_after_growth(bool ahead) const;

    // check whether the policy would allocate more rows than needed
    bool is_ahead() const;

    bool grow(bool ahead); // returns false when there is no memory, and nothing has changed
    void undo_growth();    // the last grow()
    void commit_growth();  // the last grow() holds
    void forget();         // the request and the last grow()

    // free the rows of freed cells, in all caches of a context
    // throws std::bad_alloc: some rows stay then, but storages by copy still have one size
    static void release(const std::vector<llama_kv_dynamic_cache *> & caches);

    //
    // the storage
    //

    llama_kv_storage &       storage()       { return *rows; }
    const llama_kv_storage & storage() const { return *rows; }

    // the storage grows
    bool is_dynamic() const { return rows->can_grow(); }

    // replace a storage in place, in which nothing is stored yet, by one by copy, in all layers
    // returns false when there is no memory, and the cache cannot be used
    bool restart_by_copy();

    // check for rows that nothing may read, between two streams and after the last row. such rows must not even be copied together with
    // their neighbours to another device. call this before the first batch only
    bool has_gaps() const { return by_copy && rows->reads_below(); }

    // check whether a graph, which is split, reads gaps on another device. where the view is over all of the storage whatever
    // the window is (see kpool_access in llama-memory-hybrid-idx.cpp), also those behind the last row
    // throws std::bad_alloc
    bool reads_gaps_elsewhere(ggml_cgraph * gf) const;

    //
    // contents
    //

    bool has_layers() const { return !kv.layers.empty(); }

    // throws std::bad_alloc
    std::vector<llama_kv_storage::layer> layers() const;

    // the cells have types of their own
    bool has_types() const { return !owner && has_layers(); }

    std::pair<ggml_type, ggml_type> cell_types() const;

    bool has_cells(uint32_t s) const; // in use, in a stream
    bool is_window() const { return kv.swa_type != LLAMA_SWA_TYPE_NONE; }

    // rows of each stream that hold something, at most
    std::vector<uint32_t> n_used() const;

    // usage of this cache alone, without the counters
    llama_memory_usage usage() const;

    // the cells of a sequence. adds its part of the bytes behind them
    llama_seq_cells seq_cells(llama_seq_id seq_id, size_t & bytes) const;

    //
    // parts
    //

    const std::shared_ptr<llama_kv_dynamic> dyn; // null: of no context

    llama_kv_dynamic_cache * const owner; // of the storage, in another context. null: this one

    const uint32_t n_max_cells;

    llama_kv_row_request  requested;
    llama_kv_cache_copies copies;
    llama_kv_planned_rows planned;
    llama_kv_state_rows   state;

    std::shared_ptr<llama_kv_cell_types> types; // null: they cannot change

private:
    // a growth in progress, for undo_growth()
    struct growth {
        llama_kv_rows         rows;
        std::vector<uint32_t> n_used;
        size_t                n_bytes_copied; // by the storage, up to then
    };

    size_t size_cell() const; // bytes behind one cell of one stream

    bool can_grow() const;
    std::unique_ptr<llama_kv_storage> create_inplace() const; // null: not possible here, or not wanted
    std::vector<llama_kv_storage::layer> layers_of(ggml_context * ctx) const;
    void set_storage(std::unique_ptr<llama_kv_storage> from);

    void request_windows(const slot_info_vec_t & sinfos);

    llama_kv_rows next_rows(bool ahead) const;
    llama_kv_rows rows_after_shrink() const; // existing rows without the rows of freed cells
    llama_kv_rows used_rows() const;         // n_used(), block by block. not of rows without cells

    bool same_shape(const llama_kv_dynamic_cache & other) const; // as many cells
    bool mirrors   (const llama_kv_dynamic_cache & other) const;

    // by copy: graphs are built over caches of one size, so others of the same cells start so, too
    bool has_size_like(const llama_kv_dynamic_cache & other) const;

    // llama_kv_storage::try_resize(), after which graphs and compute buffers follow
    bool try_resize(const llama_kv_rows & to, const std::vector<uint32_t> & n_used, bool is_growth);

    llama_kv_cache & kv;

    const bool offload;

    std::unique_ptr<llama_kv_storage> rows;
    std::unique_ptr<llama_kv_storage> by_copy; // while the other one can turn out not to do

    std::optional<growth> growing;

    // the most cells that had to stay since the last resize, see llama_kv_growth::shrink()
    uint32_t n_peak = 0;
};
