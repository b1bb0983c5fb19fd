#pragma once

// Compares the speed of a context with the speed of a static context. Both are in one process, and their calls alternate.
//
// The result is processor time, so use one thread. Other load on caches and clocks affects both calls of a pair, and the
// context that is called first alternates.
//
// One difference remains: the memory of the two contexts is at different addresses. The addresses change the speed by more than
// the difference that is measured, and by the same amount in all pairs of a round. So both contexts are created again in every
// round, and the context that is created first alternates. When you evaluate the pairs, treat each round as one observation.

#include "context.h"

#include <string>
#include <vector>

struct pair_result {
    uint32_t    round;
    uint32_t    depth; // one of params.depths. the cells in use can be slightly more
    std::string kind; // "create", "generate" or "prompt"

    call_result test;
    double      base_seconds; // processor time of the static context
};

// measure all rounds. throws std::runtime_error
std::vector<pair_result> turns_measure(const kv_bench_params & params, const bench_model & test, const bench_model & base);
