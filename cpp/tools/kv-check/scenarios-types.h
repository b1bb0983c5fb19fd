#pragma once

// What the scenarios share that change the types of the cells, or have a budget

#include "scenarios.h"

// the contexts of these parameters join a budget, if there is one. it has to outlive them
void kv_check_set_budget(session_params & sp, llama_memory_budget * budget);
