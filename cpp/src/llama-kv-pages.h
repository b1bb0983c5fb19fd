#pragma once

// A range of host memory whose pages come and go (--kv-dynamic, see llama-kv-storage.h): the addresses are reserved once, at
// full size, and the pages behind them are committed and given back as the cache needs them.
//
// Constraints
//   - A commit makes the pages real. It fails with false, and nothing has changed then: the alternative is a process that is
//     killed when it writes, long after the cache said that there was room.
//   - Pages that are not committed can be read, as zeros, and written: a stray access is a wrong count, not a crash.
//   - Pages that were given back are zero again.
//
// By system
//   - Linux: mmap(MAP_NORESERVE), MADV_POPULATE_WRITE where the kernel has it (5.14), else a write to each page, MADV_DONTNEED.
//     Transparent huge pages are off for the range, also where the system gives them to everyone: a page of 4 KiB would
//     become 2 MiB, at the commit or later, when the kernel fills a hole. To ask for them where all of a region is committed
//     was tried: 64 MiB at a time took six times as long on a virtual machine, whose host had to find the memory.
//   - macOS, BSD: a write to each page. What is given back is mapped anew, because MADV_FREE and the like do not promise zeros.
//   - Windows: the range is committed as a whole, which takes nothing but a promise of the page file, and a promise that the
//     system cannot give fails at once. What is given back is made zero and leaves the working set, but not decommitted: to
//     commit it again, as it has to be readable, could fail.
//
// A commit checks what can be known before: the cgroups of the process (v1 and v2, with what the page cache would yield), and
// the memory and swap of the machine (Linux: MemAvailable + SwapFree). RLIMIT_AS, RLIMIT_DATA and strict overcommit count
// the range as a whole, when it is reserved.
//
// What cannot be known
//   - what other processes take between the check and the write, and what they have been promised but not touched
//   - limits that nothing in /proc and /sys shows from here: the host of a virtual machine, a cgroup above the visible root
//   - on macOS and BSD: what the system can page out or compress. There is no check, a commit does not fail
//
// Rejected: pages without access rights until they are committed (what reads a cell that is masked would crash), a file in
// memory (counts as page cache), one range per layer (as many as there are layers where one does).

#include "llama-kv-rows.h"

#include <cstddef>
#include <memory>

struct ggml_backend_buffer;
struct ggml_context;

class llama_kv_pages {
public:
    // size in bytes. null when the addresses cannot be had
    static std::unique_ptr<llama_kv_pages> reserve(size_t size);

    ~llama_kv_pages();

    llama_kv_pages(const llama_kv_pages &) = delete;
    llama_kv_pages & operator=(const llama_kv_pages &) = delete;

    char * data() const;
    size_t size() const; // bytes, a multiple of the page size

    static size_t page_size(); // bytes

    size_t n_bytes_committed() const;

    // a set of pages that holds nothing yet
    llama_kv_set make_set() const;

    // add the pages that the bytes [offset, offset + size) touch
    void add(llama_kv_set & set, size_t offset, size_t size) const;

    // have the pages of the set and no others: commits what is missing, then gives back the rest
    // returns false when a commit fails, and what is committed is what was committed before
    // no one may be using the pages that go
    bool assign(const llama_kv_set & set);

    // have the pages that the bytes [offset, offset + size) touch, whatever there is left: for what goes back elsewhere
    void take(size_t offset, size_t size);

    // give back the pages that are in these bytes as a whole
    // no one may be using them
    void give(size_t offset, size_t size);

    // make these bytes zero. where nothing is committed they are
    void set_zero(size_t offset, size_t size);

    // make all bytes zero, also what was written without having been committed. what is committed stays so
    void clear();

private:
    llama_kv_pages(char * base, size_t n_bytes);

    bool commit (size_t i0, size_t i1);
    void discard(size_t i0, size_t i1);

    char * const base;
    const size_t n_bytes;

    llama_kv_set committed; // pages

    size_t n_committed = 0; // pages
};

// ggml_backend_alloc_ctx_tensors() on a new range, where nothing is committed yet. each tensor starts on a page of its own
// the buffer is of the type of plain host memory, and owns the range. to clear it gives back what is not committed
// null: the addresses cannot be had, and nothing has changed then
ggml_backend_buffer * llama_kv_pages_alloc(ggml_context * ctx);

// of a buffer that llama_kv_pages_alloc() made
llama_kv_pages & llama_kv_pages_of(ggml_backend_buffer * buf);

// the size of such a buffer is what is committed from now on, so that whoever adds up buffers or logs them says what is taken
void llama_kv_pages_show(ggml_backend_buffer * buf);
