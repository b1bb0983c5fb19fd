#pragma once

// Environment variables for the tests of the dynamic KV cache (--kv-dynamic). Nothing else reads them

#include <cstddef>

// check whether the next allocation has to fail. Call this once before each allocation of a growth
// LLAMA_KV_DYNAMIC_FAIL=N lets the N-th allocation of the process fail, counted from 1. N+ lets the N-th and all later ones fail.
// There is no other way to see an allocation fail at a chosen point on a machine with enough memory.
bool llama_kv_fault_alloc();

// return the maximum step of a growth by copy, in bytes
// LLAMA_KV_DYNAMIC_STEP=BYTES replaces the usual step, so that a test with a small cache can reach it.
size_t llama_kv_fault_step(size_t n_bytes_usual);
