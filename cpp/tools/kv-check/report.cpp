#include "report.h"

#include "fields.h"
#include "json.h"
#include "scenarios.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <regex>

// return the first difference between two records of the same step. The result is "" if they are equal
static std::string compare_step(const trace & st, const trace & dy, const trace_record & a, const trace_record & b, check_result & res) {
    if (a.kind != b.kind || a.label != b.label) {
        return "the two sides went different ways: static at " + a.label + ", dynamic at " + b.label;
    }
    if (a.kind == TRACE_VALUE && a.a != b.a) {
        return a.label + " is " + std::to_string(a.a) + " on the static side, " + std::to_string(b.a) + " on the dynamic side";
    }
    if (a.kind == TRACE_BLOB && a.a != b.a) {
        if (st.model_val("arch") != "deepseek4") {
            return a.label + " has " + std::to_string(a.a) + " bytes on the static side, " + std::to_string(b.a) + " on the dynamic side";
        }
        // A state of DSV4 contains every row that exists, and a static cache has more rows than a dynamic one. So the sizes
        // differ. It suffices that each context can continue from the state of the other.
        res.n_blobs_resized++;
        return "";
    }
    if (a.kind == TRACE_BLOB && a.text != b.text) {
        size_t i = 0;
        while (i < a.text.size() && a.text[i] == b.text[i]) {
            i++;
        }
        return a.label + " differs within the " + std::to_string(trace_blob_block) + " bytes from " +
            std::to_string(i/sizeof(uint64_t)*trace_blob_block) + " of " + std::to_string(a.a);
    }
    if (a.kind != TRACE_DECODE) {
        return "";
    }

    res.n_decodes++;
    if (a.a != b.a) {
        return a.label + " returned " + std::to_string(a.a) + " on the static side, " + std::to_string(b.a) + " on the dynamic side";
    }
    if (a.rows != b.rows || a.cols != b.cols) {
        return a.label + " gave " + std::to_string(a.rows) + "x" + std::to_string(a.cols) + " values on the static side, " +
            std::to_string(b.rows) + "x" + std::to_string(b.cols) + " on the dynamic side";
    }
    std::vector<float> va;
    std::vector<float> vb;
    if (!st.read_floats(a, va) || !dy.read_floats(b, vb)) {
        return a.label + " cannot be read back";
    }
    res.n_values += (int64_t) va.size();
    if (va.empty() || memcmp(va.data(), vb.data(), va.size()*sizeof(float)) == 0) {
        return "";
    }

    res.n_differ++;
    size_t i = 0;
    while (memcmp(&va[i], &vb[i], sizeof(float)) == 0) {
        i++;
    }
    if (!res.diff.found) {
        res.diff = { true, res.n_decodes - 1, (uint32_t) (i/a.cols), (uint32_t) (i%a.cols), va[i], vb[i] };
    }
    return a.label + " differs from row " + std::to_string(i/a.cols) + ", value " + std::to_string(i%a.cols);
}

static int64_t count_nan(const trace & tr, const trace_check & check) {
    int64_t res = 0;
    std::vector<float> data;
    for (const auto & rec : check.steps) {
        if (rec.kind == TRACE_DECODE && tr.read_floats(rec, data)) {
            res += std::count_if(data.begin(), data.end(), [](float x) { return std::isnan(x); });
        }
    }
    return res;
}

// remove addresses and process ids, which differ between runs. Keep numbers of bytes
static std::string without_addresses(const std::string & text) {
    static const std::regex changing("0x[0-9a-f]+|==[0-9]+==|pid=[0-9]+");
    return std::regex_replace(text, changing, "");
}

// return true if upstream's RPC server has aborted because it lacks an operation. Then the runs with both caches fail
static bool is_rpc_gone(const std::string & fail) {
    return fail.find("ggml-rpc.cpp") != std::string::npos || fail.find("no RPC server answers") != std::string::npos;
}

