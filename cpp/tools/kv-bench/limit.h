#pragma once

#include "ggml-backend.h"

#include <cstdint>

// The shortest time in which the machine could make a growth. kv-bench compares the time of each growth with this shortest
// time. Right after the growth, limit_growth() copies and adds the same numbers of bytes without a cache. So other load of the
// machine affects both times.
struct growth_limit {
    double memcpy_seconds = 0.0; // time to copy the copied bytes into untouched memory
    // time to add the added bytes: in host memory, the system maps fresh memory. on a device, memory is allocated and zeroed
    double commit_seconds = 0.0;
};

// measure in the memory of a device, or in host memory if dev is null
// n_threads: number of threads of the memcpy in host memory
growth_limit limit_growth(ggml_backend_dev_t dev, uint64_t n_bytes_copied, uint64_t n_bytes_added, int32_t n_threads);
