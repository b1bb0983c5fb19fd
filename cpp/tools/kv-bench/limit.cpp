#include "limit.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

// memory that was just reserved from the system, with no page mapped yet
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

    void commit() {
#if defined(MADV_POPULATE_WRITE)
        if (madvise(data, size, MADV_POPULATE_WRITE) == 0) {
            return;
        }
#endif
        for (size_t i = 0; i < size; i += page_size()) {
            ((volatile char *) data)[i] = 0;
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

// return the seconds of a memcpy, in which each thread copies a part. 0: there is not enough memory
static double time_memcpy(const fresh_memory & src, int32_t n_threads) {
    fresh_memory dst(src.size);
    if (dst.data == nullptr) {
        return 0.0;
    }

    const auto copy_part = [&](int32_t i) {
        const size_t offs = src.size/n_threads*i;
        const size_t end  = i == n_threads - 1 ? src.size : src.size/n_threads*(i + 1);

        memcpy(dst.data + offs, src.data + offs, end - offs);
    };

    return timed([&]() {
        std::vector<std::thread> threads;
        for (int32_t i = 1; i < n_threads; ++i) {
            threads.emplace_back(copy_part, i);
        }
        copy_part(0);
        for (auto & thread : threads) {
            thread.join();
        }
    });
}

static double time_commit(size_t size) {
    fresh_memory dst(size);
    return dst.data == nullptr ? 0.0 : timed([&]() { dst.commit(); });
}

static double time_commit(ggml_backend_dev_t dev, size_t size) {
    ggml_backend_buffer_ptr buf;
    return timed([&]() {
        buf.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), size));
        if (buf) {
            ggml_backend_buffer_clear(buf.get(), 0);
        }
    });
}

static double time_memcpy(ggml_backend_dev_t dev, size_t size) {
    const ggml_context_ptr ctx(ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor * src = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, size);
    ggml_tensor * dst = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, size);

    const ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev)));
    if (!buf) {
        return 0.0;
    }
    ggml_backend_buffer_clear(buf.get(), 1);
    return timed([&]() { ggml_backend_tensor_copy(src, dst); });
}

growth_limit limit_growth(ggml_backend_dev_t dev, uint64_t n_bytes_copied, uint64_t n_bytes_added, int32_t n_threads) {
    growth_limit res;
    if (dev != nullptr) {
        res.memcpy_seconds = n_bytes_copied > 0 ? time_memcpy(dev, n_bytes_copied) : 0.0;
        res.commit_seconds = n_bytes_added  > 0 ? time_commit(dev, n_bytes_added)  : 0.0;
        return res;
    }
    if (n_bytes_copied > 0) {
        fresh_memory src((size_t) n_bytes_copied);
        if (src.data != nullptr) {
            memset(src.data, 1, src.size);
            res.memcpy_seconds = time_memcpy(src, n_threads);
        }
    }
    if (n_bytes_added > 0) {
        res.commit_seconds = time_commit((size_t) n_bytes_added);
    }
    return res;
}
