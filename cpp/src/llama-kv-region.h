#pragma once

// The layers of a cache that are in one buffer whose pages come and go (--kv-dynamic, see llama-kv-storage.h), and which pages the
// rows take there. The tensors have the layout of a static cache:
//
//   - K, and V with flash attention: a strip of n_rows rows per stream
//   - transposed V: n_embd_gqa strips per stream, with an element of each row

#include "llama-kv-lines.h"
#include "llama-kv-pages.h"
#include "llama-kv-rows.h"
#include "llama-kv-storage.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

class llama_kv_region {
public:
    using layers_t = std::vector<llama_kv_storage::layer>;

    // memory for the tensors of ctx, of which nothing is committed yet
    // null: the addresses cannot be had, and nothing has changed
    // throws std::bad_alloc
    static std::unique_ptr<llama_kv_region> create(ggml_context * ctx, ggml_backend_buffer_type_t buft, layers_t layers, bool v_trans);

    // another one, for the same rows in other types. null and std::bad_alloc as above
    std::unique_ptr<llama_kv_region> like(ggml_type type_k, ggml_type type_v) const;

    // the memory that from.like() made is that of the layers of from, which have become what those here are. from has none any more
    // bufs: of the cache, which has the buffer instead of the one of from. that is freed
    void take_over(llama_kv_region & from, llama_kv_storage::buffers_t & bufs);

    // the size of the buffer is what is committed from now on
    void show() const { llama_kv_paged_buffer::show(buf, *mem.pages); }

    // bytes that these rows take in these types
    size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const;

    // have the pages of these rows and no others. false: there is no memory, and nothing has changed
    bool commit(const llama_kv_rows & rows) { return mem.pages->assign(pages_of(rows)); }

    // have what convert_to() needs of these rows before any of the memory of the other region has gone back, and no others: a layer,
    // or if there is not so much the least. nothing where the memory is soft. no row is larger here
    bool commit_ahead(const llama_kv_region & from, const llama_kv_rows & rows);

    // have what is missing of these rows, whatever there is left. false: a device has none
    bool take(const llama_kv_rows & rows);

    // also rows that are not there: they can share pages with some that are
    void set_zero(const llama_kv_rows & rows);

    // rows of stream ssrc, and of no other one, that both have
    void copy_stream(const llama_kv_rows & rows, uint32_t ssrc, uint32_t sdst);

    // move the first n_used[s] rows of stream s, of those in the set, to another region in its types. what was converted goes back
    // before the next part is, and what that needs is taken
    // returns false when the memory that was given back has gone to somebody else: what is left of the data is worthless
    bool convert_to(llama_kv_region & to, const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert);

    llama_kv_paged_buffer mem; // without the buffer once the cache has that

    layers_t layers; // V is null: none. of like(): without views

private:
    // of a tensor
    struct strip {
        size_t offset; // bytes, from the begin of the pages
        size_t size;   // bytes of a row in a strip
        size_t n;      // strips of a stream
        size_t n_rows; // of a strip
        size_t pad;    // bytes behind the last row that kernels can read

        // offset in bytes of row i in strip j of stream s
        size_t at(size_t s, size_t j, size_t i) const { return offset + ((s*n + j)*n_rows + i)*size; }
    };

    llama_kv_region(ggml_backend_buffer_type_t buft, bool v_trans) : buft(buft), v_trans(v_trans) {}

    // the one of a tensor in this type
    strip make_strip(const ggml_tensor * t, ggml_type type, bool is_v) const;

    // f(strip, offset, size in bytes) of the rows in every tensor
    template <typename F>
    void each(const llama_kv_rows & rows, F && f) const;

    size_t n_pages(const strip & t, const llama_kv_rows & rows) const;

    llama_kv_set pages_of(const llama_kv_rows & rows) const;

    bool convert_tensor(
            llama_kv_region & to, ggml_tensor * src, ggml_tensor * dst, bool is_v,
            const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert);

    ggml_context_ptr ctx; // of like()

    ggml_backend_buffer_t buf = nullptr;

    const ggml_backend_buffer_type_t buft;

    const bool v_trans;

    std::vector<strip> strips; // of K and V of the layers
};
