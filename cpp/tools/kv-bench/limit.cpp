#include "limit.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

// fresh memory from the system: no page of it exists yet
class fresh_memory {
  public:
    explicit fresh_memory(size_t n_bytes) : size(n_bytes) {
#if defined(_WIN32)
        data = (char *) VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
        void * res = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        data = res == MAP_FAILED ? nullptr : (char *) res;
#endif
    }

    ~fresh_memory() {
        if (data == nullptr) {
            return;
        }
#if defined(_WIN32)
        VirtualFree(data, 0, MEM_RELEASE);
#else
        munmap(data, size);
#endif
    }

    fresh_memory(const fresh_memory &) = delete;
    fresh_memory & operator=(const fresh_memory &) = delete;

    void commit(size_t offset, size_t n_bytes) {
#if defined(MADV_POPULATE_WRITE)
        if (madvise(data + offset, n_bytes, MADV_POPULATE_WRITE) == 0) {
            return;
        }
#endif
        for (size_t i = 0; i < n_bytes; i += page_size()) {
            ((volatile char *) data)[offset + i] = 0;
        }
    }

    static size_t page_size() {
#if defined(_WIN32)
        SYSTEM_INFO info;
        GetSystemInfo(&info);
        return info.dwPageSize;
#else
        return (size_t) sysconf(_SC_PAGESIZE);
#endif
    }

    const size_t size;

    char * data = nullptr;
};

template <typename F>
static double timed(F && f) {
    const auto t_start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - t_start).count();
}

std::vector<limit_result> limit_measure(uint64_t n_bytes, uint64_t n_chunk, uint32_t n_repeat) {
    std::vector<limit_result> res;
    if (n_bytes == 0) {
        return res;
    }
    const size_t size = (size_t) n_bytes;
    n_chunk -= n_chunk % fresh_memory::page_size();

    limit_result copy   = { "memcpy",        n_bytes, 0,       {} };
    limit_result commit = { "commit",        n_bytes, 0,       {} };
    limit_result chunks = { "commit-chunks", n_bytes, n_chunk, {} };
    limit_result touch  = { "touch",         n_bytes, 0,       {} };

    fresh_memory src(size);
    if (src.data == nullptr) {
        return res;
    }
    memset(src.data, 1, size);

    for (uint32_t i = 0; i < n_repeat; ++i) {
        fresh_memory a(size);
        if (a.data == nullptr) {
            return res;
        }
        copy.seconds.push_back(timed([&]() { memcpy(a.data, src.data, size); }));
    }
    for (uint32_t i = 0; i < n_repeat; ++i) {
        fresh_memory a(size);
        if (a.data == nullptr) {
            return res;
        }
        commit.seconds.push_back(timed([&]() { a.commit(0, size); }));
    }
    for (uint32_t i = 0; i < n_repeat && n_chunk > 0; ++i) {
        fresh_memory a(size);
        if (a.data == nullptr) {
            return res;
        }
        chunks.seconds.push_back(timed([&]() {
            for (size_t at = 0; at < size; at += (size_t) n_chunk) {
                a.commit(at, std::min<size_t>((size_t) n_chunk, size - at));
            }
        }));
    }
    for (uint32_t i = 0; i < n_repeat; ++i) {
        fresh_memory a(size);
        if (a.data == nullptr) {
            return res;
        }
        touch.seconds.push_back(timed([&]() { memset(a.data, 0, size); }));
    }

    res = { copy, commit };
    if (n_chunk > 0) {
        res.push_back(chunks);
    }
    res.push_back(touch);
    return res;
}
