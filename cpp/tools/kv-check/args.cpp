#include "args.h"

#include "scenarios.h"
#include "values.h"

#include "ggml-backend.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

void kv_check_usage(const char * prog) {
    printf("usage: %s -m MODEL [options]\n\n", prog);
    printf("Run one model with a static and a dynamic KV cache and the same tokens, and compare the results bit for bit.\n");
    printf("Print one line of JSON. Exit code: 0 for no difference; 1 for a difference, for a failure of only the dynamic side,\n");
    printf("or for no result; 2 for bad arguments or a model that cannot be loaded.\n\n");
    printf("  -h,    --help                 Show this help.\n");
    printf("  -m,    --model FILE           Check this model.\n");
    printf("         --override KEY=N       Replace a number of the model's metadata.\n");
    printf("  -md,   --draft FILE           Use a draft model that shares the cells of the model, for the check 'draft'.\n");
    printf("         --mtp                  Use the model's own MTP layer as the draft, with its own cells.\n");
    printf("  -fa,   --flash-attn on|off|auto   Use flash attention (default: on).\n");
    printf("  -ctk,  --cache-type-k TYPE    Set the type of the K cache (default: f16).\n");
    printf("  -ctv,  --cache-type-v TYPE    Set the type of the V cache (default: f16).\n");
    printf("  -np,   --seqs N               Use this many sequences (default: 1).\n");
    printf("  -kvu,  --unified              Use one stream for all sequences (default: a stream for each).\n");
    printf("         --swa-full             Use a sliding window cache of full size.\n");
    printf("         --embeddings           Compare embeddings, too.\n");
    printf("         --pooling none|mean|cls|last   Set the pooling of the embeddings (default: none).\n");
    printf("  -c,    --ctx-size N           Create this many cells over all streams (default: as many as --fill needs).\n");
    printf("  -ub,   --ubatch-size N        Set the physical batch size (default: 128).\n");
    printf("  -n,    --fill N               Let the long checks fill this many cells per stream (default: 1100 with one stream, else 560).\n");
    printf("         --rs-seq N             Keep this many rollback snapshots of recurrent layers (default: 4).\n");
    printf("  -t,    --threads N            Use this many threads (default: 1).\n");
    printf("  -dev,  --device NAME          Run on this device, or on several (NAME,NAME) (default: only the CPU).\n");
    printf("  -ngl,  --n-gpu-layers N       Put this many layers on the device (default: all).\n");
    printf("  -nkvo, --no-kv-offload        Keep the KV cache in host memory.\n");
    printf("         --rpc HOST:PORT        Add RPC servers, separated by commas, whose devices --device can name.\n");
    printf("         --fake-device MIB[,KIB[,f16]]   Add a fake GPU with this much memory: FAKE0 for --device, FAKE1 for the\n");
    printf("                                next (see fake-device.h). It has pages of KIB (default: 2048; 0: none). With f16,\n");
    printf("                                it has flash attention only for f16, and no kernel that writes q5_0.\n");
    printf("         --storage inplace|copy Set how the dynamic cache grows (default: in place in host memory, by copy on a device).\n");
    printf("         --list-devices         Print the devices and exit.\n");
    printf("         --checks LIST          Run these checks, separated by commas:");
    for (const auto & def : kv_check_scenarios()) {
        printf(" %s", def.name);
    }
    printf("\n");
    printf("                                (default: all except random, shrink-full, lost, no-kernel and retype-*). 'retype' stands for all of retype-*.\n");
    printf("         --fail N[+]            Let the N-th allocation (N+: and all later ones) fail in the checks 'no-memory' and 'retype-fail'.\n");
    printf("         --retype T:T[:T][,..]  Test these changes of type in the checks retype-*, from left to right; K/V if they differ.\n");
    printf("         --limit MIB            Limit the growth of the process in the check 'no-memory' (Linux).\n");
    printf("         --train                Also train for an epoch, in the check 'train'.\n");
    printf("         --quick                Run shorter checks: fill 330 cells, with fewer batch splits and one kind of streams.\n");
    printf("         --text FILE            Use the tokens of this text instead of random tokens.\n");
    printf("  -s,    --seed N               Set the seed of the tokens (default: 1).\n");
    printf("         --timeout S            Limit each side to this many seconds (default: 900).\n");
    printf("         --self                 Compare the static cache with itself.\n");
    printf("         --self-ctx N           Compare the static cache with a static cache of N cells.\n");
    printf("         --memory               Only create a context, and report its resident memory and creation time.\n");
    printf("                                With --fill: fill this many cells with copies of one sequence, then clear.\n");
    printf("         --kv-dynamic on|off    Let --memory create a dynamic context (default: off).\n");
    printf("         --no-alloc             With --memory: allocate nothing, like a measurement of --fit.\n");
    printf("  -v,    --verbose              Show the logs of both sides on stderr.\n");
}

