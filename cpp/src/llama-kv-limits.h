#pragma once

// What the system and the devices let this process take, as far as they say so (see llama-kv-pages.h for what that leaves open)

#include "ggml-backend.h"

#include <cstddef>
#include <string>

// bytes of memory that can be taken now: the least of what the cgroups and the machine have left
// SIZE_MAX where nothing is known (not Linux)
// root: for tests
size_t llama_kv_limits_available(const std::string & root = "");

// whether this much can be taken for buffers of a type: of its device, where a margin stays free. says so if not
bool llama_kv_limits_have(ggml_backend_buffer_type_t buft, size_t n_bytes);

// whether this much can be taken, for which it is looked at most once a second where that is little. counts as taken if so
bool llama_kv_limits_allow(size_t n_bytes);
