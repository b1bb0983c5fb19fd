#pragma once

// Storage of a KV cache (--kv-dynamic): it owns the memory of the K and V tensors, and knows which rows exist
//
// There are three kinds. The code of the cache is the same for all of them:
//
//   fixed     all rows exist, as in upstream. used without --kv-dynamic, or if the cache cannot grow. a change of type works as
//             in storage by copy
//   copy      the tensors have the rows [0, n) of each stream. a growth moves the rows to larger buffers. works on any backend
//   inplace   the tensors have the layout of the fixed storage. pages are committed and freed for blocks of rows, separately for
//             each stream. used for plain host memory and, on request, for device memory with ggml-pages.h
//
// A growth in place copies nothing and changes no pointer and no stride. So no graph is rebuilt, and the compute buffers have the
// size that they have with a static cache.
//
// A row is the memory of one cell in all tensors. The tensors are [n_embd_gqa, n_rows, n_stream]
//   - K, and V with flash attention: a row has n_embd_gqa adjacent elements
//   - transposed V: a row has one element in each of n_embd_gqa strips. In place, a page of 4 KiB holds one element of 2048 rows.
//     So the first block of rows commits the pages of the next 7 blocks, and freeing rows in the middle frees only pages that
//     have no other rows. Committed memory is counted in pages, so the count includes this
//
// The ggml_tensor objects stay the same. Only their buffer, data and strides change. So code that holds a pointer to a tensor
// keeps working after a growth: a cache that shares layers, the views of the streams, a deferred read of a state. A compute graph
// does not keep working, because its views have the old addresses.
//
// New rows are zero, because garbage in V becomes NaN even if the mask excludes the cell.
//
// Rejected: growth by copy into one new buffer for all layers (the old and the new buffer exist at the same time). A number of
// rows for each layer, with a rollback that allocates buffers of the old size (it allocates right after memory has run out).
// For storage in place, strides that depend on the number of existing rows (each growth would move all rows of all streams
// except the first stream, and the whole transposed V).

#include "llama-kv-lines.h"
#include "llama-kv-growth.h"
#include "llama-kv-layout.h"
#include "llama-kv-rows.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

class llama_kv_storage {
public:
    // buffers of the cache. The storage puts its buffers there, so code that sums or clears the buffers of the cache includes them
    using buffers_t = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

    struct layer {
        ggml_tensor * k;
        ggml_tensor * v; // null: the layer has no V

        // 2d views of the tensors, one for each stream
        std::vector<ggml_tensor *> k_stream;
        std::vector<ggml_tensor *> v_stream;

        uint32_t il = 0; // index of the layer in the model
    };

    // call f(tensor, is_transposed) for the tensors of a layer, and then update the views of the streams
    template <typename F>
    static void set_layout(const layer & l, bool v_trans, F && f) {
        set_layout(l.k, l.v, l.k_stream, l.v_stream, v_trans, f);
    }

    // do the same for tensors that are not stored as a layer. This needs no memory
    template <typename F>
    static void set_layout(ggml_tensor * k, ggml_tensor * v, const std::vector<ggml_tensor *> & k_stream, const std::vector<ggml_tensor *> & v_stream, bool v_trans, F && f) {
        const auto set = [&](ggml_tensor * t, const std::vector<ggml_tensor *> & views, bool trans) {
            f(t, trans);
            for (size_t s = 0; s < views.size(); ++s) {
                llama_kv_set_stream_view(views[s], t, s);
            }
        };

        set(k, k_stream, false);
        if (v) {
            set(v, v_stream, v_trans);
        }
    }

    virtual ~llama_kv_storage() = default;