static bool parse_fail(const std::string & str, std::string & res) {
    uint32_t n = 0;
    const bool all_later = !str.empty() && str.back() == '+';
    if (!parse_u32(str.substr(0, str.size() - all_later).c_str(), n) || n == 0) {
        return false;
    }
    res = str;
    return true;
}

// parse "KEY=N"
static bool parse_override(const std::string & str, std::string & key, uint32_t & val) {
    const size_t eq = str.find('=');
    key = str.substr(0, eq);
    return eq != std::string::npos && eq > 0 && eq < sizeof(llama_model_kv_override().key) && parse_u32(str.c_str() + eq + 1, val);
}

// parse "q8_0" or "q8_0/f16"
static bool parse_types(const std::string & str, cell_types & res) {
    const size_t slash = str.find('/');
    return parse_type(str.substr(0, slash), res.k) && parse_type(slash == std::string::npos ? str : str.substr(slash + 1), res.v);
}

// parse chains of types, for example "f16:q8_0:f16,q8_0:q4_0/f16"
static bool parse_retypes(const std::string & str, std::vector<std::vector<cell_types>> & res) {
    std::stringstream chains(str);
    for (std::string chain; std::getline(chains, chain, ',');) {
        res.emplace_back();
        std::stringstream names(chain);
        for (std::string name; std::getline(names, name, ':');) {
            res.back().emplace_back();
            if (!parse_types(name, res.back().back())) {
                return false;
            }
        }
        if (res.back().size() < 2) {
            return false;
        }
    }
    return !res.empty();
}

// parse "MIB", "MIB,KIB" or "MIB,KIB,f16"
static bool parse_fake_device(const std::string & str, kv_check_params & params) {
    kv_check_params::fake_device res = { 0, 2048, false };

    std::string size = str;
    res.is_f16 = size.size() > 4 && size.compare(size.size() - 4, 4, ",f16") == 0;
    if (res.is_f16) {
        size.resize(size.size() - 4);
    }
    const size_t comma = size.find(',');
    const bool ok = parse_u32(size.substr(0, comma).c_str(), res.n_mib) && res.n_mib > 0 &&
        (comma == std::string::npos || parse_u32(size.c_str() + comma + 1, res.page_kib));
    params.fake_devices.push_back(res);
    return ok;
}

static bool parse_pooling(const std::string & str, enum llama_pooling_type & res) {
    const struct { const char * name; enum llama_pooling_type type; } types[] = {
        { "none", LLAMA_POOLING_TYPE_NONE },
        { "mean", LLAMA_POOLING_TYPE_MEAN },
        { "cls",  LLAMA_POOLING_TYPE_CLS  },
        { "last", LLAMA_POOLING_TYPE_LAST },
    };
    for (const auto & t : types) {
        if (str == t.name) {
            res = t.type;
            return true;
        }
    }
    return false;
}

static bool parse_checks(const std::string & str, std::vector<std::string> & res) {
    size_t pos = 0;
    while (pos <= str.size()) {
        size_t end = str.find(',', pos);
        if (end == std::string::npos) {
            end = str.size();
        }
        const std::string name = str.substr(pos, end - pos);
        if (name == "retype" && kv_check_find_scenario("retype-bits")) {
            for (const auto & def : kv_check_scenarios()) {
                if (kv_check_is_retype(def.name)) {
                    res.push_back(def.name);
                }
            }
        } else if (!name.empty()) {
            if (kv_check_find_scenario(name) == nullptr) {
                fprintf(stderr, "error: no check is called '%s' (see --help)\n", name.c_str());
                return false;
            }
            res.push_back(name);
        }
        pos = end + 1;
    }
    return !res.empty();
}

