#pragma once

// The memory that this process can still allocate from the system and the devices. They do not report every limit, see "Limits
// that cannot be known" in llama-kv-pages.h

#include "ggml-backend.h"

#include <cstddef>
#include <string>

// return the bytes of memory that can be allocated now: the minimum over the cgroups of the process and the machine
// The result is SIZE_MAX if nothing is known, which is the case on systems other than Linux.
// root: directory that contains /proc and /sys, for tests
size_t llama_kv_limits_available(const std::string & root = "");

// check whether the device of this buffer type has this much memory plus a margin. logs a warning if not
bool llama_kv_limits_have(ggml_backend_buffer_type_t buft, size_t n_bytes);

// check whether n_bytes of host memory can be allocated, and if so, subtract them from the known free memory
// The free memory is queried at most once a second, unless n_bytes is large in comparison to it.
bool llama_kv_limits_allow(size_t n_bytes);
