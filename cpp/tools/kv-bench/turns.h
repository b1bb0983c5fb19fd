#pragma once

// Compare the speed of a context with a static context: both in one process, with alternating calls.
//
// The result is processor time, so use one thread. Other load on caches and clocks affects both calls of a pair, and
// the first side alternates. Only the memory of each context remains: its effect exceeds the measured difference, and
// it is the same for all pairs of a round. So both contexts are created again every round, the first created side
// alternates, and a reader of the pairs must treat a round as one observation.

#include "context.h"

#include <string>
#include <vector>

struct pair_result {
    uint32_t    round;
    uint32_t    depth; // one of params.depths; the call may be slightly deeper
    std::string kind; // create, generate, prompt

    call_result test;
    double      base_seconds; // processor time of the static context
};

// throws std::runtime_error
std::vector<pair_result> turns_measure(const kv_bench_params & params, const bench_model & test, const bench_model & base);
