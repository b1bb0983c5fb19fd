#include "args.h"

#include "values.h"

#include <algorithm>
#include <cstdio>

void kv_bench_usage(const char * prog) {
    printf("usage: %s -m MODEL [options]\n\n", prog);
    printf("Measure the cost of one context: creation time, KV bytes, resident memory and growths. With --rounds, compare\n");
    printf("its speed with a static context. Print one line of JSON. Exit code: 0 measured, 2 for bad arguments, or if the\n");
    printf("model or context cannot be created.\n\n");
    printf("  -h,    --help                 Show this help.\n");
    printf("  -m,    --model FILE           Measure this model.\n");
    printf("  -dev,  --device NAME          Put all layers on this device, and measure its memory (default: only the CPU).\n");
    printf("         --kv-dynamic on|off    Use a dynamic KV cache (default: off).\n");
    printf("  -c,    --ctx-size N           Create this many cells (default: 131072).\n");
    printf("  -d,    --depths N,N,...       Fill the cache to these depths, in tokens, and measure there (default: none).\n");
    printf("  -ub,   --ubatch-size N        Decode this many tokens per call while filling (default: 512).\n");
    printf("         --budget MIB           Limit the cache, and fill it until it is full (default: no limit).\n");
    printf("         --auto-quant TYPE,TYPE,... Use these smaller types to stay within the budget (default: none).\n");
    printf("         --retype TYPE,TYPE,... Then change the cells to these types, one after the other, and measure each.\n");
    printf("         --limit                Also measure memcpy and page commits of the bytes of each growth.\n");
    printf("         --rounds N             Measure speed: create this and a static context N times, with alternating calls (default: 0).\n");
    printf("         --other FILE           With --rounds: create the static context with this libllama of another build.\n");
    printf("         --base-type TYPE       With --rounds: use this type for K and V of the static context (default: as -ctk and -ctv).\n");
    printf("  -s,    --seed N               With --rounds: seed of the positions in memory; odd: load FILE first (default: 0).\n");
    printf("  -n,    --n-gen N              With --rounds: generate this many tokens at each depth (default: 24).\n");
    printf("  -p,    --n-prompt N           With --rounds: use prompt batches of this many tokens (default: 64).\n");
    printf("  -b,    --batches N            With --rounds: decode this many prompt batches at each depth (default: 6).\n");
    printf("  -fa,   --flash-attn on|off|auto   Use flash attention (default: on).\n");
    printf("  -ctk,  --cache-type-k TYPE    Set the type of the K cache (default: f16).\n");
    printf("  -ctv,  --cache-type-v TYPE    Set the type of the V cache (default: f16).\n");
    printf("  -t,    --threads N            Use this many threads (default: 2).\n");
    printf("  -v,    --verbose              Show the log on stderr.\n");
}

// call parse(name, value) for each item of a list that is separated by commas
template <typename T, typename F>
static bool parse_list(const std::string & str, std::vector<T> & res, F && parse) {
    size_t pos = 0;
    while (pos <= str.size()) {
        const size_t end = std::min(str.find(',', pos), str.size());
        T val;
        if (!parse(str.substr(pos, end - pos), val)) {
            return false;
        }
        res.push_back(val);
        pos = end + 1;
    }
    return true;
}

static bool parse_depths(const std::string & str, std::vector<uint32_t> & res) {
    const bool ok = parse_list(str, res, [](const std::string & val, uint32_t & depth) { return parse_u32(val.c_str(), depth) && depth > 0; });
    std::sort(res.begin(), res.end());
    return ok;
}

args_result kv_bench_parse_args(int argc, char ** argv, kv_bench_params & params) {
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        const auto is = [&](const char * a, const char * b = nullptr) {
            return arg == a || (b != nullptr && arg == b);
        };

        if (is("-h", "--help"))    { return args_result::help; }
        if (is("-v", "--verbose")) { params.verbose = true; continue; }
        if (is("--limit"))         { params.limit   = true; continue; }

        if (i + 1 >= argc) {
            fprintf(stderr, "error: unknown option or missing value: %s\n", arg.c_str());
            return args_result::error;
        }
        const char * val = argv[++i];

        bool ok = true;
        uint32_t u = 0;
        if      (is("-m",   "--model"))        { params.model = val; }
        else if (is("-dev", "--device"))       { params.device = val; }
        else if (is("--kv-dynamic"))           { ok = parse_on_off(val, params.kv_dynamic); }
        else if (is("-c",   "--ctx-size"))     { ok = parse_u32(val, params.n_ctx) && params.n_ctx > 0; }
        else if (is("-d",   "--depths"))       { ok = parse_depths(val, params.depths); }
        else if (is("--budget"))               { ok = parse_u32(val, params.budget); }
        else if (is("--auto-quant"))           { ok = parse_list(val, params.auto_quant, parse_type); }
        else if (is("--retype"))               { ok = parse_list(val, params.retype, parse_type); }
        else if (is("-ub",  "--ubatch-size"))  { ok = parse_u32(val, params.n_ubatch) && params.n_ubatch > 0; }
        else if (is("--rounds"))               { ok = parse_u32(val, params.n_round); }
        else if (is("--other"))                { params.other = val; }
        else if (is("--base-type"))            { ok = parse_type(val, params.base_type); }
        else if (is("-s",   "--seed"))         { ok = parse_u32(val, params.seed); }
        else if (is("-n",   "--n-gen"))        { ok = parse_u32(val, params.n_gen); }
        else if (is("-p",   "--n-prompt"))     { ok = parse_u32(val, params.n_prompt) && params.n_prompt > 0; }
        else if (is("-b",   "--batches"))      { ok = parse_u32(val, params.n_batch); }
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
        fprintf(stderr, "error: no model is given. Use -m FILE (--help shows all options).\n");
        return args_result::error;
    }
    if (!params.other.empty() && params.n_round == 0) {
        fprintf(stderr, "error: --other needs --rounds.\n");
        return args_result::error;
    }
    if (params.base_type != GGML_TYPE_COUNT && params.n_round == 0) {
        fprintf(stderr, "error: --base-type needs --rounds.\n");
        return args_result::error;
    }
    if (!params.other.empty() && !params.device.empty()) {
        fprintf(stderr, "error: --other measures only the CPU, because the devices belong to the linked libllama.\n");
        return args_result::error;
    }
    const uint64_t n_more = params.n_round == 0 ? 0 : (uint64_t) params.n_prompt*params.n_batch + params.n_ubatch + params.n_gen;
    if (!params.depths.empty() && params.depths.back() + n_more > params.n_ctx) {
        fprintf(stderr, "error: depth %u and %u more tokens do not fit into -c %u\n", params.depths.back(), (uint32_t) n_more, params.n_ctx);
        return args_result::error;
    }

    return args_result::ok;
}
