#pragma once

// What the system lets this process take, as far as it says so (see llama-kv-pages.h for what that leaves open)

#include <cstddef>
#include <string>

// bytes of memory that can be taken now: the least of what the cgroups and the machine have left
// SIZE_MAX where nothing is known (not Linux)
size_t llama_kv_limits_available();

// the same as llama_kv_limits_available() with the files below root instead of /, for tests
size_t llama_kv_limits_available(const std::string & root);

// env: LLAMA_KV_DYNAMIC_FAIL=N fails the N-th allocation of a growth (counted over the process, from 1), N+ that one and
// all later ones. for tests: the only way to see an allocation fail at a chosen point on a machine with enough memory
bool llama_kv_limits_fail_alloc();
