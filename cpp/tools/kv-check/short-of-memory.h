#pragma once

#include "args.h"

// while this object lives, allocations are counted and fail according to --fail (LLAMA_KV_DYNAMIC_FAIL in
// llama-kv-fault.h), and --limit bounds the growth of the process's address space
class short_of_memory {
  public:
    explicit short_of_memory(const kv_check_params & params, bool enabled = true);
    ~short_of_memory();

    short_of_memory(const short_of_memory &) = delete;
    short_of_memory & operator=(const short_of_memory &) = delete;
};
