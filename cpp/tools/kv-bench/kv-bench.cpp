// Measures the memory of a context, and its speed in comparison to a static context. See README.md.

#include "api.h"
#include "args.h"
#include "fields.h"
#include "json.h"
#include "memory.h"
#include "turns.h"

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

static void write_usage(json_line & out, const llama_memory_usage & usage) {
    out.begin_object(field::usage);
    out.num(field::reserved,  (int64_t) usage.reserved);
    out.num(field::committed, (int64_t) usage.committed);
    out.num(field::used,      (int64_t) usage.used);
    out.num(field::n_cells,      usage.n_cells);
    out.num(field::n_cells_max,  usage.n_cells_max);
    out.num(field::n_cells_used, usage.n_cells_used);
    out.num(field::n_grow,   usage.n_grow);
    out.num(field::n_shrink, usage.n_shrink);
    out.num(field::n_bytes_copied, (int64_t) usage.n_bytes_copied);
    out.num(field::t_grow_us,     usage.t_grow_us);
    out.num(field::t_grow_max_us, usage.t_grow_max_us);
    out.end_object();
}

static void write_memory(json_line & out, const memory_result & res) {
    out.real(field::create_seconds, res.create_seconds).num(field::rss_before, res.rss_before).flag(field::peak_exact, res.peak_exact);
    out.num(field::device_before, res.device_before);

    out.begin_array(field::points);
    for (const point_result & p : res.points) {
        out.begin_object();
        out.str(field::name, p.name).num(field::depth, p.depth).num(field::rss, p.rss).num(field::peak, p.peak);
        out.num(field::device, p.device).num(field::device_peak, p.device_peak);
        out.str(field::type, p.type < GGML_TYPE_COUNT ? ggml_type_name(p.type) : "");
        out.real(field::seconds, p.seconds).real(field::memcpy, p.memcpy_seconds);
        write_usage(out, p.usage);
        out.end_object();
    }
    out.end_array();

    out.begin_array(field::growths);
    for (const auto & [call, limit] : res.growths) {
        out.begin_object();
        out.num(field::depth, call.depth).num(field::n_grow, call.n_grow).real(field::seconds, call.grow_seconds);
        out.num(field::n_bytes_copied, (int64_t) call.n_bytes_copied).num(field::n_bytes_added, (int64_t) call.n_bytes_added);
        out.real(field::memcpy, limit.memcpy_seconds).real(field::commit, limit.commit_seconds);
        out.end_object();
    }
    out.end_array();
}

static void write_turns(json_line & out, const kv_bench_params & params, const std::vector<pair_result> & pairs) {
    out.str(field::other, params.other);
    out.begin_array(field::pairs);
    for (const pair_result & p : pairs) {
        out.begin_object();
        out.num(field::round, p.round).str(field::kind, p.kind).num(field::depth, p.depth).num(field::n_past, p.test.depth).num(field::n_tokens, p.test.n_tokens);
        out.real(field::base, p.base_seconds).real(field::test, p.test.seconds);
        out.num(field::n_grow, p.test.n_grow).num(field::n_added, p.test.n_cells_added).real(field::grow_seconds, p.test.grow_seconds);
        out.end_object();
    }
    out.end_array();
}

// compare the linked library with the library of the option `--other`. Load both into new namespaces: a library is some
// percent faster there than in the program's own namespace
static std::vector<pair_result> measure_other(const kv_bench_params & params, error_log & log) {
    const std::string paths[] = { llama_api_linked_path(), params.other };

    llama_api                    apis[2];
    std::unique_ptr<bench_model> models[2];
    for (int i = 0; i < 2; ++i) {
        const size_t side = (params.seed + i)%2;
        apis  [side] = llama_api_load(paths[side]);
        models[side] = std::make_unique<bench_model>(apis[side], params, log);
    }

    return turns_measure(params, *models[0], *models[1]);
}

// run the measurement, and write its results and its status: "ok", or "fails" with a reason
static bool measure(json_line & out, const kv_bench_params & params) {
    error_log log;
    log.verbose = params.verbose;
    try {
        if (!params.other.empty()) {
            write_turns(out, params, measure_other(params, log));
        } else {
            const llama_api   api = llama_api_linked();
            const bench_model model(api, params, log);

            if (params.n_round > 0) {
                write_turns(out, params, turns_measure(params, model, model));
            } else {
                const memory_result res = memory_measure(params, model);
                out.num(field::n_layer, llama_model_n_layer(model.model));
                write_memory(out, res);
            }
        }
    } catch (const cache_full &) {
        out.str(field::status, "fails").str(field::reason, "the cache is full");
        return false;
    } catch (const std::exception & err) {
        out.str(field::status, "fails").str(field::reason, err.what() + (log.last.empty() ? "" : ": " + log.last));
        return false;
    }
    out.str(field::status, "ok").str(field::reason, "");
    return true;
}

int main(int argc, char ** argv) {
    std::setlocale(LC_NUMERIC, "C");

    kv_bench_params params;
    switch (kv_bench_parse_args(argc, argv, params)) {
        case args_result::ok:    break;
        case args_result::help:  kv_bench_usage(argv[0]); return 0;
        case args_result::error: return 2;
    }

    const char * storage = getenv("LLAMA_KV_DYNAMIC_STORAGE");

    json_line out;
    out.begin_object();
    out.num(field::version, 2).str(field::model, params.model).flag(field::kv_dynamic, params.kv_dynamic);
    out.str(field::device, params.device).str(field::storage, storage != nullptr ? storage : "").num(field::n_ctx, params.n_ctx).num(field::n_ubatch, params.n_ubatch);
    out.num(field::n_threads, params.n_threads);
    out.str(field::flash_attn, params.flash_attn == LLAMA_FLASH_ATTN_TYPE_ENABLED ? "on" : params.flash_attn == LLAMA_FLASH_ATTN_TYPE_DISABLED ? "off" : "auto");
    out.str(field::type_k, ggml_type_name(params.type_k)).str(field::type_v, ggml_type_name(params.type_v));

    const bool ok = measure(out, params);

    out.end_object();
    printf("%s\n", out.text().c_str());

    return ok ? 0 : 2;
}
