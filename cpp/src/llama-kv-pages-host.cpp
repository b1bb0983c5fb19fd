// A range of pages in plain host memory. The details depend on the system:
//   - Linux: mmap(MAP_NORESERVE). A commit uses MADV_POPULATE_WRITE if the kernel supports it (5.14), otherwise a write to each
//     page. Pages are freed with MADV_DONTNEED. Transparent huge pages are off for the range, even if the system uses them
//     everywhere. Otherwise a page of 4 KiB would become 2 MiB, at the commit or later, when the kernel joins small pages.
//     Rejected: huge pages for regions that are committed completely. On a virtual machine, committing 64 MiB at a time took
//     six times as long as with small pages, because the host of the virtual machine had to find the memory.
//   - macOS, BSD: a commit writes to each page. Freed pages are mapped again, because MADV_FREE and similar calls do not promise
//     zeros.
//   - Windows: the range is committed as a whole. Such a commit uses no memory, only a promise of the page file. If the range
//     is too large, the system refuses the commit immediately. Freed pages are set to zero and leave the working set. They
//     stay committed, because they must be readable, and a new commit could fail.

#include "llama-kv-pages.h"

#include "llama-kv-limits.h"

#include "ggml.h"
#include "ggml-backend.h"
#include "../ggml/src/ggml-backend-impl.h" // for the type of a buffer, which no public function sets

#include <cstring>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#endif

#ifdef __linux__
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // since Linux 5.14. few headers define it
#endif
#endif

//
// the system
//

namespace {

#ifdef _WIN32

char * sys_reserve(size_t size) {
    return (char *) VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void sys_free(char * base, size_t size) {
    (void) size;
    VirtualFree(base, 0, MEM_RELEASE);
}

void sys_discard(char * addr, size_t size) {
    memset(addr, 0, size);
    VirtualUnlock(addr, size); // for pages that are not locked, this removes them from the working set
}

#else

char * sys_reserve(size_t size) {
#ifdef MAP_NORESERVE
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#else
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#endif

    void * res = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (res == MAP_FAILED) {
        return nullptr;
    }

#ifdef __linux__
    madvise(res, size, MADV_NOHUGEPAGE); // ignore the error of a kernel without huge pages
#endif

    return (char *) res;
}

void sys_free(char * base, size_t size) {
    munmap(base, size);
}

void sys_discard(char * addr, size_t size) {
#ifdef __linux__
    const bool ok = madvise(addr, size, MADV_DONTNEED) == 0;
#else
    const bool ok = mmap(addr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
#endif
    if (!ok) {
        memset(addr, 0, size);
    }
}

#endif

// allocate the memory of pages at once, if the system can do that. returns false if there is no memory
bool sys_commit(char * addr, size_t size, size_t size_page) {
#ifdef __linux__
    for (int i = 0; i < 1000; ++i) {
        if (madvise(addr, size, MADV_POPULATE_WRITE) == 0) {
            return true;
        }
        if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) {
            return false;
        }
        if (errno != EINTR && errno != EAGAIN) {
            break; // an old kernel, or a filter of system calls
        }
    }
#endif

    for (size_t i = 0; i < size; i += size_page) {
        volatile char * byte = addr + i;
        *byte = *byte;
    }

    return true;
}

class host_pages : public llama_kv_pages {
public:
    host_pages(char * base, size_t n_bytes) : llama_kv_pages(base, n_bytes, llama_kv_pages_size_host()) {}

    ~host_pages() override {
        sys_free(base, n_bytes);
    }

    void copy(size_t offset_src, size_t offset_dst, size_t size) override {
        memcpy(base + offset_dst, base + offset_src, size);
    }

    void clear() override {
        discard(0, n_bytes/size_page);

        // The pages were committed a moment ago, so a commit should succeed. If it fails, they are allocated on the first write.
        committed.each_run([this](size_t i0, size_t i1) { commit(i0, i1); });
    }

    // set all bytes of the committed pages to a value
    void fill(uint8_t value) {
        committed.each_run([&](size_t i0, size_t i1) { memset(base + i0*size_page, value, (i1 - i0)*size_page); });
    }

protected:
    bool has_memory(size_t size) const override {
        return llama_kv_limits_allow(size);
    }

    bool commit(size_t i0, size_t i1) override {
        return sys_commit(base + i0*size_page, (i1 - i0)*size_page, size_page);
    }

    bool commit_late(size_t i0, size_t i1) override {
        (void) i0;
        (void) i1;

        return true; // the pages are allocated on the first write
    }

    void discard(size_t i0, size_t i1) override {
        sys_discard(base + i0*size_page, (i1 - i0)*size_page);
    }

    void zero(size_t offset, size_t size) override {
        memset(base + offset, 0, size);
    }
};

} // namespace

size_t llama_kv_pages_size_host() {
#ifdef _WIN32
    static const size_t res = [] {
        SYSTEM_INFO info;
        GetSystemInfo(&info);
        return (size_t) info.dwPageSize;
    }();
#else
    static const size_t res = (size_t) sysconf(_SC_PAGESIZE);
#endif
    return res;
}

std::unique_ptr<llama_kv_pages> llama_kv_pages_reserve_range(size_t size) {
    const size_t size_page = llama_kv_pages_size_host();
    const size_t n_bytes   = (size + size_page - 1)/size_page*size_page;
    if (n_bytes == 0) {
        return nullptr;
    }

    char * base = sys_reserve(n_bytes);
    if (!base) {
        return nullptr;
    }

    try {
        return std::make_unique<host_pages>(base, n_bytes);
    } catch (...) {
        sys_free(base, n_bytes);
        throw;
    }
}

//
// the buffer
//

using context = std::shared_ptr<llama_kv_pages>;

static void buffer_free(ggml_backend_buffer_t buf) {
    delete (context *) buf->context;
}

static void * buffer_get_base(ggml_backend_buffer_t buf) {
    return (*(context *) buf->context)->data();
}

static void buffer_clear(ggml_backend_buffer_t buf, uint8_t value) {
    auto & pages = static_cast<host_pages &>(**(context *) buf->context);

    pages.clear();

    if (value != 0 && buf->size == pages.size()) {
        memset(pages.data(), value, pages.size()); // the whole range exists, see llama_kv_alloc_zero()
    } else if (value != 0) {
        pages.fill(value);
    }
}

llama_kv_pages * llama_kv_pages_of_host(ggml_backend_buffer_t buf) {
    return buf->iface.free_buffer == buffer_free ? ((context *) buf->context)->get() : nullptr;
}

llama_kv_paged_buffer llama_kv_pages_reserve_host(size_t size) {
    auto pages = std::make_unique<context>(llama_kv_pages_reserve_range(size));
    if (!*pages) {
        return {};
    }

    llama_kv_paged_buffer res = { ggml_backend_buffer_ptr(ggml_backend_cpu_buffer_from_ptr((*pages)->data(), (*pages)->size())), *pages };

    // Use ggml's functions for a buffer from a pointer, except those that depend on the range. Also set the buffer type to the
    // CPU's, because the type of a buffer from a pointer means that a file is mapped there.
    if (res.buf) {
        res.buf->buft              = ggml_backend_cpu_buffer_type();
        res.buf->context           = pages.release();
        res.buf->iface.free_buffer = buffer_free;
        res.buf->iface.get_base    = buffer_get_base;
        res.buf->iface.clear       = buffer_clear;
    }

    return res;
}
