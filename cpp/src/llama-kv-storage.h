#pragma once

// Storage of a KV cache (--kv-dynamic): who has the memory behind the K and V tensors of its layers, and which of their rows
// are there. Neither the cache nor the hooks in it ask which kind it is:
//
//   fixed     upstream's own allocation, all rows are there. the flag is off, or there is nothing to grow. where the types
//             change, it goes on as storage by copy does
//   copy      the tensors have the rows [0, n) of each stream, and move to larger buffers: anywhere
//   in place  the tensors have the layout of the fixed storage, and pages come and go behind blocks of rows, each stream on its
//             own: where memory comes in pages, plain host memory and, if that is asked for, a device's with ggml-pages.h. A growth
//             copies nothing, no pointer and no stride changes, no graph is rebuilt and the compute buffers are those of a
//             static cache
//
// A row is what is behind a cell in all tensors. The tensors are [n_embd_gqa, n_rows, n_stream]
//   - K, and V with flash attention: a row of n_embd_gqa elements
//   - transposed V: one element in each of n_embd_gqa strips. In place, a page of 4 KiB holds one element of 2048 rows: the
//     first block of rows commits what the next 7 need, and a hole only gives back pages that are all hole. What is committed
//     is counted in pages, which shows it
//
// The ggml_tensor objects stay, only their buffer, data and strides change. Whoever holds a pointer to one (a cache that
// shares layers, the per-stream views, a deferred state read) follows a growth. A compute graph does not: it has views with
// the old addresses.
//
// New rows are zero: garbage in V gives NaN through the mask.
//
// Rejected: growth by copy into one new buffer for all layers (old + new at the same time), or with a size for each layer and
// a rollback by re-allocation (allocates when memory has just run out); the live size in the strides where pages come and go
// (each growth would move all rows of all streams but the first, and transposed V as a whole).

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
    // of a cache. whoever sums up or clears the buffers of the cache sees those of the storage there
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

    // memory for the tensors of ctx, which are those of the layers and have all rows: ggml_backend_alloc_ctx_tensors_from_buft().
    // it is zero
    // the caller owns the buffer, and frees it before the storage, or after
    // null: there is none, and nothing has changed
    virtual ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers) = 0;

    // it has started with less than all rows, and is not pinned
    bool can_grow() const { return start.size() < growth.n_max*start.n_stream(); }

    // the rows that are there
    const llama_kv_rows & rows() const { return cur; }

    // rows of a stream that the tensors have: what the strides are made of
    virtual uint32_t n_rows() const { return growth.n_max; }

    // n_rows() is how many are there, be it all of them: caches from either of which a graph takes its size have to have the same
    virtual bool has_size() const { return false; }

    // the row can be used, with those before it
    virtual bool has(uint32_t s, uint32_t i) const = 0;

    // a row that is used needs those below it: nothing may read what is not there
    virtual bool reads_below() const { return false; }

    // the rows to have so that the needed ones can be used, and with ahead as many more as the growth policy takes at once
    // n_bytes_row: bytes behind a row of one stream. with has_size(): of all streams and caches that have to take the same steps
    virtual llama_kv_rows next(const llama_kv_rows & need, bool ahead, size_t n_bytes_row) const = 0;

    // the rows to keep when only these are used. all that are there when less is not worth it
    // n_peak: the end of the rows that were in use since the last resize, at most
    virtual llama_kv_rows rest(const llama_kv_rows & used, uint32_t n_peak) const = 0;

    // false: rest() would keep all that are there, however n_used rows are spread
    virtual bool may_shrink(uint32_t n_used, uint32_t n_peak) const = 0;

    // bytes that are taken with these rows in these types
    virtual size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const = 0;

    // have these rows and no others. the first n_used[s] rows of stream s keep their data if they stay, all others are zero or
    // what they were
    // returns false when there is no memory. nothing has changed then, except that buffers may be others, and larger. not when
    // the rows are a part of those that are there: to give back, or to undo a growth, needs no memory
    // no compute may be in flight that uses the tensors
    virtual bool try_resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used) = 0;

    // make the rows of a stream zero, or of all (-1), and give back what is not needed to start again
    // returns false when there is nothing special about it: to be cleared as in a static cache
    // no compute may be in flight that uses the tensors
    virtual bool clear(int32_t s) { (void) s; return false; }

    // copy the rows of stream ssrc, which stream sdst has as well. what else sdst has is zero
    // returns false when there is nothing special about it: to be copied as in a static cache
    virtual bool copy_stream(uint32_t ssrc, uint32_t sdst) { (void) ssrc; (void) sdst; return false; }

    // have the rows in other types, in two steps, so that several caches change together or not at all
    // n_used: as for try_resize(), and for both of them
    //
    // prepare_types(): have what is needed before any data moves. that is all of the memory if a row becomes larger, and next to
    // none if not. false: there is none, and nothing has changed
    // set_types():     where there is no memory beside the rows, they are converted inside of it. false: memory of a device that
    //                  went back on the way has gone to somebody else, and no row is there any more. else it does not fail
    // forget_types():  instead of set_types()
    // no compute may be in flight that uses the tensors
    virtual bool prepare_types(ggml_type type_k, ggml_type type_v, const std::vector<uint32_t> & n_used) = 0;
    virtual bool set_types    (const llama_kv_convert & convert) = 0;
    virtual void forget_types () = 0;

    // what is there stays for good
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

    // whether a row gets larger by it
    static bool is_wider(const layer & l, ggml_type type_k, ggml_type type_v) {
        return ggml_row_size(type_k, l.k->ne[0]) > l.k->nb[1] || (l.v && ggml_row_size(type_v, l.v->ne[0]) > l.v->nb[1]);
    }

    llama_kv_growth growth;

    llama_kv_rows cur;
    llama_kv_rows start; // what is always there

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
