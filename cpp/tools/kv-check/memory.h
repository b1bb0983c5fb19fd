#pragma once

#include "args.h"

// create one context, and print its memory as a line of JSON. return the exit code
int memory_report(const kv_check_params & params);
