#pragma once

// Storage of the dynamic KV cache (--kv-dynamic): the K and V tensors of the layers, grown by copy.
//
// Constraints
//   - The ggml_tensor objects stay, only their buffer, data and strides change. Whoever holds a pointer to one (a cache
//     that shares layers, the per-stream views, a deferred state read) follows a growth. A compute graph does not: it
//     has views with the old addresses, see llama_kv_dynamic::moved().
//   - One buffer per layer, and a layer's old buffer is freed before the next layer is allocated: the transient of a
//     growth is one layer, not old + new.
//   - All layers have the same number of cells when try_resize() returns: the row indices that the graphs write to
//     (set_input_k_idxs, set_input_v_idxs) are shared by all layers and contain it as a stride.
//   - A failed growth needs no memory to be undone: the layers that had already grown are laid out for the old size inside
//     their new, larger buffers. Only then they are moved to smaller ones, if these can be had.
//   - New rows are zero: garbage in V gives NaN through the mask.
//
// Where the memory is plain host memory and still grows by copy (layers on a device beside it, no address range for the
// maximum), a buffer is a range of pages of its own: new rows are zero without being written, take memory when they are
// used, and a buffer that goes gives it back at once. Such memory is promised and not there, so a growth first asks whether
// all of it can be had, as far as that is known (llama-kv-limits.h); a process that takes it meanwhile is not. The
// accounting counts what is promised as committed.
//
// Layout of a tensor [n_embd_gqa, n_cells, n_stream], as blocks of which the first n_used cells are live
//   - K, and V with flash attention: one block per stream, a cell is a row of n_embd_gqa elements
//   - transposed V: n_embd_gqa blocks per stream, a cell is one element
//
// Rejected: one size per layer with rollback by re-allocation (allocates when memory has just run out), growing all layers
// into one new buffer (old + new at the same time), a second llama_kv_cache to copy from (its constructor's filters
// capture locals of the code that created the first one).

#include "llama-kv-pages.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

class llama_kv_storage {
public:
    using buffers_t = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

    // bufs:    the contexts and buffers of the cache. the buffers of grown layers are put here, so that whoever sums up
    //          or clears the buffers of the cache sees them
    // n_cells: cells in each tensor that will be added
    llama_kv_storage(buffers_t & bufs, uint32_t n_cells, bool v_trans);

    // k and v are [n_embd_gqa, n_cells, n_stream] and allocated, v can be null
    // k_stream and v_stream are 2d views of them, one per stream
    // created: the range that layers were created in, null: none
    void add_layer(
            ggml_tensor * k,
            ggml_tensor * v,
            const std::vector<ggml_tensor *> & k_stream,
            const std::vector<ggml_tensor *> & v_stream,
            const llama_kv_pages * created = nullptr);

    // after the last layer: the range that layers were created in goes with the buffers in it
    void own(std::unique_ptr<llama_kv_pages> created);

    uint32_t n_cells() const;

    // bytes that were copied from one buffer to another so far, also by growths that failed later
    size_t n_bytes_copied() const;

    // grow to n_cells > n_cells(). the first n_used[s] cells of stream s are kept, all others are zero
    // returns false when an allocation fails. nothing has changed then, except that buffers may be others, and larger
    // no compute may be in flight that uses the tensors
    bool try_resize(uint32_t n_cells, const std::vector<uint32_t> & n_used);

    // shrink to n_cells < n_cells(), which hold all live cells
    // always possible: a layer that finds no memory for a smaller buffer is laid out for the new size inside the one it has
    // no compute may be in flight that uses the tensors
    void shrink(uint32_t n_cells, const std::vector<uint32_t> & n_used);

    // make all cells zero. no compute may be in flight that uses the tensors
    void clear();

private:
    struct layer {
        ggml_tensor * k;
        ggml_tensor * v;

        std::vector<ggml_tensor *> k_stream;
        std::vector<ggml_tensor *> v_stream;

        ggml_backend_buffer_type_t buft; // that it was created with

        bool has_pages; // its buffer is on a range of its own

        int32_t ibuf = -1; // index of the layer's own buffer in bufs, -1: still in the buffer it was created in

        std::unique_ptr<llama_kv_pages> pages = nullptr; // of the layer's own buffer
    };

    // bytes of host memory that a cache of n_cells would take beyond what it takes now
    size_t n_bytes_promised(uint32_t n_cells, const std::vector<uint32_t> & n_used) const;

    // move a layer to a buffer of its own with n_cells >= n_cells()
    bool move_layer(layer & l, uint32_t n_cells, const std::vector<uint32_t> & n_used);
    void undo_layer(layer & l, uint32_t n_cells, const std::vector<uint32_t> & n_used);

    // all layers have their own buffer: free the ones they were created in
    void release_created();

    buffers_t & bufs;

    std::unique_ptr<llama_kv_pages> created;

    const size_t n_created; // bufs[0, n_created) came with the cache

    bool created_released = false;

    uint32_t n_cells_cur;

    size_t n_copied = 0;

    const bool v_trans;

    std::vector<layer> layers;
};
