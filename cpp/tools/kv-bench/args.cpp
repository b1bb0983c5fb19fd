#include "args.h"

#include "values.h"

#include <algorithm>
#include <cstdio>

void kv_bench_usage(const char * prog) {
    printf("usage: %s -m MODEL [options]\n\n", prog);
    printf("Measures what one context costs: time to create it, KV bytes, resident memory, growths, decode calls.\n");
    printf("Prints one line of JSON. Exit code: 0 measured, 2 bad arguments, or no model or context.\n\n");
    printf("  -h,    --help                 show this help\n");
    printf("  -m,    --model FILE           the model\n");
    printf("         --kv-dynamic on|off    dynamic KV cache (default: off)\n");
    printf("  -c,    --ctx-size N           cells (default: 131072)\n");
    printf("  -d,    --depths N,N,...       fill the cache to these depths, in tokens, and measure there (default: none)\n");
    printf("  -ub,   --ubatch-size N        tokens per decode call while filling (default: 512)\n");
    printf("  -n,    --n-gen N              tokens to generate at each depth (default: 16)\n");
    printf("  -p,    --n-prompt N           tokens of a prompt batch at each depth (default: 64)\n");
    printf("  -r,    --repeat N             prompt batches at each depth (default: 5)\n");
    printf("         --cross N              tokens to generate before and after one growth between two depths (default: 8)\n");
    printf("         --max-gen N            measure speed only up to this depth (default: all)\n");
    printf("         --limit MIB            also measure memcpy and page commits: of each growth, and of so many MiB (default: 0, no)\n");
    printf("         --chunk KIB            with --limit, also commit in pieces of so many KiB (default: 0, no)\n");
    printf("  -fa,   --flash-attn on|off|auto   flash attention (default: on)\n");
    printf("  -ctk,  --cache-type-k TYPE    type of the K cache (default: f16)\n");
    printf("  -ctv,  --cache-type-v TYPE    type of the V cache (default: f16)\n");
    printf("  -t,    --threads N            threads (default: 2)\n");
    printf("  -v,    --verbose              show the log on stderr\n");
}

static bool parse_list(const std::string & str, std::vector<uint32_t> & res) {
    size_t pos = 0;
    while (pos <= str.size()) {
        const size_t end = std::min(str.find(',', pos), str.size());
        uint32_t val = 0;
        if (!parse_u32(str.substr(pos, end - pos).c_str(), val) || val == 0) {
            return false;
        }
        res.push_back(val);
        pos = end + 1;
    }
    std::sort(res.begin(), res.end());
    return !res.empty();
}

args_result kv_bench_parse_args(int argc, char ** argv, kv_bench_params & params) {
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        const auto is = [&](const char * a, const char * b = nullptr) {
            return arg == a || (b != nullptr && arg == b);
        };

        if (is("-h", "--help"))    { return args_result::help; }
        if (is("-v", "--verbose")) { params.verbose = true; continue; }

        if (i + 1 >= argc) {
            fprintf(stderr, "error: unknown option or missing value: %s\n", arg.c_str());
            return args_result::error;
        }
        const char * val = argv[++i];

        bool ok = true;
        uint32_t u = 0;
        if      (is("-m",   "--model"))        { params.model = val; }
        else if (is("--kv-dynamic"))           { ok = parse_on_off(val, params.kv_dynamic); }
        else if (is("-c",   "--ctx-size"))     { ok = parse_u32(val, params.n_ctx) && params.n_ctx > 0; }
        else if (is("-d",   "--depths"))       { ok = parse_list(val, params.depths); }
        else if (is("-ub",  "--ubatch-size"))  { ok = parse_u32(val, params.n_ubatch) && params.n_ubatch > 0; }
        else if (is("-n",   "--n-gen"))        { ok = parse_u32(val, params.n_gen); }
        else if (is("-p",   "--n-prompt"))     { ok = parse_u32(val, params.n_prompt); }
        else if (is("-r",   "--repeat"))       { ok = parse_u32(val, params.n_repeat); }
        else if (is("--cross"))                { ok = parse_u32(val, params.n_cross); }
        else if (is("--max-gen"))              { ok = parse_u32(val, params.max_gen); }
        else if (is("--limit"))                { ok = parse_u32(val, u); params.limit_bytes = (uint64_t) u << 20; }
        else if (is("--chunk"))                { ok = parse_u32(val, u); params.chunk_bytes = (uint64_t) u << 10; }
        else if (is("-fa",  "--flash-attn"))   { ok = parse_flash_attn(val, params.flash_attn); }
        else if (is("-ctk", "--cache-type-k")) { ok = parse_type(val, params.type_k); }
        else if (is("-ctv", "--cache-type-v")) { ok = parse_type(val, params.type_v); }
        else if (is("-t",   "--threads"))      { ok = parse_u32(val, u) && u > 0; params.n_threads = (int32_t) u; }
        else {
            fprintf(stderr, "error: unknown option: %s\n", arg.c_str());
            return args_result::error;
        }
        if (!ok) {
            fprintf(stderr, "error: bad value for %s: %s\n", arg.c_str(), val);
            return args_result::error;
        }
    }

    if (params.model.empty()) {
        fprintf(stderr, "error: no model, use -m FILE (--help shows all options)\n");
        return args_result::error;
    }
    const uint32_t n_more = std::max(std::max(params.n_gen, params.n_prompt), 2*params.n_cross);
    if (!params.depths.empty() && (uint64_t) params.depths.back() + n_more > params.n_ctx) {
        fprintf(stderr, "error: depth %u and %u more tokens do not fit into -c %u\n", params.depths.back(), n_more, params.n_ctx);
        return args_result::error;
    }

    return args_result::ok;
}
