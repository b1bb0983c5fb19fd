#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

// the memory that the process and the devices use
struct server_bytes {
    int64_t resident = 0; // resident memory of the process, in bytes
    int64_t device   = 0; // used memory of the devices, in bytes

    // measure the memory now
    // devices: the devices that have memory of their own
    static server_bytes measure(const std::vector<ggml_backend_dev_t> & devices);
};

// throw server_refusal unless each device can allocate the given number of bytes
// The function tries to allocate the bytes, and frees them before it returns.
// n_bytes_host: number of bytes that malloc() must also be able to allocate in the address space of the process
void server_check_memory(const char * what, const std::map<ggml_backend_dev_t, size_t> & n_bytes, size_t n_bytes_host = 0);
