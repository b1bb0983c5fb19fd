#pragma once

// Environment variables for the tests of the dynamic KV cache (--kv-dynamic). Nothing else reads them

#include <cstddef>

// check whether the next allocation has to fail. Call this once before each allocation of a growth
// LLAMA_KV_DYNAMIC_FAIL=N lets the N-th allocation of the process fail, counted from 1. N+ lets the N-th and all later ones fail.
// On a machine with enough memory, a test has no other way to let an allocation fail at a chosen point.
bool llama_kv_fault_alloc();

// return the largest step of a growth by copy, in bytes. A smaller storage doubles its size instead (see llama-kv-growth.h)
// The result is n_bytes_usual, or the value of LLAMA_KV_DYNAMIC_STEP=BYTES if this variable is set. A test sets a small value,
// so that even a small cache becomes too large for doubling, and grows by the largest step.
size_t llama_kv_fault_step(size_t n_bytes_usual);
