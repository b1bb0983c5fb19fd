// Measures what one context costs, static or dynamic. See README.md.

#include "args.h"
#include "json.h"
#include "limit.h"
#include "run.h"

#include <clocale>
#include <cstdio>
#include <cstdlib>

static void write_usage(json_line & out, const llama_memory_usage & usage) {
    out.begin_object("usage");
    out.num("reserved",  (int64_t) usage.reserved);
    out.num("committed", (int64_t) usage.committed);
    out.num("used",      (int64_t) usage.used);
    out.num("n_cells",      usage.n_cells);
    out.num("n_cells_max",  usage.n_cells_max);
    out.num("n_cells_used", usage.n_cells_used);
    out.num("n_grow",   usage.n_grow);
    out.num("n_shrink", usage.n_shrink);
    out.num("n_bytes_copied", (int64_t) usage.n_bytes_copied);
    out.num("t_grow_us",     usage.t_grow_us);
    out.num("t_grow_max_us", usage.t_grow_max_us);
    out.end_object();
}

static void write_run(json_line & out, const run_result & res) {
    out.begin_array("points");
    for (const point_result & p : res.points) {
        out.begin_object();
        out.str("name", p.name).num("depth", p.depth).real("seconds", p.seconds).num("rss", p.rss).num("peak", p.peak);
        write_usage(out, p.usage);
        out.end_object();
    }
    out.end_array();

    out.begin_array("calls");
    for (const call_result & c : res.calls) {
        out.begin_object();
        out.str("kind", call_kind_name(c.kind)).num("depth", c.depth).num("n_tokens", c.n_tokens).real("seconds", c.seconds);
        out.num("n_grow", c.n_grow).real("grow_seconds", c.grow_seconds).num("n_bytes_copied", (int64_t) c.n_bytes_copied);
        out.num("n_bytes_added", (int64_t) c.n_bytes_added).num("n_cells", c.n_cells);
        if (c.n_grow > 0) {
            out.begin_object("limit").real("memcpy", c.limit.memcpy_seconds).real("commit", c.limit.commit_seconds);
            out.real("touch", c.limit.touch_seconds).end_object();
        }
        out.end_object();
    }
    out.end_array();
}

static void write_limits(json_line & out, const std::vector<limit_result> & limits) {
    out.begin_array("limits");
    for (const limit_result & l : limits) {
        out.begin_object();
        out.str("name", l.name).num("bytes", (int64_t) l.bytes).num("chunk", (int64_t) l.chunk);
        out.begin_array("seconds");
        for (const double seconds : l.seconds) {
            out.real(nullptr, seconds);
        }
        out.end_array();
        out.end_object();
    }
    out.end_array();
}

int main(int argc, char ** argv) {
    std::setlocale(LC_NUMERIC, "C");

    kv_bench_params params;
    switch (kv_bench_parse_args(argc, argv, params)) {
        case args_result::ok:    break;
        case args_result::help:  kv_bench_usage(argv[0]); return 0;
        case args_result::error: return 2;
    }

    const run_result res = bench_run(params);
    const auto limits = limit_measure(params.limit_bytes, params.chunk_bytes, 5);
    const char * storage = getenv("LLAMA_KV_DYNAMIC_STORAGE");

    json_line out;
    out.begin_object();
    out.num("version", 1).str("model", params.model).flag("kv_dynamic", params.kv_dynamic);
    out.str("storage", storage != nullptr ? storage : "").num("n_ctx", res.n_ctx).num("n_ubatch", params.n_ubatch);
    out.num("n_threads", params.n_threads).num("n_layer", res.n_layer).real("n_params", res.n_params);
    out.str("flash_attn", params.flash_attn == LLAMA_FLASH_ATTN_TYPE_ENABLED ? "on" : params.flash_attn == LLAMA_FLASH_ATTN_TYPE_DISABLED ? "off" : "auto");
    out.str("type_k", ggml_type_name(params.type_k)).str("type_v", ggml_type_name(params.type_v));
    out.str("status", res.status).str("reason", res.reason);
    out.real("create_seconds", res.create_seconds).num("rss_before", res.rss_before).flag("peak_exact", res.peak_exact);
    write_run(out, res);
    write_limits(out, limits);
    out.end_object();
    printf("%s\n", out.text().c_str());

    return res.status == "ok" ? 0 : 2;
}
