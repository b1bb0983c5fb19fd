#pragma once

// Memory with pages at fixed addresses (--kv-dynamic, see llama-kv-storage.h): a range of addresses is reserved once, at full size,
// and its pages are committed and freed on demand. There are two kinds
//
//   host    plain host memory (llama-kv-pages-host.cpp). Uncommitted memory can be read, as zeros, and written: a stray access causes
//           a wrong count, not a crash
//   device  memory of a device whose backend has ggml-pages.h (llama-kv-pages-device.cpp). Nothing may touch uncommitted memory:
//           on a GPU, such an access ends all work in the process
//
//
// Constraints
//   - A commit makes the pages real. Without memory it returns false and changes nothing. The alternative is a process that the
//     system kills when it writes, long after the cache has promised the memory.
//   - Freed pages are zero when they are committed again.
//
// A commit checks the limits that are known in advance, see llama-kv-limits.h. Host memory: the cgroups of the process (v1 and v2,
// including reclaimable page cache), and the memory and swap of the machine (Linux: MemAvailable + SwapFree). Device memory: the free
// memory that the device reports, less a margin for the pools of its backend. RLIMIT_AS, RLIMIT_DATA and strict overcommit count a
// range of host memory as a whole, at its reservation.
//
// Limits that cannot be known
//   - memory that other processes allocate between the check and the commit, or that they have reserved but not touched
//   - limits that /proc and /sys do not show here: the host of a virtual machine, a cgroup above the visible root
//   - on macOS and BSD: memory that the system can page out or compress. There is no check, and a commit does not fail
//
// Rejected: host pages without access rights until they are committed (a read of a masked cell would crash), a file in
// memory (counts as page cache), one range per layer (one range for all layers is enough).

#include "llama-kv-rows.h"

#include "ggml-cpp.h"

#include <cstddef>
#include <memory>

class llama_kv_pages {
public:
    // return the bytes of a page in buffers of this type. 0: this memory has no pages
    static size_t page_size(ggml_backend_buffer_type_t buft);

    // check whether uncommitted memory can be read and written
    static bool readable_uncommitted(ggml_backend_buffer_type_t buft);

    virtual ~llama_kv_pages() = default;

    llama_kv_pages(const llama_kv_pages &) = delete;
    llama_kv_pages & operator=(const llama_kv_pages &) = delete;

    char * data() const { return base; }
    size_t size() const { return n_bytes; } // bytes, a multiple of the page size

    size_t page_size() const { return size_page; } // bytes

    virtual size_t n_bytes_committed() const { return committed.count()*size_page; }

    // a set of pages that holds nothing yet
    llama_kv_set make_set() const;

    // add the pages that the bytes [offset, offset + size) touch
    void add(llama_kv_set & set, size_t offset, size_t size) const;

    // commit the missing pages of the set, then free all pages that are not in the set
    // returns false if a commit fails. the committed pages are then the same as before
    // nothing may use the pages that are freed
    bool assign(const llama_kv_set & set);

    // commit the pages of the bytes [offset, offset + size), if necessary from the margin: for data whose old pages are freed next
    // returns false if a device has no memory. host memory is allocated on the first write then
    bool take(size_t offset, size_t size);

    // free the pages that are completely inside of these bytes
    // nothing may use them
    void give(size_t offset, size_t size);

    // set these bytes to zero. uncommitted bytes are zero already, or will be when they are committed
    void set_zero(size_t offset, size_t size);

    // copy committed bytes
    virtual void copy(size_t offset_src, size_t offset_dst, size_t size) = 0;

    // set all bytes to zero, on a host also uncommitted bytes that were written. committed pages stay committed
    virtual void clear() { set_zero(0, n_bytes); }

protected:
    // throws std::bad_alloc
    llama_kv_pages(char * base, size_t n_bytes, size_t size_page);

    virtual bool has_memory(size_t size) const = 0;

    // commit the pages [i0, i1). returns false without memory: some of the pages may be committed then
    virtual bool commit(size_t i0, size_t i1) = 0;

    // free the pages [i0, i1), committed or not
    virtual void discard(size_t i0, size_t i1) = 0;

    // the same without a check of limits, for pages that are required
    virtual bool commit_late(size_t i0, size_t i1) { return commit(i0, i1); }

    // set committed bytes to zero
    virtual void zero(size_t offset, size_t size) = 0;

    char * const base;
    const size_t n_bytes;
    const size_t size_page;

    llama_kv_set committed; // pages
};

// reserve addresses for size bytes of host memory. returns null if size is 0 or the system refuses
std::unique_ptr<llama_kv_pages> llama_kv_pages_reserve_range(size_t size);

// a buffer on a range of pages. the range lives as long as the buffer or `pages`
struct llama_kv_paged_buffer {
    ggml_backend_buffer_ptr         buf; // null: there is none
    std::shared_ptr<llama_kv_pages> pages;

    // set the size of the buffer to its committed bytes, so that sums and logs of buffers report the real use
    static void show(ggml_backend_buffer_t buf, const llama_kv_pages & pages);
};

// the bytes behind the last row of a tensor that kernels can read
size_t llama_kv_pages_n_bytes_padding(ggml_backend_buffer_type_t buft, const ggml_tensor * t);

// do the same as ggml_backend_alloc_ctx_tensors_from_buft() in a new range without committed pages. each tensor starts on its own page
// clearing the buffer frees uncommitted memory that was written
// returns no buffer if the addresses cannot be reserved. nothing has changed then
llama_kv_paged_buffer llama_kv_pages_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

// allocate a whole buffer of zeros
// in_pages: use host pages where possible, which use memory from the first write on. otherwise, allocate as the backend does
// returns null without memory. nothing has changed then
ggml_backend_buffer_t llama_kv_alloc_zero(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool in_pages = true);

// a buffer without tensors
// throws std::bad_alloc
llama_kv_paged_buffer llama_kv_pages_reserve_host  (size_t size);
llama_kv_paged_buffer llama_kv_pages_reserve_device(ggml_backend_buffer_type_t buft, size_t size);

// see page_size(), of a device
size_t llama_kv_pages_size_device(ggml_backend_buffer_type_t buft);
size_t llama_kv_pages_size_host();
