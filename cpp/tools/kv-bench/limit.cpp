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

// seconds, negative when there is not enough memory
static double time_memcpy(const fresh_memory & src) {
    fresh_memory dst(src.size);
    return dst.data == nullptr ? -1.0 : timed([&]() { memcpy(dst.data, src.data, src.size); });
}

static double time_commit(size_t size, size_t chunk) {
    fresh_memory dst(size);
    return dst.data == nullptr ? -1.0 : timed([&]() {
        for (size_t at = 0; at < size; at += chunk) {
            dst.commit(at, std::min(chunk, size - at));
        }
    });
}

static double time_touch(size_t size) {
    fresh_memory dst(size);
    return dst.data == nullptr ? -1.0 : timed([&]() { memset(dst.data, 0, size); });
}

template <typename F>
static bool repeat(limit_result & res, uint32_t n_repeat, F && measure) {
    for (uint32_t i = 0; i < n_repeat; ++i) {
        const double seconds = measure();
        if (seconds < 0.0) {
            return false;
        }
        res.seconds.push_back(seconds);
    }
    return true;
}

std::vector<limit_result> limit_measure(uint64_t n_bytes, uint64_t n_chunk, uint32_t n_repeat) {
    const size_t size  = (size_t) n_bytes;
    const size_t chunk = (size_t) (n_chunk - n_chunk % fresh_memory::page_size());
    if (size == 0) {
        return {};
    }

    limit_result copy   = { "memcpy",        n_bytes, 0,     {} };
    limit_result commit = { "commit",        n_bytes, 0,     {} };
    limit_result chunks = { "commit-chunks", n_bytes, chunk, {} };
    limit_result touch  = { "touch",         n_bytes, 0,     {} };

    fresh_memory src(size);
    if (src.data == nullptr) {
        return {};
    }
    memset(src.data, 1, size);

    const bool measured =
        repeat(copy,   n_repeat, [&]() { return time_memcpy(src); }) &&
        repeat(commit, n_repeat, [&]() { return time_commit(size, size); }) &&
        repeat(chunks, chunk > 0 ? n_repeat : 0, [&]() { return time_commit(size, chunk); }) &&
        repeat(touch,  n_repeat, [&]() { return time_touch(size); });
    if (!measured) {
        return {};
    }
    return chunk > 0 ? std::vector<limit_result> { copy, commit, chunks, touch } : std::vector<limit_result> { copy, commit, touch };
}

growth_limit limit_growth(uint64_t n_bytes_copied, uint64_t n_bytes_added) {
    growth_limit res;
    if (n_bytes_copied > 0) {
        fresh_memory src((size_t) n_bytes_copied);
        if (src.data != nullptr) {
            memset(src.data, 1, src.size);
            res.memcpy_seconds = std::max(0.0, time_memcpy(src));
        }
    }
    if (n_bytes_added > 0) {
        res.commit_seconds = std::max(0.0, time_commit((size_t) n_bytes_added, (size_t) n_bytes_added));
        res.touch_seconds  = std::max(0.0, time_touch((size_t) n_bytes_added));
    }
    return res;
}
