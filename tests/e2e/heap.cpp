// Let the N-th heap allocation fail once while cells are freed: for each N, the next tokens are those of a context
// without a failure. By copy, either all caches of the context shrink or none, because their graphs need one size.
//
// If an allocation fails, the functions that report the memory of a context return zeros, and no C function throws.
//
//   heap MODEL  prints the number of failed allocations

#include "dynamic.h"
#include "full_heap.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static int n_smaller = 0; // caches that shrank while cells were freed

static bool decode(llama_context * ctx, int pos, int n) {
    bool res = true;

    for (int i = 0; i < n && res; i += 256) {
        std::vector<llama_token> tokens(std::min(256, n - i));
        for (size_t j = 0; j < tokens.size(); ++j) {
            tokens[j] = 5 + (pos + i + (int) j)*7 % 50;
        }
        res = llama_decode(ctx, llama_batch_get_one(tokens.data(), tokens.size())) == 0;
    }

    return res;
}

static bool counts(const llama_context * ctx) {
    const size_t used  = llama_get_memory_usage(ctx).used;
    const size_t bytes = llama_memory_seq_usage(ctx, 0).bytes;

    bool res = used > 0 && bytes > 0;

    for (long n = 0; res && n_left < 0; ++n) {
        n_left = n;
        const size_t used_cur = llama_get_memory_usage(ctx).used;
        const bool has_failed = n_left.exchange(n) < 0;
        const size_t bytes_cur = llama_memory_seq_usage(ctx, 0).bytes;
        res = used_cur == (has_failed ? 0 : used) && bytes_cur == (n_left < 0 ? 0 : bytes);
    }
    n_left = -1;

    return res;
}

struct result {
    int                n_smaller;
    std::vector<float> logits; // of a later token

    bool has_failed;
};

static result free_cells(llama_model * model, long n) {
    auto params = dynamic_params(8192);
    params.n_ubatch = 256;

    llama_context * ctx = llama_init_from_model(model, params);

    result res;
    if (!ctx || !decode(ctx, 0, 1400) || (n < 0 && !counts(ctx))) {
        exit(2);
    }

    n_smaller = 0;
    n_left    = n;
    llama_memory_seq_rm(llama_get_memory(ctx), 0, 100, -1);
    res.has_failed = n_left.exchange(-1) < 0 && n >= 0;
    res.n_smaller  = n_smaller;

    if (!decode(ctx, 100, 700)) {
        exit(2);
    }

    const float * logits = llama_get_logits_ith(ctx, -1);
    res.logits.assign(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(model)));

    llama_free(ctx);

    return res;
}

int main(int, char ** argv) {
    llama_log_set([](ggml_log_level, const char * text, void *) { n_smaller += strstr(text, "resizing KV cache") != nullptr; }, nullptr);
    ggml_backend_load_all();

    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());

    const auto expected = free_cells(model, -1);
    if (expected.n_smaller < 2) {
        return 2;
    }

    const char * storage = getenv("LLAMA_KV_DYNAMIC_STORAGE");
    const bool   is_copy = storage && strcmp(storage, "copy") == 0;

    long n = 0;
    for (;; ++n) {
        const auto res = free_cells(model, n);

        if (!res.has_failed) {
            break;
        }
        if (is_copy && res.n_smaller != 0 && res.n_smaller != expected.n_smaller) {
            fprintf(stderr, "%ld: %d of %d caches get smaller\n", n, res.n_smaller, expected.n_smaller);
            return 1;
        }
        if (res.logits != expected.logits) {
            fprintf(stderr, "%ld: other tokens\n", n);
            return 1;
        }
    }
    llama_model_free(model);

    printf("%ld\n", n);
}
