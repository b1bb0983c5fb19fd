#pragma once

// The layers of a cache in one buffer with pages (--kv-dynamic, see llama-kv-storage.h), and the pages of the rows in that buffer. The
// tensors have the layout of a static cache:
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

    // allocate memory for the tensors of ctx, with nothing committed
    // returns null if the addresses cannot be reserved. nothing has changed then
    // throws std::bad_alloc
    static std::unique_ptr<llama_kv_region> create(ggml_context * ctx, ggml_backend_buffer_type_t buft, layers_t layers, bool v_trans);

    // another one, for the same rows in other types. null and std::bad_alloc as above
    std::unique_ptr<llama_kv_region> like(ggml_type type_k, ggml_type type_v) const;

    // take over the memory of a region made by from.like(), for the layers of from, which now have the layout of this region. from is
    // empty afterwards
    // bufs: buffers of the cache. this region's buffer replaces the one of from, which is freed
    void take_over(llama_kv_region & from, llama_kv_storage::buffers_t & bufs);

    // set the size of the buffer to its committed bytes
    void show() const { llama_kv_paged_buffer::show(buf, *mem.pages); }

    // return the bytes of these rows in these types
    size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const;

    // have the pages of these rows and no others. false: there is no memory, and nothing has changed
    bool commit(const llama_kv_rows & rows) { return mem.pages->assign(pages_of(rows)); }

    // commit exactly the pages that convert_to() needs for these rows before it frees any page of the other region: a layer, or the
    // minimum if that does not fit. nothing in host memory. no row is larger here than in the other region
    bool commit_ahead(const llama_kv_region & from, const llama_kv_rows & rows);

    // commit the missing pages of these rows, ignoring the margin. returns false if a device has no memory
    bool take(const llama_kv_rows & rows);

    // also rows that are not there: they can share pages with some that are
    void set_zero(const llama_kv_rows & rows);

    // rows of stream ssrc, and of no other one, that both have
    void copy_stream(const llama_kv_rows & rows, uint32_t ssrc, uint32_t sdst);

    // move the first n_used[s] rows of stream s, as far as they are in the set, to another region with other types. pages are freed after
    // each part, before the next part needs memory
    // returns false if another process has allocated the freed memory. the remaining data is worthless then
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
