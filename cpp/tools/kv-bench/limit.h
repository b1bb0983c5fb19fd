#pragma once

#include "ggml-backend.h"

#include <cstdint>

// The best time of the machine, as a reference for a growth: the same bytes without a cache, once, right after a
// growth. Other load of the machine affects both.
struct growth_limit {
    double memcpy_seconds = 0.0; // of the copied bytes, into untouched memory
    double commit_seconds = 0.0; // of the added bytes: the system maps fresh memory; on a device: allocated and zeroed
};

// measure on the device dev, or in host memory if null. n_threads: of the memcpy in host memory
growth_limit limit_growth(ggml_backend_dev_t dev, uint64_t n_bytes_copied, uint64_t n_bytes_added, int32_t n_threads);
