#pragma once

// Environment variables for the tests of the dynamic KV cache (--kv-dynamic). Nothing else reads them

#include <cstddef>

// LLAMA_KV_DYNAMIC_FAIL=N fails the N-th allocation of a growth (counted over the process, from 1), N+ that one and all later
// ones: the only way to see an allocation fail at a chosen point on a machine with enough memory
// to be asked once before each allocation
bool llama_kv_fault_alloc();

// LLAMA_KV_DYNAMIC_STEP=BYTES: the step of a growth by copy, for caches that are smaller than the usual one
size_t llama_kv_fault_step(size_t n_bytes_usual);