args_result kv_check_parse_args(int argc, char ** argv, kv_check_params & params) {
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        const auto is = [&](const char * a, const char * b = nullptr) {
            return arg == a || (b != nullptr && arg == b);
        };

        // options without a value
        if (is("-h", "--help"))                 { return args_result::help; }
        if (is("-kvu", "--unified"))            { params.unified     = true;  continue; }
        if (is("-kvu", "--kv-unified"))         { params.unified     = true;  continue; }
        if (is("--swa-full"))                   { params.swa_full    = true;  continue; }
        if (is("--embeddings"))                 { params.embeddings  = true;  continue; }
        if (is("-nkvo", "--no-kv-offload"))     { params.offload_kqv = false; continue; }
        if (is("--quick"))                      { params.quick       = true;  continue; }
        if (is("--train"))                      { params.train       = true;  continue; }
        if (is("--mtp"))                        { params.mtp         = true;  continue; }
        if (is("--self"))                       { params.self        = true;  continue; }
        if (is("--memory"))                     { params.memory      = true;  continue; }
        if (is("--no-alloc"))                   { params.no_alloc    = true;  continue; }
        if (is("-v", "--verbose"))              { params.verbose     = true;  continue; }
        if (is("--list-devices")) {
            ggml_backend_load_all();
            for (size_t d = 0; d < ggml_backend_dev_count(); ++d) {
                ggml_backend_dev_t dev = ggml_backend_dev_get(d);
                printf("%s: %s\n", ggml_backend_dev_name(dev), ggml_backend_dev_description(dev));
            }
            exit(0);
        }

        // options with a value
        if (i + 1 >= argc) {
            fprintf(stderr, "error: unknown option or missing value: %s\n", arg.c_str());
            return args_result::error;
        }
        const std::string val = argv[++i];

        bool ok = true;
        uint32_t u = 0;
        if      (is("-m",   "--model"))         { params.model = val; }
        else if (is("-md",  "--draft"))         { params.draft = val; }
        else if (is("--limit"))                 { ok = parse_u32(val.c_str(), params.limit_mib); }
        else if (is("--fail"))                  { ok = parse_fail(val, params.fail); }
        else if (is("-fa",  "--flash-attn"))    { ok = parse_flash_attn(val, params.flash_attn); }
        else if (is("-ctk", "--cache-type-k"))  { ok = parse_type(val, params.type_k); }
        else if (is("-ctv", "--cache-type-v"))  { ok = parse_type(val, params.type_v); }
        else if (is("--override"))              { ok = parse_override(val, params.override_key, params.override_val); }
        else if (is("--retype"))                { ok = parse_retypes(val, params.retypes); }
        else if (is("-np",  "--seqs"))          { ok = parse_u32(val.c_str(), params.n_seqs) && params.n_seqs > 0; }
        else if (is("--pooling"))               { ok = parse_pooling(val, params.pooling); }
        else if (is("-c",   "--ctx-size"))      { ok = parse_u32(val.c_str(), params.n_ctx); }
        else if (is("-ub",  "--ubatch-size"))   { ok = parse_u32(val.c_str(), params.n_ubatch) && params.n_ubatch > 0; }
        else if (is("-n",   "--fill"))          { ok = parse_u32(val.c_str(), params.n_fill); }
        else if (is("--rs-seq"))                { ok = parse_u32(val.c_str(), params.n_rs_seq); }
        else if (is("-t",   "--threads"))       { ok = parse_u32(val.c_str(), u) && u > 0; params.n_threads = (int32_t) u; }
        else if (is("-ngl", "--n-gpu-layers"))  { ok = parse_u32(val.c_str(), u); params.n_gpu_layers = (int32_t) u; }
        else if (is("-dev", "--device"))        { params.device = val; }
        else if (is("--rpc"))                   { params.rpc = val; }
        else if (is("--fake-device"))           { ok = parse_fake_device(val, params); }
        else if (is("--storage"))               { params.storage = val; ok = val == "inplace" || val == "copy"; }
        else if (is("--checks"))                { ok = parse_checks(val, params.checks); }
        else if (is("--text"))                  { params.text = val; }
        else if (is("-s",   "--seed"))          { ok = parse_u32(val.c_str(), params.seed); }
        else if (is("--self-ctx"))              { ok = parse_u32(val.c_str(), params.self_ctx); params.self = true; }
        else if (is("--timeout"))               { ok = parse_u32(val.c_str(), params.timeout_s) && params.timeout_s > 0; }
        else if (is("--kv-dynamic"))            { ok = parse_on_off(val, params.kv_dynamic); }
        else {
            fprintf(stderr, "error: unknown option: %s\n", arg.c_str());
            return args_result::error;
        }
        if (!ok) {
            fprintf(stderr, "error: bad value for %s: %s\n", arg.c_str(), val.c_str());
            return args_result::error;
        }
    }

    if (params.model.empty()) {
        fprintf(stderr, "error: no model is given. Use -m FILE (--help shows all options).\n");
        return args_result::error;
    }
    if (params.mtp && !params.draft.empty()) {
        fprintf(stderr, "error: --mtp and --draft exclude each other, because each selects a draft.\n");
        return args_result::error;
    }
    if (params.mtp) {
        params.draft = params.model;
    }
    if (params.device == "CPU" || params.device == "none") {
        params.device.clear();
    }

    return args_result::ok;
}
