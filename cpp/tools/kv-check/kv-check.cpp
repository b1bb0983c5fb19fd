// Runs one model with a static and a dynamic KV cache and the same tokens, and compares the results bit for bit. See README.md.

#include "args.h"
#include "child.h"
#include "memory.h"
#include "report.h"
#include "scenarios.h"

#include <algorithm>
#include <chrono>
#include <clocale>
#include <cstdio>
#include <stdexcept>

// return the checks to run with the static cache, so that every check of the dynamic cache has a reference
static std::vector<std::string> static_checks(const std::vector<std::string> & checks) {
    std::vector<std::string> res;
    for (const auto & name : checks) {
        const std::string reference = kv_check_find_scenario(name)->reference;
        if (std::find(res.begin(), res.end(), reference) == res.end()) {
            res.push_back(reference);
        }
    }
    return res;
}

static run_result compare_sides(const kv_check_params & params) {
    const trace st = run_side(params, false, static_checks(params.checks));
    if (st.checks.empty()) {
        return report_compare(params.checks, st, trace()); // the model cannot be loaded
    }
    kv_check_params other = params;
    if (params.self_ctx > 0) {
        other.n_fill = kv_check_n_fill(params); // the same work in a context of another size
        other.n_ctx  = params.self_ctx;
    }
    const trace dy = run_side(other, !params.self, params.checks);

    run_result res = report_compare(params.checks, st, dy);
    fclose(st.file);
    fclose(dy.file);
    return res;
}

// choose shorter sequences for a model that aborts at positions beyond those that it was trained for
// Such a model aborts with the static and with the dynamic cache.
// Several shorter sequences in one stream still fill a cache. return false if the model needs no shorter sequences.
static bool use_fallback(const kv_check_params & params, const run_result & res, kv_check_params & shorter) {
    if (res.status != "static-fails" || params.n_seqs != 1 || res.checks.front().n_decodes == 0) {
        return false;
    }
    shorter = params;
    shorter.n_fill   = std::min<uint32_t>(kv_check_n_fill(params), 560);
    shorter.n_seqs   = 4; // at most 140 positions each. some checks add a few
    shorter.unified  = true;
    shorter.fallback = true;
    return true;
}

int main(int argc, char ** argv) {
    std::setlocale(LC_NUMERIC, "C");

    kv_check_params params;
    switch (kv_check_parse_args(argc, argv, params)) {
        case args_result::ok:    break;
        case args_result::help:  kv_check_usage(argv[0]); return 0;
        case args_result::error: return 2;
    }
    if (params.memory) {
        return memory_report(params);
    }
    if (params.checks.empty()) {
        for (const auto & def : kv_check_scenarios()) {
            if (kv_check_is_default(def.name)) {
                params.checks.push_back(def.name);
            }
        }
    }

    const auto t_start = std::chrono::steady_clock::now();
    try {
        run_result res = compare_sides(params);

        kv_check_params shorter;
        if (use_fallback(params, res, shorter)) {
            const std::string why = res.reason;
            run_result again = compare_sides(shorter);
            if (again.status != "static-fails") {
                res = again;
                res.reason = "with " + std::to_string(shorter.n_seqs) + " short sequences, as the static side cannot run a long one (" +
                    why + ")" + (again.reason.empty() ? "" : "; " + again.reason);
                params = shorter;
            }
        }

        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - t_start).count();
        printf("%s\n", report_json(params, res, seconds).c_str());
        return res.status == "load-fails" ? 2 : res.failed() ? 1 : 0;
    } catch (const std::exception & err) {
        fprintf(stderr, "error: %s\n", err.what());
        return 2;
    }
}
