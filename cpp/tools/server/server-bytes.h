#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

// memory that this process and its devices use
struct server_bytes {
    int64_t resident = 0; // resident memory of the process, in bytes
    int64_t device   = 0; // used memory of the devices, in bytes

    // measure the memory now. devices: devices with their own memory
    static server_bytes measure(const std::vector<ggml_backend_dev_t> & devices);
};

// throw server_refusal unless each device can allocate the given bytes. the trial allocations are freed before this returns
// n_bytes_host: address space that is needed as well
void server_check_memory(const char * what, const std::map<ggml_backend_dev_t, size_t> & n_bytes, size_t n_bytes_host = 0);
