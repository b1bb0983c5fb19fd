#pragma once

#include "args.h"

// creates one context, prints what it costs as a line of JSON; returns the exit code
int memory_report(const kv_check_params & params);
