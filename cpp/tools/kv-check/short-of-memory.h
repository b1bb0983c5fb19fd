#pragma once

#include "args.h"

// while it lives, allocations are counted and fail as --fail says (LLAMA_KV_DYNAMIC_FAIL in llama-kv-fault.h), and the address
// space of the process can grow by --limit
class short_of_memory {
  public:
    explicit short_of_memory(const kv_check_params & params, bool enabled = true);
    ~short_of_memory();

    short_of_memory(const short_of_memory &) = delete;
    short_of_memory & operator=(const short_of_memory &) = delete;
};
