#pragma once

#include "ggml-backend.h"

#include <cstdint>

// What the machine does at best, to judge a growth by: the same bytes without a cache around them, once, right after a growth.
// Whatever else the machine does then is in both.
struct growth_limit {
    double memcpy_seconds = 0.0; // of what it copied, into memory that nobody has touched yet
    double commit_seconds = 0.0; // of what it added: the system makes fresh memory real, on a device: it is allocated and zero
};

// dev: where, null: in host memory
growth_limit limit_growth(ggml_backend_dev_t dev, uint64_t n_bytes_copied, uint64_t n_bytes_added);
