#pragma once

// One context, created, filled, measured at some depths and cleared.
//
// How the cache is filled: attention over a long context is what makes a prompt slow, and it is not what is measured.
// So each batch is decoded as a sequence of its own, at the positions that it has in the whole, and given to sequence 0 when it is
// done (seq_cp, seq_rm). Nothing else differs from a prompt: every row is computed and written by llama_decode(), into the
// cells that a prompt gets, and the cache grows where it grows for a prompt. Only, a token of one batch does not see those
// of another while it is computed, and the backend skips what is masked.
//
// Speed is measured on sequence 0, which has all the cells: a generated token and a prompt batch attend to the whole
// context, as in any chat. What was generated is then removed again.

#include "args.h"
#include "limit.h"
#include "resident.h"

#include <string>
#include <vector>

enum class call_kind { fill, cross, generate, prompt, cleared };

const char * call_kind_name(call_kind kind);

// one llama_decode(), with llama_synchronize()
struct call_result {
    call_kind kind;
    uint32_t  depth;    // cells in use before
    uint32_t  n_tokens;
    double    seconds;

    uint32_t n_grow;         // growths in this call
    double   grow_seconds;   // spent in them
    uint64_t n_bytes_copied; // by them
    uint64_t n_bytes_added;  // committed in them
    uint32_t n_cells;        // cells that have storage after it

    growth_limit limit; // measured right after the call
};

// what there is at one moment
struct point_result {
    std::string name; // created, depth, cleared, after-clear
    uint32_t    depth;
    llama_memory_usage usage;

    int64_t rss;
    int64_t peak; // highest resident memory since the point before, speed not measured yet
    double  seconds; // since the point before
};

struct run_result {
    std::string status; // ok, load-fails, context-fails, decode-fails
    std::string reason;

    double  create_seconds = 0.0;
    int64_t rss_before     = -1;
    bool    peak_exact     = false;

    uint32_t n_ctx    = 0;
    int32_t  n_layer  = 0;
    double   n_params = 0.0;

    std::vector<point_result> points;
    std::vector<call_result>  calls;
};

run_result bench_run(const kv_bench_params & params);
