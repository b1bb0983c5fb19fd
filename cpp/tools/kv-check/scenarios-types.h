#pragma once

// Common functions of the scenarios that change the types of the cells, or have a budget

#include "scenarios.h"

// add contexts of these parameters to a budget, if there is one. it must outlive them
void kv_check_set_budget(session_params & sp, llama_memory_budget * budget);
