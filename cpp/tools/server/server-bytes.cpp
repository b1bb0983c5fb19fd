#include "server-bytes.h"

#include "server-refusal.h"

#include "../kv-check/resident.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

server_bytes server_bytes::measure(const std::vector<ggml_backend_dev_t> & devices) {
    server_bytes res;

#if defined(__GLIBC__)
    malloc_trim(0); // otherwise, the result includes freed memory that malloc keeps
#endif
    res.resident = std::max<int64_t>(0, resident_bytes());

    for (auto * dev : devices) {
        size_t n_free  = 0;
        size_t n_total = 0;
        ggml_backend_dev_memory(dev, &n_free, &n_total);
        res.device += n_total - n_free;
    }

    return res;
}

void server_check_memory(const char * what, const std::map<ggml_backend_dev_t, size_t> & n_bytes, size_t n_bytes_host) {
    const std::unique_ptr<void, decltype(&std::free)> host(std::malloc(n_bytes_host), std::free);
    if (!host && n_bytes_host > 0) {
        throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, string_format("not enough memory for the %s: %zu bytes of addresses", what, n_bytes_host));
    }

    std::vector<ggml_backend_buffer_ptr> bufs;

    for (const auto & [dev, n_bytes_dev] : n_bytes) {
        auto * buft = ggml_backend_dev_buffer_type(dev);

        const size_t n_max = ggml_backend_buft_get_max_size(buft);
        for (size_t n_left = n_bytes_dev; n_left > 0;) {
            const size_t n = std::min(n_left, n_max);

            bufs.emplace_back(ggml_backend_buft_alloc_buffer(buft, n));
            if (!bufs.back()) {
                throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY,
                        string_format("not enough memory for the %s: %zu bytes on %s", what, n_bytes_dev, ggml_backend_dev_name(dev)));
            }
            n_left -= n;
        }
    }
}
