#pragma once

// What the system lets this process take, as far as it says so (see llama-kv-pages.h for what that leaves open)

#include <cstddef>
#include <string>

// bytes of memory that can be taken now: the least of what the cgroups and the machine have left
// SIZE_MAX where nothing is known (not Linux)
size_t llama_kv_limits_available();

// the same as llama_kv_limits_available() with the files below root instead of /, for tests
size_t llama_kv_limits_available(const std::string & root);

// whether this much can be taken, for which it is looked at most once a second where that is little. counts as taken if so
bool llama_kv_limits_allow(size_t n_bytes);
