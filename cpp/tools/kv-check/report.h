#pragma once

#include "args.h"
#include "trace.h"

#include <string>
#include <utility>
#include <vector>

// the first float that differs between the static and the dynamic cache
struct first_diff {
    bool     found  = false;
    int64_t  decode = 0; // index of the decode in its check
    uint32_t row    = 0;
    uint32_t index  = 0; // index within the row
    float    val_static  = 0.0f;
    float    val_dynamic = 0.0f;
};

struct check_result {
    std::string name;
    std::string status; // same | differs | static-fails | dynamic-fails | not-run | skipped
    std::string reason;
    int64_t n_decodes = 0;
    int64_t n_differ  = 0; // decodes with at least one difference
    int64_t n_values  = 0;
    int64_t n_blobs_resized = 0; // saved states whose sizes differ between static and dynamic cache
    bool    grown     = false;
    double  seconds   = 0.0; // duration of the run with the dynamic cache
    std::vector<std::pair<std::string, double>> measured; // values measured with the dynamic cache
    first_diff diff;
};

struct run_result {
    std::string status;
    std::string reason;
    std::string arch;
    std::vector<check_result> checks;
    std::vector<std::pair<int64_t, int64_t>> growths; // each distinct growth once, in the order of first occurrence
    int64_t n_growths   = 0;
    int64_t n_shrinks   = 0;
    int64_t n_injected  = 0; // number of allocations that failed on request
    std::string storage; // kinds of growth of the dynamic caches, in order
    int64_t cells_start = 0;
    int64_t cells_end   = 0;
    int64_t kv_bytes_static  = 0; // bytes of the KV cache of a new context
    int64_t kv_bytes_dynamic = 0;

    bool failed() const { return status == "differs" || status == "dynamic-fails" || status == "not-run"; }
};

run_result report_compare(const std::vector<std::string> & checks, const trace & st, const trace & dy);

std::string report_json(const kv_check_params & params, const run_result & res, double seconds);
