#pragma once

// Storage of a KV cache (--kv-dynamic): who has the memory behind the K and V tensors of its layers, and which of their rows
// are there. Neither the cache nor the hooks in it ask which kind it is:
//
//   fixed     upstream's own allocation with all rows. used without the flag, or if the cache cannot grow. changes of type work as
//             in storage by copy
//   copy      the tensors have the rows [0, n) of each stream, and move to larger buffers: on any backend
//   in place  the tensors have the layout of the fixed storage, and pages are committed and freed for blocks of rows, in each stream
//             separately. used for memory with pages: plain host memory and, on request, device memory with ggml-pages.h. A growth
//             copies nothing and changes no pointer and no stride. No graph is rebuilt, and the compute buffers have the size of a
//             static cache's
//
// A row is the memory of one cell in all tensors. The tensors are [n_embd_gqa, n_rows, n_stream]
//   - K, and V with flash attention: a row of n_embd_gqa elements
//   - transposed V: one element in each of n_embd_gqa strips. In place, a page of 4 KiB holds one element of 2048 rows: the first
//     block of rows commits the pages of the next 7 blocks, and a hole frees only pages that are completely in the hole. Committed
//     memory is counted in pages, so the count includes this
//
// The ggml_tensor objects stay; only their buffer, data and strides change. Holders of a pointer to a tensor (a cache that shares
// layers, the views of the streams, a deferred read of a state) therefore follow a growth. A compute graph does not: its views have
// the old addresses.
//
// New rows are zero: garbage in V gives NaN through the mask.
//
// Rejected: growth by copy into one new buffer for all layers (old and new exist at the same time). One size per layer with a rollback
// by re-allocation (it allocates right after memory has run out). The live size in the strides of storage in place (each growth would
// move all rows of all streams but the first, and transposed V as a whole).

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
    // buffers of the cache. code that adds up or clears the buffers of the cache finds those of the storage there
    using buffers_t = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

    struct layer {
        ggml_tensor * k;
        ggml_tensor * v; // null: none

        // 2d views, one per stream
        std::vector<ggml_tensor *> k_stream;
        std::vector<ggml_tensor *> v_stream;

        uint32_t il = 0; // of the model
    };

    // f(tensor, whether it is transposed), and the views follow
    template <typename F>
    static void set_layout(const layer & l, bool v_trans, F && f) {
        set_layout(l.k, l.v, l.k_stream, l.v_stream, v_trans, f);
    }

    // the same for tensors that are not kept as a layer, which needs no memory
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

    // allocate memory for the tensors of ctx, which are tensors of the layers with all rows: ggml_backend_alloc_ctx_tensors_from_buft().
    // the memory is zero
    // the caller owns the buffer, and frees it before or after the storage
    // returns null without memory. nothing has changed then
    virtual ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers) = 0;

    // it has started with less than all rows, and is not pinned
    bool can_grow() const { return start.size() < growth.n_max*start.n_stream(); }

    // return the existing rows
    const llama_kv_rows & rows() const { return cur; }

    // return the rows of a stream in the tensors: the strides depend on this number
    virtual uint32_t n_rows() const { return growth.n_max; }

    // check whether n_rows() is the number of existing rows. caches that can set the size of one graph must have the same number then
    virtual bool has_size() const { return false; }

    // the row can be used, with those before it
    virtual bool has(uint32_t s, uint32_t i) const = 0;

    // check whether a row in use needs all rows below it, because nothing may read a row that does not exist
    virtual bool reads_below() const { return false; }

    // return the rows to have so that the needed rows can be used. ahead: include the rows that the growth policy allocates in advance
    // n_bytes_row: bytes of a row of one stream. with has_size(): over all streams and caches that grow by the same steps
    virtual llama_kv_rows next(const llama_kv_rows & need, bool ahead, size_t n_bytes_row) const = 0;

    // return the rows to keep if only these rows are used: all existing rows if shrinking is not worthwhile
    // n_peak: the highest end of the rows in use since the last resize
    virtual llama_kv_rows rest(const llama_kv_rows & used, uint32_t n_peak) const = 0;

    // return false if rest() would keep all existing rows for any distribution of n_used rows
    virtual bool may_shrink(uint32_t n_used, uint32_t n_peak) const = 0;

    // bytes that are taken with these rows in these types
    virtual size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const = 0;

    // have exactly these rows. the first n_used[s] rows of stream s keep their data if they stay. all others are zero or unchanged
    // returns false without memory. nothing has changed then, except that buffers may be other and larger ones. this never happens if
    // the rows are a subset of the existing rows: freeing rows and undoing a growth need no memory
    // no compute that uses the tensors may be in flight
    virtual bool try_resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used) = 0;

    // set the rows of a stream, or of all streams (-1), to zero, and free the memory that a new start does not need
    // returns false if the caller must clear as in a static cache
    // no compute that uses the tensors may be in flight
    virtual bool clear(int32_t s) { (void) s; return false; }

    // copy the rows of stream ssrc, which stream sdst has as well. what else sdst has is zero
    // returns false when there is nothing special about it: to be copied as in a static cache
    virtual bool copy_stream(uint32_t ssrc, uint32_t sdst) { (void) ssrc; (void) sdst; return false; }

    // have the rows in other types, in two steps, so that several caches change together or not at all
    // n_used: as for try_resize(), and for both of them
    //
    // prepare_types(): allocate the memory before any data moves: all of it if a row becomes larger, otherwise next to none. returns
    //                  false without memory. nothing has changed then
    // set_types():     without memory for a copy, convert the rows inside of their own memory. returns false if another process has
    //                  allocated device memory that was freed meanwhile: no row exists any more. otherwise, it does not fail
    // forget_types():  undo prepare_types(), instead of set_types()
    // no compute that uses the tensors may be in flight
    virtual bool prepare_types(ggml_type type_k, ggml_type type_v, const std::vector<uint32_t> & n_used) = 0;
    virtual bool set_types    (const llama_kv_convert & convert) = 0;
    virtual void forget_types () = 0;

    // keep the current rows for good
    void pin() { start = cur; }

    // true once after the tensors have got other addresses or strides
    bool moved() { return std::exchange(is_moved, false); }

    // bytes that were moved from one buffer to another, also by growths that failed later
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
    llama_kv_rows start; // rows that always exist

    bool   is_moved = false;
    size_t n_copied = 0;
};

// create a storage without memory. throws std::bad_alloc
//   n_rows               rows of each stream, at most
//   n_pad                the number of rows is a multiple of this, unless it is n_rows
//   readable_uncommitted memory without pages can be read and written, see llama-kv-pages.h. if false, v_trans must be false
//   bufs                 buffers of the cache, which outlive the storage
std::unique_ptr<llama_kv_storage> llama_kv_storage_create_fixed(
        uint32_t n_stream, uint32_t n_rows, bool v_trans, llama_kv_storage::buffers_t & bufs);
std::unique_ptr<llama_kv_storage> llama_kv_storage_create_copy(
        uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, llama_kv_storage::buffers_t & bufs);
std::unique_ptr<llama_kv_storage> llama_kv_storage_create_inplace(
        uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, bool readable_uncommitted, llama_kv_storage::buffers_t & bufs);