// return true if the reason contains a report of a sanitizer. It counts as a fault even if the static run has the same report
// The word "sanitizer" is at the start of the reason, or in brackets after the reason of a check.
static bool is_sanitizer(const std::string & fail) {
    return fail.find("sanitizer") == 0 || fail.find("(sanitizer)") != std::string::npos;
}

static std::string whose(bool both, const std::string & reason) {
    return (both ? "on both sides: " : "on the static side: ") + reason;
}

static check_result compare_check(const std::string & name, const trace & st, const trace & dy, const trace_check & a, const trace_check & b) {
    check_result res;
    res.name  = name;
    res.grown = std::any_of(b.growths.begin(), b.growths.end(), [](const auto & g) { return g.second > g.first; });
    res.seconds = b.time_us/1e6;
    res.measured = b.measured;

    // compare the steps up to the end of the shorter run
    std::string diff;
    const size_t n = std::min(a.steps.size(), b.steps.size());
    for (size_t i = 0; i < n; ++i) {
        const std::string text = compare_step(st, dy, a.steps[i], b.steps[i], res);
        if (diff.empty()) {
            diff = text;
        }
        if (a.steps[i].label != b.steps[i].label) {
            break;
        }
    }

    const bool a_fails = !a.ended;
    const bool b_fails = !b.ended;
    if (!diff.empty()) {
        res.status = "differs";
        res.reason = diff + (b_fails && !b.fail.empty() ? "; then the dynamic side failed: " + b.fail : "");
    } else if (is_sanitizer(a.fail)) {
        res.status = "differs";
        res.reason = whose(is_sanitizer(b.fail), a.fail);
    } else if (is_sanitizer(b.fail)) {
        res.status = "dynamic-fails";
        res.reason = b.fail;
    } else if (a.lost) {
        res.status = "not-run";
        res.reason = a.fail + (b_fails ? "; the dynamic side fails: " + b.fail : "");
    } else if (a_fails && a.ours) {
        // here, the static run also executes code of the patches. So its failure counts as a difference, even if both runs
        // fail
        res.status = "differs";
        res.reason = whose(b_fails, a.fail.empty() ? a.last_error : a.fail);
    } else if (b_fails && (!a_fails || (b.steps.size() < a.steps.size() && !b.lost && !is_rpc_gone(b.fail)))) {
        res.status = "dynamic-fails";
        res.reason = b.fail.empty() ? b.last_error : b.fail;
    } else if (a_fails) {
        res.status = "static-fails";
        res.reason = a.fail.empty() ? a.last_error : a.fail;
        if (!b_fails) {
            res.reason += "; the dynamic side does not fail";
        }
    } else if (a.skip != b.skip) {
        res.status = "differs";
        res.reason = a.skip.empty() ? "only the dynamic side skips: " + b.skip : "only the static side skips: " + a.skip;
    } else if (a.steps.size() != b.steps.size()) {
        res.status = "differs";
        res.reason = "the static side made " + std::to_string(a.steps.size()) + " steps, the dynamic side " + std::to_string(b.steps.size());
    } else {
        res.status = a.skip.empty() ? "same" : "skipped";
        res.reason = a.skip;
    }

    const int64_t n_nan = res.status == "same" ? count_nan(st, a) : 0;
    if (n_nan > 0) {
        // the bits are equal, but they prove nothing, because a NaN no longer depends on attention
        res.status = "not-run";
        res.reason = std::to_string(n_nan) + " of " + std::to_string(res.n_values) + " values are NaN on both sides";
    }
    if (res.status == "same" && res.n_blobs_resized > 0) {
        res.reason += (res.reason.empty() ? "" : "; ") + std::to_string(res.n_blobs_resized) + " saved states are not of the same size";
    }
    return res;
}

// return the reason why no cache has grown, or ""
static std::string why_not_grown(const trace & dy) {
    if (dy.model_val("is_recurrent") == "1") {
        return "recurrent state only: it has a fixed size and no cells that could grow";
    }
    for (const auto & note : dy.notes) {
        if (note.find("start =") == std::string::npos) {
            return note;
        }
    }
    const std::string n_swa = dy.model_val("n_swa");
    if (!n_swa.empty() && n_swa != "0") {
        return "every attention layer has a window of " + n_swa + " positions: its cache is small and has its full size from the start (--swa-full lets it grow)";
    }
    return dy.cells_start == 0 ? "the dynamic side never said that its cache is dynamic" : "nothing needed more cells than there were";
}

