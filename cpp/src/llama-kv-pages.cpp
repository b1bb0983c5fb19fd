#include "llama-kv-pages.h"

#include "llama-kv-fault.h"
#include "llama-kv-limits.h"

#include "ggml.h"
#include "ggml-backend.h"
#include "../ggml/src/ggml-backend-impl.h" // the type and the size of a buffer, which nothing public sets

#include <algorithm>
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
#define MADV_POPULATE_WRITE 23 // since Linux 5.14, and in few headers
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

bool sys_populate(char * addr, size_t size, bool & failed) {
    (void) addr;
    (void) size;
    (void) failed;
    return false;
}

void sys_discard(char * addr, size_t size) {
    memset(addr, 0, size);
    VirtualUnlock(addr, size); // of pages that are not locked: takes them out of the working set
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
    madvise(res, size, MADV_NOHUGEPAGE); // an error if the kernel has none: as well
#endif

    return (char *) res;
}

void sys_free(char * base, size_t size) {
    munmap(base, size);
}

// make the pages real. false: not possible here, true: done
// sets failed when there is no memory
bool sys_populate(char * addr, size_t size, bool & failed) {
#ifdef __linux__
    for (int i = 0; madvise(addr, size, MADV_POPULATE_WRITE) != 0; ++i) {
        failed = errno == ENOMEM || errno == EFAULT || errno == EHWPOISON;
        if (failed) {
            break;
        }

        // an old kernel, or a filter of system calls
        if ((errno != EINTR && errno != EAGAIN) || i == 1000) {
            return false;
        }
    }

    return true;
#else
    (void) addr;
    (void) size;
    (void) failed;
    return false;
#endif
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

} // namespace

//
// llama_kv_pages
//

std::unique_ptr<llama_kv_pages> llama_kv_pages::reserve(size_t size) {
    const size_t n_bytes = (size + page_size() - 1)/page_size()*page_size();
    if (n_bytes == 0) {
        return nullptr;
    }

    char * base = sys_reserve(n_bytes);
    if (!base) {
        return nullptr;
    }

    return std::unique_ptr<llama_kv_pages>(new llama_kv_pages(base, n_bytes));
}

llama_kv_pages::llama_kv_pages(char * base, size_t n_bytes) : base(base), n_bytes(n_bytes), committed(n_bytes/page_size()) {
}

llama_kv_pages::~llama_kv_pages() {
    sys_free(base, n_bytes);
}

char * llama_kv_pages::data() const {
    return base;
}

size_t llama_kv_pages::size() const {
    return n_bytes;
}

