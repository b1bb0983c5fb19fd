#pragma once

// What one context takes: created, filled to some depths, cleared and used once more.

#include "context.h"
#include "device.h"
#include "limit.h"
#include "resident.h"

#include <string>
#include <vector>

struct growth_result {
    call_result  call;
    growth_limit limit; // measured right after the call
};

// what there is at one moment
struct point_result {
    std::string name; // created, depth, the type that the cells were changed to, after-clear
    uint32_t    depth;
    llama_memory_usage usage;

    double seconds;        // of the change
    double memcpy_seconds; // of as many bytes as it read and wrote

    int64_t rss;
    int64_t peak; // highest resident memory since the point before

    // of the device, by all that use it. -1: there is none
    int64_t device;
    int64_t device_peak;
};

struct memory_result {
    double  create_seconds = 0.0;
    int64_t rss_before     = -1;
    int64_t device_before  = -1;
    bool    peak_exact     = false;

    std::vector<point_result>  points;
    std::vector<growth_result> growths; // calls that grew
};

// throws std::runtime_error
memory_result memory_measure(const kv_bench_params & params, const bench_model & model);
