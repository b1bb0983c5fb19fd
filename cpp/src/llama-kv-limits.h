#pragma once

// Memory that the system and the devices grant to this process, as far as they report it (llama-kv-pages.h lists the gaps)

#include "ggml-backend.h"

#include <cstddef>
#include <string>

// return the bytes of memory that can be allocated now: the minimum over the cgroups and the machine
// returns SIZE_MAX if nothing is known (not Linux)
// root: for tests
size_t llama_kv_limits_available(const std::string & root = "");

// check whether the device of this buffer type has this much memory plus a margin. logs a warning if not
bool llama_kv_limits_have(ggml_backend_buffer_type_t buft, size_t n_bytes);

// whether this much can be taken, for which it is looked at most once a second where that is little. counts as taken if so
bool llama_kv_limits_allow(size_t n_bytes);
