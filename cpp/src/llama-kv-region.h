#pragma once

// The rows of all layers of a cache in one buffer with pages (--kv-dynamic, see llama-kv-storage.h)
//
// The class knows which pages contain which rows. The tensors have the layout of a static cache:
//
//   - K, and V with flash attention: one strip (n_rows rows in sequence) per stream
//   - transposed V: n_embd_gqa strips per stream, each with one element of each row

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

    // create a region for the tensors of ctx, of which no page is committed
    // returns null if the addresses cannot be reserved. nothing has changed then
    // throws std::bad_alloc
    static std::unique_ptr<llama_kv_region> create(ggml_context * ctx, ggml_backend_buffer_type_t buft, layers_t layers, bool v_trans);

    // create another region for the same rows in other types. returns null or throws std::bad_alloc, as create() does
    std::unique_ptr<llama_kv_region> like(ggml_type type_k, ggml_type type_v) const;

    // take the place of the region `from`, after the data was moved: `from`.like() has created this region
    // The tensors of the layers of `from` get the addresses, types and strides of this region. `from` is empty after that.
    // bufs: buffers of the cache. this region's buffer replaces the one of `from`, which is freed
    void take_over(llama_kv_region & from, llama_kv_storage::buffers_t & bufs);

    // set the size that the buffer reports to its committed bytes
    void show() const { llama_kv_paged_buffer::show(buf, *mem.pages); }

    // return the bytes that these rows need in these types
    size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const;

    // commit the pages of these rows, and free all other pages. returns false if there is no memory. nothing has changed then
    bool commit(const llama_kv_rows & rows) { return mem.pages->assign(pages_of(rows)); }

    // check whether convert_inside() can change the rows to these types. The conditions are:
    //   - No row becomes larger.
    //   - Memory that is not committed can be read and written. On a device, a row in its new type could be at addresses of
    //     which no page is committed, if there are several streams.
    //   - Transposed V keeps its type. Otherwise, a row in the new type could overwrite a later row in the old type, because a
    //     strip can have holes.
    bool can_convert_inside(ggml_type type_k, ggml_type type_v) const;

    // change the types of the layers, and convert the first n_used[s] rows of each stream s, as far as they are in `rows`
    // The new rows overwrite the old rows, from the start of each tensor. All other bytes are zero after that, and their pages
    // are free. This includes the pages of rows that exist but are not used, so call take().
    // Rows can move to addresses of which no page is committed, if there are several streams or if cells before them are free.
    // Pages are freed after each tensor, so additional memory is needed for at most one tensor in its new type. Otherwise, no
    // additional memory is needed.
    void convert_inside(
            ggml_type type_k, ggml_type type_v, const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert);

    // commit the pages of this region to which from.convert_to() moves data before it frees the first page of `from`
    // The function commits enough pages for a layer. If there is no memory for a layer, it commits the minimum with which the
    // conversion can begin. It commits nothing in host memory.
    // A row of this region must not be larger than a row of `from`.
    bool commit_ahead(const llama_kv_region & from, const llama_kv_rows & rows);

    // commit the missing pages of these rows, if necessary from the memory that the margin keeps free
    // returns false if a device has no memory
    bool take(const llama_kv_rows & rows);

    // set rows to zero, also rows that do not exist: they can share pages with rows that exist
    void set_zero(const llama_kv_rows & rows);

    // copy rows of stream ssrc to stream sdst. `rows` contains only rows of ssrc, and they exist in both streams
    void copy_stream(const llama_kv_rows & rows, uint32_t ssrc, uint32_t sdst);

    // move the first n_used[s] rows of each stream s, as far as they are in `rows`, to another region with other types
    // The function converts a limited number of rows at a time, see llama_kv_each_lines(). It frees the pages of these rows
    // before it commits pages for the next rows.
    // returns false if another process has allocated the freed memory. the remaining data is useless then
    bool convert_to(llama_kv_region & to, const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert);

    llama_kv_paged_buffer mem; // mem.buf is null after the cache has taken over the buffer

    // V of a layer is null if the layer has no V. In a region that like() has created, the layers have no views of streams
    layers_t layers;

private:
    // layout of the memory of one tensor: strips of rows (see the head of this file)
    struct strip {
        size_t offset; // bytes from the start of the pages
        size_t size;   // bytes of a row in a strip
        size_t n;      // number of strips of a stream
        size_t n_rows; // number of rows of a strip
        size_t pad;    // bytes after the last row that kernels can read

        // offset in bytes of row i in strip j of stream s
        size_t at(size_t s, size_t j, size_t i) const { return offset + ((s*n + j)*n_rows + i)*size; }
    };

    llama_kv_region(ggml_backend_buffer_type_t buft, bool v_trans) : buft(buft), v_trans(v_trans) {}

    // return the layout in memory that the K or V tensor would have with this type
    strip make_strip(const ggml_tensor * t, ggml_type type, bool is_v) const;

    // call f(strip, offset, size in bytes) for each range of rows in every tensor
    template <typename F>
    void each(const llama_kv_rows & rows, F && f) const;

    size_t n_pages(const strip & t, const llama_kv_rows & rows) const;

    llama_kv_set pages_of(const llama_kv_rows & rows) const;

    void convert_tensor_inside(
            ggml_tensor * t, bool is_v, ggml_type type,
            const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert);

    bool convert_tensor(
            llama_kv_region & to, ggml_tensor * src, ggml_tensor * dst, bool is_v,
            const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert);

    ggml_context_ptr ctx; // context of the tensors of a region that like() has created

    ggml_backend_buffer_t buf = nullptr;

    const ggml_backend_buffer_type_t buft;

    const bool v_trans;

    std::vector<strip> strips; // memory of K and V of each layer
};
