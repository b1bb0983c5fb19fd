#pragma once

#include <cstdint>
#include <string>
#include <vector>

// What the machine can do, to judge a growth by: the same bytes without a cache around them.
struct limit_result {
    std::string name;
    uint64_t    bytes;
    uint64_t    chunk; // bytes per call of the system, 0: one call
    std::vector<double> seconds; // one per repeat
};

// memcpy:        n_bytes into memory that nobody has touched yet
// commit:        the system makes n_bytes of fresh memory real, in one call where it has one for that
// commit-chunks: the same in pieces of n_chunk bytes (0: not measured), as a cache of several tensors needs them
// touch:         the same by writing zeroes, as a static cache does when it is created
// empty when there is not enough memory
std::vector<limit_result> limit_measure(uint64_t n_bytes, uint64_t n_chunk, uint32_t n_repeat);

// the same once, for a growth that has just been seen: what else the machine does is then in both
struct growth_limit {
    double memcpy_seconds = 0.0; // of what the growth copied, into fresh memory
    double commit_seconds = 0.0; // of what it added
    double touch_seconds  = 0.0; // of what it added
};

growth_limit limit_growth(uint64_t n_bytes_copied, uint64_t n_bytes_added);