size_t llama_kv_pages::page_size() {
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

size_t llama_kv_pages::n_bytes_committed() const {
    return n_committed*page_size();
}

llama_kv_set llama_kv_pages::make_set() const {
    return llama_kv_set(n_bytes/page_size());
}

void llama_kv_pages::add(llama_kv_set & set, size_t offset, size_t size) const {
    if (size > 0) {
        set.add(offset/page_size(), (offset + size - 1)/page_size() + 1);
    }
}

bool llama_kv_pages::assign(const llama_kv_set & set) {
    const auto diff = [](llama_kv_set a, const llama_kv_set & b) {
        a -= b;
        return a.runs();
    };

    const auto count = [](const llama_kv_set::runs_t & runs) {
        size_t res = 0;
        for (const auto & [i0, i1] : runs) {
            res += i1 - i0;
        }
        return res;
    };

    // nothing is allocated below
    const auto missing = diff(set, committed);
    const auto extra   = diff(committed, set);

    const size_t n_missing = count(missing);

    if (n_missing > 0 && !llama_kv_limits_allow(n_missing*page_size())) {
        return false;
    }

    for (size_t i = 0; i < missing.size(); ++i) {
        if (llama_kv_fault_alloc() || !commit(missing[i].first, missing[i].second)) {
            for (size_t j = 0; j <= i; ++j) {
                discard(missing[j].first, missing[j].second);
            }

            return false;
        }
    }

    for (const auto & [i0, i1] : extra) {
        discard(i0, i1);
    }

    committed    = set;
    n_committed += n_missing;
    n_committed -= count(extra);

    return true;
}

bool llama_kv_pages::commit(size_t i0, size_t i1) {
    char *       addr = base + i0*page_size();
    const size_t size = (i1 - i0)*page_size();

    bool failed = false;
    if (sys_populate(addr, size, failed)) {
        return !failed;
    }

    for (size_t i = i0; i < i1; ++i) {
        volatile char * byte = base + i*page_size();
        *byte = *byte;
    }

    return true;
}

void llama_kv_pages::discard(size_t i0, size_t i1) {
    sys_discard(base + i0*page_size(), (i1 - i0)*page_size());
}

void llama_kv_pages::take(size_t offset, size_t size) {
    for (size_t i = offset/page_size(); i*page_size() < offset + size; ++i) {
        n_committed += !committed.has(i);
        committed.add(i, i + 1); // the page comes when it is written
    }
}

void llama_kv_pages::give(size_t offset, size_t size) {
    const size_t i0 = (offset + page_size() - 1)/page_size();
    const size_t i1 = (offset + size)/page_size();

    if (i0 < i1) {
        discard(i0, i1);

        for (size_t i = i0; i < i1; ++i) {
            n_committed -= committed.has(i);
        }
        committed.remove(i0, i1);
    }
}

void llama_kv_pages::set_zero(size_t offset, size_t size) {
    const size_t end = offset + size;

    for (size_t i = offset/page_size(); i*page_size() < end; ++i) {
        if (committed.has(i)) {
            const size_t i0 = std::max(offset, i*page_size());
            const size_t i1 = std::min(end, (i + 1)*page_size());

            memset(base + i0, 0, i1 - i0);
        }
    }
}

void llama_kv_pages::clear() {
    discard(0, n_bytes/page_size());

    for (const auto & [i0, i1] : committed.runs()) {
        commit(i0, i1); // they were there a moment ago. if they are not now, they come when they are written
    }
}

//
// the buffer
//

static llama_kv_pages & pages_of(ggml_backend_buffer_t buf) {
    return *(llama_kv_pages *) buf->context;
}

static void buffer_free(ggml_backend_buffer_t buf) {
    delete &pages_of(buf);
}

static void * buffer_get_base(ggml_backend_buffer_t buf) {
    return pages_of(buf).data();
}

static void buffer_clear(ggml_backend_buffer_t buf, uint8_t value) {
    GGML_ASSERT(value == 0);

    pages_of(buf).clear();
}

ggml_backend_buffer * llama_kv_pages_alloc(ggml_context * ctx) {
    const auto size_of = [](const ggml_tensor * t) {
        return t->view_src ? 0 : GGML_PAD(ggml_nbytes(t), llama_kv_pages::page_size());
    };

    size_t size = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        size += size_of(t);
    }

    auto pages = llama_kv_pages::reserve(size);
    if (!pages) {
        return nullptr;
    }

    ggml_backend_buffer_t buf = ggml_backend_cpu_buffer_from_ptr(pages->data(), pages->size());
    if (!buf) {
        return nullptr;
    }

    // as ggml has it for a pointer, except for what goes by the range, and for the type: that of a pointer says that a file
    // is mapped there
    buf->buft              = ggml_backend_cpu_buffer_type();
    buf->context           = pages.get();
    buf->iface.free_buffer = buffer_free;
    buf->iface.get_base    = buffer_get_base;
    buf->iface.clear       = buffer_clear;

    char * addr = pages.release()->data();
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->view_src) {
            ggml_backend_view_init(t);
        } else {
            ggml_backend_tensor_alloc(buf, t, addr);
        }
        addr += size_of(t);
    }

    return buf;
}

llama_kv_pages & llama_kv_pages_of(ggml_backend_buffer * buf) {
    return pages_of(buf);
}

void llama_kv_pages_show(ggml_backend_buffer * buf) {
    buf->size = pages_of(buf).n_bytes_committed();
}
