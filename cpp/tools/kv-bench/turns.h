#pragma once

// How fast a context is against a static one: both in one process, call by call in turns.
//
// Processor time is what counts, so use one thread. Whatever else the machine does to caches and clocks meets both calls of a
// pair, and which of them comes first alternates. What stays is the memory
// that each context got: it makes more of a difference than what is measured, and it is the same for all pairs of a round. So
// both contexts are made anew every round, the one that is made first alternates, and who reads the pairs takes a round as
// one observation.

#include "context.h"

#include <string>
#include <vector>

struct pair_result {
    uint32_t    round;
    uint32_t    depth; // of params.depths; the call can be somewhat deeper
    std::string kind; // create, generate, prompt

    call_result test;
    double      base_seconds; // of processor time, the static one's
};

// throws std::runtime_error
std::vector<pair_result> turns_measure(const kv_bench_params & params, const bench_model & test, const bench_model & base);
