// Let the N-th large heap allocation fail once in a change of types: either all caches have changed or none has. The
// next tokens are those of a context that was changed, or not changed, without a failure. A budget that is too small
// for every type costs no precision.
//
//   types_heap MODEL        prints the number of failed changes
//   types_heap MODEL rest   the same for the N-th small allocation and all later ones, where N is 0, 20, 40, ... except
//                           ggml's buffers: the allocator of its graphs, in C, does not handle a failure
//   types_heap MODEL rungs  a growth that fits with no type: the types stay
//
// Exit code: 0 if the check passes

#include "dynamic.h"
#include "full_heap.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static llama_context * create(llama_model * model) {
    auto params = dynamic_params(2048);
    params.n_batch  = 256;
    params.n_ubatch = 64;

    return llama_init_from_model(model, params);
}

static int decode(llama_context * ctx, int pos, int n) {
    std::vector<llama_token> tokens(n);
    for (int i = 0; i < n; ++i) {
        tokens[i] = 5 + (pos + i)*37 % 90;
    }

    return llama_decode(ctx, llama_batch_get_one(tokens.data(), n));
}

// from, to: the tested change. n: index of the failing allocation. returns the logits of a later token
static std::vector<float> change(llama_model * model, ggml_type from, ggml_type to, long n, int32_t & res, bool & has_failed) {
    llama_context * ctx = create(model);

    decode(ctx, 0, 200);
    if (from != GGML_TYPE_F16) {
        llama_set_memory_type(ctx, from, from);
    }

    n_left     = n;
    res        = from == to ? LLAMA_MEMORY_TYPE_OK : llama_set_memory_type(ctx, to, to);
    has_failed = n_left.exchange(-1) < (is_for_good ? 1 : 0) && n >= 0;

    for (int pos = 200; pos < 600; pos += 100) {
        if (decode(ctx, pos, 100) != 0) {
            exit(2);
        }
    }

    const float * logits = llama_get_logits_ith(ctx, -1);
    std::vector<float> all(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(model)));

    llama_free(ctx);

    return all;
}

static int rungs(llama_model * model) {
    const ggml_type types[] = { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };

    llama_memory_budget * budget = llama_memory_budget_init(1, types, 3);
    llama_context       * ctx    = create(model);

    if (!llama_memory_budget_add(budget, ctx) || decode(ctx, 0, 250) != 0 || decode(ctx, 250, 50) != 1) {
        return 2;
    }

    ggml_type type_k;
    ggml_type type_v;
    llama_get_memory_type(ctx, &type_k, &type_v);
    const bool is_same = type_k == GGML_TYPE_F16 && type_v == GGML_TYPE_F16 && llama_memory_budget_get_usage(budget).n_down == 0;

    const bool is_refused = !llama_memory_budget_set_other(budget, (size_t) -1, nullptr) && llama_memory_budget_get_usage(budget).other == 0;

    llama_free(ctx);
    llama_memory_budget_free(budget);

    return is_same && is_refused ? 0 : 1;
}

int main(int argc, char ** argv) {
    llama_model * model = load_model(argv[1]);

    if (argc > 2 && strcmp(argv[2], "rungs") == 0) {
        return rungs(model);
    }

    is_for_good   = argc > 2;
    n_bytes_least = is_for_good ? 0 : 16*1024; // almost only the matrices of a rotation
    n_bytes_most  = is_for_good ? 64 : SIZE_MAX;
    const long step = is_for_good ? 20 : 1;

    long n_all = 0;

    for (const auto & [from, to] : { std::pair(GGML_TYPE_F16, GGML_TYPE_Q8_0), std::pair(GGML_TYPE_Q8_0, GGML_TYPE_F16) }) {
        int32_t res;
        bool    has_failed;

        const auto stays   = change(model, from, from, -1, res, has_failed);
        const auto changed = change(model, from, to,   -1, res, has_failed);

        for (long n = 0;; n += step, ++n_all) {
            const auto logits = change(model, from, to, n, res, has_failed);

            if (!has_failed) {
                break;
            }
            if (res == LLAMA_MEMORY_TYPE_LOST) {
                continue; // the batches started again
            }
            if (logits != (res == LLAMA_MEMORY_TYPE_OK ? changed : stays)) {
                fprintf(stderr, "%s to %s, %ld: other logits\n", ggml_type_name(from), ggml_type_name(to), n);
                return 1;
            }
        }
    }
    llama_model_free(model);

    printf("%ld\n", n_all);
}
