#pragma once

// Functions of the scenarios that change the types of the cells or have a budget

#include "scenarios.h"

// add each context that is created with these parameters to a budget, which must outlive the contexts. budget may be null
void kv_check_set_budget(session_params & sp, llama_memory_budget * budget);
