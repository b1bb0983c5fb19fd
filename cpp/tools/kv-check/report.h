#pragma once

#include "args.h"
#include "trace.h"

#include <string>
#include <utility>
#include <vector>

// the first different float
struct first_diff {
    bool     found  = false;
    int64_t  decode = 0; // index of the decode in the check
    uint32_t row    = 0;
    uint32_t index  = 0; // within the row
    float    val_static  = 0.0f;
    float    val_dynamic = 0.0f;
};

struct check_result {
    std::string name;
    std::string status; // same | differs | static-fails | dynamic-fails | not-run | skipped
    std::string reason;
    int64_t n_decodes = 0;
    int64_t n_differ  = 0; // decodes with any difference
    int64_t n_values  = 0;
    int64_t n_blobs_resized = 0; // saved states of different sizes
    bool    grown     = false;
    double  seconds   = 0.0; // of the dynamic side
    std::vector<std::pair<std::string, double>> measured; // of the dynamic side
    first_diff diff;
};

struct run_result {
    std::string status;
    std::string reason;
    std::string arch;
    std::vector<check_result> checks;
    std::vector<std::pair<int64_t, int64_t>> growths; // each once, in the order of their first occurrence
    int64_t n_growths   = 0;
    int64_t n_shrinks   = 0;
    int64_t n_injected  = 0; // injected failures of allocations
    std::string storage; // growth of the dynamic caches: each kind, in order
    int64_t cells_start = 0;
    int64_t cells_end   = 0;
    int64_t kv_bytes_static  = 0; // of a fresh context
    int64_t kv_bytes_dynamic = 0;

    bool failed() const { return status == "differs" || status == "dynamic-fails" || status == "not-run"; }
};

run_result report_compare(const std::vector<std::string> & checks, const trace & st, const trace & dy);

std::string report_json(const kv_check_params & params, const run_result & res, double seconds);
