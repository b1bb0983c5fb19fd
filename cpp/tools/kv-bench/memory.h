#pragma once

// Measures the memory of one context that is created, filled to some depths, cleared and used once more.

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

// the numbers of one moment
struct point_result {
    std::string name; // "created", "depth", "full", the new type of the cells, or "after-clear"
    uint32_t    depth;
    llama_memory_usage usage;

    ggml_type type; // type of K

    double seconds;        // duration of a change of types
    double memcpy_seconds; // time of a memcpy of the bytes that the change read and wrote

    int64_t rss;
    int64_t peak; // highest resident memory since the previous moment

    // memory of the device that all programs use. -1: no device
    int64_t device;
    int64_t device_peak;
};

struct memory_result {
    double  create_seconds = 0.0;
    int64_t rss_before     = -1;
    int64_t device_before  = -1;
    bool    peak_exact     = false;

    std::vector<point_result>  points;
    std::vector<growth_result> growths; // calls in which the cache has grown
};

// measure a context. throws std::runtime_error
memory_result memory_measure(const kv_bench_params & params, const bench_model & model);
