#pragma once

#include "args.h"

// while an object of this class exists, count allocations, and let those fail that `--fail` names (see LLAMA_KV_DYNAMIC_FAIL
// in llama-kv-fault.h)
// --limit also limits the growth of the address space of the process.
class short_of_memory {
  public:
    explicit short_of_memory(const kv_check_params & params, bool enabled = true);
    ~short_of_memory();

    short_of_memory(const short_of_memory &) = delete;
    short_of_memory & operator=(const short_of_memory &) = delete;
};
