#pragma once

// Memory whose pages come and go at fixed addresses (--kv-dynamic, see llama-kv-storage.h): a range of addresses is reserved once,
// at full size, and the pages behind them are committed and given back as the cache needs them. There are two kinds
//
//   soft   plain host memory (llama-kv-pages-host.cpp). What is not committed can be read, as zeros, and written: a stray access
//          is a wrong count, not a crash
//   hard   memory of a device whose backend has ggml-pages.h (llama-kv-pages-device.cpp). Nothing may touch what is not
//          committed: on a GPU that ends all work in the process
//
// Constraints
//   - A commit makes the pages real. It fails with false, and nothing has changed then: the alternative is a process that is
//     killed when it writes, long after the cache said that there was room.
//   - Pages that were given back are zero when they come again.
//
// A commit checks what can be known before, see llama-kv-limits.h: for host memory the cgroups of the process (v1 and v2, with what
// the page cache would yield), and the memory and swap of the machine (Linux: MemAvailable + SwapFree); for a device what it
// says is free, less a margin for the pools of its backend. RLIMIT_AS, RLIMIT_DATA and strict overcommit count a range of host
// memory as a whole, when it is reserved.
//
// What cannot be known
//   - what other processes take between the check and the commit, and what they have been promised but not touched
//   - limits that nothing in /proc and /sys shows from here: the host of a virtual machine, a cgroup above the visible root
//   - on macOS and BSD: what the system can page out or compress. There is no check, a commit does not fail
//
// Rejected: host pages without access rights until they are committed (what reads a cell that is masked would crash), a file in
// memory (counts as page cache), one range per layer (as many as there are layers where one does).

#include "llama-kv-rows.h"

#include "ggml-cpp.h"

#include <cstddef>
#include <memory>

class llama_kv_pages {
public:
    // bytes of a page in buffers of this type. 0: their memory does not come in pages
    static size_t page_size(ggml_backend_buffer_type_t buft);

    // what is not committed can be touched
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

    // have the pages of the set and no others: commits what is missing, then gives back the rest
    // returns false when a commit fails, and what is committed is what was committed before
    // no one may be using the pages that go
    bool assign(const llama_kv_set & set);

    // have the pages that the bytes [offset, offset + size) touch, also out of the margin: for what goes back elsewhere
    // returns false where a device has none. host memory then comes when it is written
    bool take(size_t offset, size_t size);

    // give back the pages that are in these bytes as a whole
    // no one may be using them
    void give(size_t offset, size_t size);

    // make these bytes zero. where nothing is committed they are, or will be
    void set_zero(size_t offset, size_t size);

    // of bytes that are committed
    virtual void copy(size_t offset_src, size_t offset_dst, size_t size) = 0;

    // make all bytes zero. on a host also what was written without having been committed. what is committed stays so
    virtual void clear() { set_zero(0, n_bytes); }

protected:
    // throws std::bad_alloc
    llama_kv_pages(char * base, size_t n_bytes, size_t size_page);

    virtual bool has_memory(size_t size) const = 0;

    // pages [i0, i1). false: there is no memory, and some of them may be there
    virtual bool commit(size_t i0, size_t i1) = 0;

    // pages [i0, i1), which may be there or not
    virtual void discard(size_t i0, size_t i1) = 0;

    // the same for what has to be there whatever there is left
    virtual bool commit_late(size_t i0, size_t i1) { return commit(i0, i1); }

    // of bytes that are committed
    virtual void zero(size_t offset, size_t size) = 0;

    char * const base;
    const size_t n_bytes;
    const size_t size_page;

    llama_kv_set committed; // pages
};

// reserve addresses for size bytes of host memory. returns null if size is 0 or the system refuses
std::unique_ptr<llama_kv_pages> llama_kv_pages_reserve_range(size_t size);

// a buffer on such a range, which either of both keeps
struct llama_kv_paged_buffer {
    ggml_backend_buffer_ptr         buf; // null: there is none
    std::shared_ptr<llama_kv_pages> pages;

    // the size of the buffer is what is committed from now on, so that whoever adds up buffers or logs them says what is taken
    static void show(ggml_backend_buffer_t buf, const llama_kv_pages & pages);
};

// the bytes behind the last row of a tensor that kernels can read
size_t llama_kv_pages_n_bytes_padding(ggml_backend_buffer_type_t buft, const ggml_tensor * t);

// ggml_backend_alloc_ctx_tensors_from_buft() on a new range, where nothing is committed yet. each tensor starts on a page of its own
// to clear the buffer gives back what was written without having been committed
// none: the addresses cannot be had, and nothing has changed then
llama_kv_paged_buffer llama_kv_pages_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

// the same for a buffer that is there as a whole and zero
// in_pages: where they are soft, so it takes memory when it is written. elsewhere, and without it, as the backend allocates
// null: there is no memory, and nothing has changed
ggml_backend_buffer_t llama_kv_alloc_zero(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool in_pages = true);

// a buffer without tensors
// throws std::bad_alloc
llama_kv_paged_buffer llama_kv_pages_reserve_host  (size_t size);
llama_kv_paged_buffer llama_kv_pages_reserve_device(ggml_backend_buffer_type_t buft, size_t size);

// see page_size(), of a device
size_t llama_kv_pages_size_device(ggml_backend_buffer_type_t buft);
size_t llama_kv_pages_size_host();
