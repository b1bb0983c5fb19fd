#pragma once

// Memory with pages at fixed addresses (--kv-dynamic, see llama-kv-storage.h)
//
// A range of addresses is reserved once, at full size. Its pages are committed and freed on demand. There are two kinds:
//
//   host    plain host memory (llama-kv-pages-host.cpp). Memory that is not committed can be read, as zeros, and written. So a
//           wrong access causes a wrong count, not a crash
//   device  memory of a device whose backend has ggml-pages.h (llama-kv-pages-device.cpp). Nothing may access memory that is not
//           committed: on a GPU, such an access ends all work of the process
//
// Constraints
//   - A commit allocates the memory of the pages at once. If there is not enough, it returns false and changes nothing. Without
//     that, the cache would promise memory, and the system would kill the process much later, when it writes.
//   - Freed pages are zero when they are committed again.
//
// A commit checks the limits that are known in advance, see llama-kv-limits.h:
//   - host memory: the cgroups of the process (v1 and v2, where reclaimable page cache counts as free), and the memory and swap
//     of the machine (Linux: MemAvailable + SwapFree)
//   - device memory: the free memory that the device reports, less a margin for the pools of its backend
// RLIMIT_AS, RLIMIT_DATA and strict overcommit count a range of host memory as a whole, when it is reserved.
//
// Limits that cannot be known
//   - memory that other processes allocate between the check and the commit, or that they have reserved but not touched
//   - limits that /proc and /sys do not show here: the host of a virtual machine, a cgroup above the visible root
//   - on macOS and BSD: memory that the system can page out or compress. There is no check, and a commit does not fail
//
// Rejected: host pages without access rights until they are committed (a read of a masked cell would crash), a file in memory
// (counts as page cache), one range per layer (one range for all layers is enough).

#include "llama-kv-rows.h"

#include "ggml-cpp.h"

#include <cstddef>
#include <memory>

class llama_kv_pages {
public:
    // return the bytes of a page in buffers of this type. 0: this memory has no pages
    static size_t page_size(ggml_backend_buffer_type_t buft);

    // check whether memory that is not committed can be read and written
    static bool readable_uncommitted(ggml_backend_buffer_type_t buft);

    virtual ~llama_kv_pages() = default;

    llama_kv_pages(const llama_kv_pages &) = delete;
    llama_kv_pages & operator=(const llama_kv_pages &) = delete;

    char * data() const { return base; }
    size_t size() const { return n_bytes; } // bytes, a multiple of the page size

    size_t page_size() const { return size_page; } // bytes

    virtual size_t n_bytes_committed() const { return committed.count()*size_page; }

    // return an empty set of pages
    llama_kv_set make_set() const;

    // add the pages to the set that contain at least one of the bytes [offset, offset + size)
    void add(llama_kv_set & set, size_t offset, size_t size) const;

    // commit the missing pages of the set, then free all pages that are not in the set
    // returns false if a commit fails. the committed pages are then the same as before
    // No computation may use the pages that are freed.
    bool assign(const llama_kv_set & set);

    // commit the pages of the bytes [offset, offset + size)
    // The caller moves data to these pages, and then frees the pages from which it has moved the data.
    // On a device, the commit may use the memory that the margin keeps free. returns false if that memory is used up, too.
    // Host memory is allocated on the first write, so this commit does not fail.
    bool take(size_t offset, size_t size);

    // free the pages that are completely inside of the bytes [offset, offset + size)
    // No computation may use these pages.
    void give(size_t offset, size_t size);

    // set the bytes to zero, and free the pages that are completely inside of them, whether they are committed or not
    // Only for memory that can be written without a commit.
    void vacate(size_t offset, size_t size);

    // set the bytes to zero. Bytes that are not committed are skipped: they are zero already, or will be zero after a commit
    void set_zero(size_t offset, size_t size);

    // copy committed bytes
    virtual void copy(size_t offset_src, size_t offset_dst, size_t size) = 0;

    // set all bytes to zero, also bytes of host memory that were written without a commit. committed pages stay committed
    virtual void clear() { set_zero(0, n_bytes); }

protected:
    // throws std::bad_alloc
    llama_kv_pages(char * base, size_t n_bytes, size_t size_page);

    virtual bool has_memory(size_t size) const = 0;

    // commit the pages [i0, i1). returns false if there is not enough memory. some of the pages may be committed then
    virtual bool commit(size_t i0, size_t i1) = 0;

    // free the pages [i0, i1), whether they are committed or not
    virtual void discard(size_t i0, size_t i1) = 0;

    // commit pages for take(), which does not call has_memory() before: the data of the caller must be moved in any case
    virtual bool commit_late(size_t i0, size_t i1) { return commit(i0, i1); }

    // set committed bytes to zero
    virtual void zero(size_t offset, size_t size) = 0;

    char * const base;
    const size_t n_bytes;
    const size_t size_page;

    llama_kv_set committed; // committed pages
};

// reserve addresses for size bytes of host memory. returns null if size is 0 or the system refuses
std::unique_ptr<llama_kv_pages> llama_kv_pages_reserve_range(size_t size);

// a buffer in a range of pages. The range exists as long as the buffer or `pages` exists
struct llama_kv_paged_buffer {
    ggml_backend_buffer_ptr         buf; // null: there is no buffer
    std::shared_ptr<llama_kv_pages> pages;

    // set the size of the buffer to its committed bytes, so that sums and logs of buffers report the real use
    static void show(ggml_backend_buffer_t buf, const llama_kv_pages & pages);

    // subtract bytes from the size that the buffer reports, after their pages were freed
    static void shrink(ggml_backend_buffer_t buf, size_t n_bytes);
};

// return the bytes after the last row of a tensor that kernels can read
size_t llama_kv_pages_n_bytes_padding(ggml_backend_buffer_type_t buft, const ggml_tensor * t);

// allocate all tensors of ctx in a new range of pages, of which none is committed. Each tensor starts on its own page
// Apart from that, the function does the same as ggml_backend_alloc_ctx_tensors_from_buft().
// Clearing the buffer also frees memory that was written without a commit.
// returns no buffer if the addresses cannot be reserved. nothing has changed then
llama_kv_paged_buffer llama_kv_pages_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

// allocate a buffer for all tensors of ctx, filled with zeros
// in_pages: use pages of host memory if possible. Such memory is used only from the first write on. false: allocate as the
// backend does
// returns null if there is not enough memory. nothing has changed then
ggml_backend_buffer_t llama_kv_alloc_zero(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool in_pages = true);

// reserve a range of pages and create its buffer, without tensors
// throws std::bad_alloc
llama_kv_paged_buffer llama_kv_pages_reserve_host  (size_t size);
llama_kv_paged_buffer llama_kv_pages_reserve_device(ggml_backend_buffer_type_t buft, size_t size);

// return the pages of a buffer that llama_kv_pages_reserve_host() has created. null: the buffer is another one
llama_kv_pages * llama_kv_pages_of_host(ggml_backend_buffer_t buf);

// return the bytes of a page of a device and of host memory, see llama_kv_pages::page_size()
size_t llama_kv_pages_size_device(ggml_backend_buffer_type_t buft);
size_t llama_kv_pages_size_host();
