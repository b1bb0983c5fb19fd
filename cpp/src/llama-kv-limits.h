#pragma once

// What the system and the devices let this process take, as far as they say so (see llama-kv-pages.h for what that leaves open)

#include "ggml-backend.h"

#include <cstddef>
#include <string>

// bytes of memory that can be taken now: the least of what the cgroups and the machine have left
// SIZE_MAX where nothing is known (not Linux)
size_t llama_kv_limits_available();

// the same as llama_kv_limits_available() with the files below root instead of /, for tests
size_t llama_kv_limits_available(const std::string & root);

// the same for buffers of a type: of its device, less a margin for what the backend takes for itself while it computes, which is
// not known before: a 64th of the device's memory, or LLAMA_KV_DYNAMIC_MARGIN=MIB. SIZE_MAX where the device does not say
size_t llama_kv_limits_available(ggml_backend_buffer_type_t buft);

// whether this much can be taken, for which it is looked at most once a second where that is little. counts as taken if so
bool llama_kv_limits_allow(size_t n_bytes);