static void sum_up(run_result & res, const trace & dy) {
    const auto first_with = [&](const char * status) -> const check_result * {
        for (const auto & check : res.checks) {
            if (check.status == status) {
                return &check;
            }
        }
        return nullptr;
    };
    const auto all_are = [&](const char * x, const char * y) {
        return std::all_of(res.checks.begin(), res.checks.end(), [&](const check_result & c) { return c.status == x || c.status == y; });
    };

    for (const char * status : { "differs", "dynamic-fails", "not-run" }) {
        if (const check_result * check = first_with(status)) {
            res.status = status;
            res.reason = check->name + ": " + check->reason;
            return;
        }
    }
    const check_result * failed = first_with("static-fails");
    if (failed != nullptr && (res.checks.front().status == "static-fails" || all_are("static-fails", "skipped"))) {
        res.status = "static-fails";
        res.reason = failed->name + ": " + failed->reason;
        return;
    }
    if (all_are("skipped", "skipped") && res.checks.front().reason.find("no memory") != std::string::npos) {
        res.status = "no-cache";
        res.reason = res.checks.front().reason;
        return;
    }
    if (first_with("same") == nullptr) {
        res.status = "skipped";
        res.reason = res.checks.front().name + ": " + res.checks.front().reason;
        return;
    }
    res.status = res.n_growths > 0 ? "same" : "same-not-grown";
    res.reason = res.n_growths > 0 ? "" : why_not_grown(dy);
    for (const auto & check : res.checks) {
        if (check.status == "static-fails") {
            res.reason += (res.reason.empty() ? "" : "; ") + ("static fails in " + check.name + ": " + check.reason);
        }
    }
}

run_result report_compare(const std::vector<std::string> & checks, const trace & st, const trace & dy) {
    run_result res;
    res.arch             = st.model_val("arch");
    for (const auto & storage : dy.storages) {
        res.storage += (res.storage.empty() ? "" : ", ") + storage;
    }
    res.cells_start      = dy.cells_start;
    res.cells_end        = dy.cells_start;
    res.kv_bytes_static  = st.kv_bytes;
    res.kv_bytes_dynamic = dy.kv_bytes;
    res.n_injected       = dy.n_injected;

    const bool static_fails = std::any_of(st.checks.begin(), st.checks.end(), [](const trace_check & c) { return !c.ended; });
    const bool rpc_gone     = std::any_of(st.checks.begin(), st.checks.end(), [](const trace_check & c) { return is_rpc_gone(c.fail); });

    for (const trace * tr : { &st, &dy }) {
        if (tr == &dy && static_fails && is_rpc_gone(dy.load_error)) {
            continue;
        }
        if (tr->checks.empty()) {
            // the static run is the first, so if it cannot load the model, no run can
            res.status = tr == &st ? "load-fails" : "dynamic-fails";
            res.reason = tr->load_error.empty() ? "the model cannot be loaded" : tr->load_error;
            return res;
        }
    }

    trace_check missing; // for a check that did not run, because the run ended before it
    missing.fail = "not run: the side had ended before";
    missing.lost = true;

    trace_check missing_static = missing;
    missing_static.lost = !rpc_gone; // otherwise, the model cannot be run
    std::vector<std::string> names = checks;
    names.push_back("exit"); // exists only if a run failed after its last check
    for (const auto & name : names) {
        const kv_check_scenario * def = kv_check_find_scenario(name);
        const trace_check * a = st.find(def != nullptr ? def->reference : name);
        const trace_check * b = dy.find(name);
        if (name == "exit") {
            if (a == nullptr && b == nullptr) {
                continue;
            }
            check_result exit_res;
            exit_res.name   = name;
            if (a != nullptr && is_sanitizer(a->fail)) {
                exit_res.status = "differs";
                exit_res.reason = whose(b != nullptr && is_sanitizer(b->fail), a->fail);
            } else {
                // if both runs end with the same error, it is not a fault of the dynamic cache
                const bool both = a != nullptr && (b == nullptr || without_addresses(a->fail) == without_addresses(b->fail));
                exit_res.status = both ? "static-fails" : "dynamic-fails";
                exit_res.reason = both ? a->fail : b->fail;
            }
            res.checks.push_back(exit_res);
            continue;
        }
        res.checks.push_back(compare_check(name, st, dy, a != nullptr ? *a : missing_static, b != nullptr ? *b : missing));
    }

    for (const auto & check : dy.checks) {
        for (const auto & growth : check.growths) {
            if (growth.second < growth.first) {
                res.n_shrinks++;
                continue;
            }
            res.n_growths++;
            res.cells_end = std::max(res.cells_end, growth.second);
            if (std::find(res.growths.begin(), res.growths.end(), growth) == res.growths.end()) {
                res.growths.push_back(growth);
            }
        }
    }

    sum_up(res, dy);
    return res;
}