    // allocate zeroed memory for the tensors of ctx, as ggml_backend_alloc_ctx_tensors_from_buft() does
    // layers: the layers of these tensors. the tensors have all rows
    // The caller owns the buffer, and frees it before or after the storage.
    // returns null if there is not enough memory. nothing has changed then
    virtual ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers) = 0;

    // check whether the storage has started with fewer than all rows, and is not pinned
    bool can_grow() const { return start.size() < growth.n_max*start.n_stream(); }

    // return the existing rows
    const llama_kv_rows & rows() const { return cur; }

    // return the number of rows of a stream in the tensors. The strides depend on it
    virtual uint32_t n_rows() const { return growth.n_max; }

    // check whether n_rows() is the number of existing rows
    // If so, caches with the same maximum number of rows and the same number of streams must have the same n_rows(). The reason
    // is that all of them can determine the size of the same graph.
    virtual bool has_size() const { return false; }

    // check whether row i of stream s has memory
    virtual bool has(uint32_t s, uint32_t i) const = 0;

    // check whether a row in use needs all rows below it. This is the case if nothing may read a row that does not exist
    virtual bool reads_below() const { return false; }

    // return the set of rows to allocate, so that the needed rows can be used
    // ahead:       include the rows that the growth policy allocates in advance
    // n_bytes_row: bytes of a row of one stream. if has_size() is true: bytes of a row in all streams of all caches with the
    //              same maximum number of cells, because these caches grow by the same steps
    virtual llama_kv_rows next(const llama_kv_rows & need, bool ahead, size_t n_bytes_row) const = 0;

    // return the rows to keep if only the rows `used` are needed. If shrinking is not worth it, the result is all existing rows
    // n_peak: 1 + the highest index of a row that was in use since the last resize
    virtual llama_kv_rows rest(const llama_kv_rows & used, uint32_t n_peak) const = 0;

    // check whether rest() could free rows, if n_used rows are used. false: it keeps all rows, whichever rows are used
    virtual bool may_shrink(uint32_t n_used, uint32_t n_peak) const = 0;

    // return the bytes that these rows need in these types
    virtual size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const = 0;

    // allocate the missing rows of the set, and free all rows that are not in it
    // The first n_used[s] rows of stream s keep their data if they stay. All other rows are zero or unchanged.
    // returns false if there is not enough memory. no row has changed then, but the rows may be in other, larger buffers
    // If the set is a subset of the existing rows, no memory is needed. So freeing rows and undoing a growth do not fail.
    // No computation that uses the tensors may be in flight.
    virtual bool try_resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used) = 0;

    // set the rows of a stream to zero, and free all of its rows except those in `start`. -1: of all streams
    // returns false if the caller must clear as in a static cache
    // No computation that uses the tensors may be in flight.
    virtual bool clear(int32_t s) { (void) s; return false; }

    // copy the rows of stream ssrc to stream sdst, which has the same rows. Set all other rows of sdst to zero
    // returns false if the caller must copy as in a static cache
    virtual bool copy_stream(uint32_t ssrc, uint32_t sdst) { (void) ssrc; (void) sdst; return false; }

    // change the types in two steps, so that several caches change together or not at all
    // n_used: number of rows with data of each stream, as in try_resize(). it applies to both steps
    //
    // prepare_types(): allocate memory before any data is moved. if a row becomes larger, the memory of all new rows is
    //                  necessary, otherwise almost none. returns false if there is not enough memory. nothing has changed then
    // set_types():     convert the rows. smaller rows are converted inside of their own memory if it is host memory with pages,
    //                  or if there is no memory for a copy. returns false only if another process has allocated device memory
    //                  that this function had freed. no row exists any more then
    // forget_types():  undo prepare_types(), instead of calling set_types()
    //
    // No computation that uses the tensors may be in flight.
    virtual bool prepare_types(ggml_type type_k, ggml_type type_v, const std::vector<uint32_t> & n_used) = 0;
    virtual bool set_types    (const llama_kv_convert & convert) = 0;
    virtual void forget_types () = 0;

    // keep the current rows from now on: they are never freed
    void pin() { start = cur; }

    // return true once after the tensors have got other addresses, strides or types
    bool moved() { return std::exchange(is_moved, false); }

    // return the bytes that were copied from one buffer to another, including growths that failed later
    size_t n_bytes_copied() const { return n_copied; }

protected:
    llama_kv_storage(uint32_t n_stream, const llama_kv_growth & growth) :
        growth(growth), cur(n_stream, growth.n_max, std::min(growth.block(), growth.n_max)), start(cur) {
        start.add(0, growth.start());
    }

    // check whether the new types make a row larger
    static bool is_wider(const layer & l, ggml_type type_k, ggml_type type_v) {
        return ggml_row_size(type_k, l.k->ne[0]) > l.k->nb[1] || (l.v && ggml_row_size(type_v, l.v->ne[0]) > l.v->nb[1]);
    }

    llama_kv_growth growth;

    llama_kv_rows cur;
    llama_kv_rows start; // rows that are never freed

    bool   is_moved = false;
    size_t n_copied = 0;
};

// create a storage without memory. throws std::bad_alloc
//   n_rows               maximum number of rows of each stream
//   n_pad                the number of rows is a multiple of this, unless it is n_rows
//   readable_uncommitted memory that is not committed can be read and written, see llama-kv-pages.h. if false, v_trans must be
//   false
//   bufs                 buffers of the cache, which outlive the storage
std::unique_ptr<llama_kv_storage> llama_kv_storage_create_fixed(
        uint32_t n_stream, uint32_t n_rows, bool v_trans, llama_kv_storage::buffers_t & bufs);
std::unique_ptr<llama_kv_storage> llama_kv_storage_create_copy(
        uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, llama_kv_storage::buffers_t & bufs);
std::unique_ptr<llama_kv_storage> llama_kv_storage_create_inplace(
        uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, bool readable_uncommitted, llama_kv_storage::buffers_t & bufs);