static void json_check(json_line & out, const check_result & check) {
    out.begin_object();
    out.str(field::name, check.name).str(field::status, check.status);
    out.num(field::decodes, check.n_decodes).num(field::decodes_differ, check.n_differ).num(field::values, check.n_values).flag(field::grown, check.grown);
    if (check.diff.found) {
        out.begin_object(field::first_diff);
        out.num(field::decode, check.diff.decode).num(field::row, check.diff.row).num(field::index, check.diff.index);
        out.real(field::static_, check.diff.val_static).real(field::dynamic, check.diff.val_dynamic);
        out.end_object();
    } else {
        out.null(field::first_diff);
    }
    if (!check.measured.empty()) {
        out.begin_object(field::measured);
        for (const auto & val : check.measured) {
            out.real(val.first.c_str(), val.second);
        }
        out.end_object();
    }
    out.str(field::reason, check.reason).real(field::seconds, check.seconds);
    out.end_object();
}

std::string report_json(const kv_check_params & params, const run_result & res, double seconds) {
    const uint32_t n_streams = params.unified ? 1 : params.n_seqs;

    json_line out;
    out.begin_object();
    out.str(field::model, params.model).str(field::arch, res.arch);
    if (params.flash_attn == LLAMA_FLASH_ATTN_TYPE_AUTO) {
        out.str(field::fa, "auto");
    } else {
        out.flag(field::fa, params.flash_attn == LLAMA_FLASH_ATTN_TYPE_ENABLED);
    }
    out.str(field::type_k, ggml_type_name(params.type_k)).str(field::type_v, ggml_type_name(params.type_v));
    out.num(field::seqs, params.n_seqs).flag(field::unified, params.unified).flag(field::swa_full, params.swa_full);
    out.num(field::n_ctx, (int64_t) kv_check_n_cells(params)*n_streams).num(field::n_ubatch, params.n_ubatch);
    out.str(field::device, params.device.empty() ? "CPU" : params.device);
    out.str(field::status, res.status).str(field::reason, res.reason);
    out.flag(field::grown, res.n_growths > 0).flag(field::fallback, params.fallback).str(field::storage, res.storage);

    out.begin_array(field::growths);
    for (const auto & growth : res.growths) {
        out.begin_array().num(nullptr, growth.first).num(nullptr, growth.second).end_array();
    }
    out.end_array();
    out.num(field::n_growths, res.n_growths).num(field::n_shrinks, res.n_shrinks).num(field::failed_allocations, res.n_injected);
    out.num(field::cells_start, res.cells_start).num(field::cells_end, res.cells_end);

    out.begin_array(field::checks);
    for (const auto & check : res.checks) {
        json_check(out, check);
    }
    out.end_array();

    out.begin_object(field::kv_bytes).num(field::static_, res.kv_bytes_static).num(field::dynamic_start, res.kv_bytes_dynamic).end_object();
    out.real(field::seconds, seconds);
    out.end_object();
    return out.text();
}
