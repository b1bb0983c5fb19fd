// Check copies of streams that wait for memory until the next batch. The results are those of copies without a wait.
//
//   late_copies MODEL shift    a K-shift waits after a copy, and a batch fails that used cells outside of the window:
//                              these cells must be shifted, too
//   late_copies MODEL rows     a sequence with a waiting copy is removed, and receives the cells of another sequence
//                              (DSV4, rows without cells)
//   late_copies MODEL N+       the N-th allocation of the copies and all later ones fail: the failed copies are performed
//                              with the next batch. prints whether one was refused
//   late_copies MODEL heap     three copies wait, and the N-th heap allocation fails once in the batch that performs them:
//                              for each N, all three are performed later. prints the number of failed allocations
//
// Exit code: 0 if the logits are equal

#include "dynamic.h"
#include "full_heap.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

static llama_context * create(llama_model * model, uint32_t n_ctx, uint32_t n_seq_max) {
    auto params = dynamic_params(n_ctx*n_seq_max);
    params.n_batch   = 512;
    params.n_ubatch  = 64;
    params.n_seq_max = n_seq_max;
    params.swa_full  = true;

    return llama_init_from_model(model, params);
}

// return the result of llama_decode() for the tokens [p0, p0 + n) of a sequence. append their logits to res
static int decode(llama_context * ctx, llama_seq_id seq_id, llama_pos p0, int n, std::vector<float> * res = nullptr) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;

    for (int i = 0; i < n; ++i) {
        batch.token   [i]    = 5 + (seq_id*71 + (p0 + i)*37) % 90;
        batch.pos     [i]    = p0 + i;
        batch.n_seq_id[i]    = 1;
        batch.seq_id  [i][0] = seq_id;
        batch.logits  [i]    = i == n - 1;
    }

    int ret = -1;
    try {
        ret = llama_decode(ctx, batch);
    } catch (const std::bad_alloc &) {
    }
    llama_batch_free(batch);

    if (res && ret == 0) {
        const float * logits = llama_get_logits_ith(ctx, -1);
        res->insert(res->end(), logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
    }

    return ret;
}

static std::vector<float> shift(llama_model * model, bool is_short) {
    llama_context * ctx = create(model, 512, 3);
    llama_memory_t  mem = llama_get_memory(ctx);

    decode(ctx, 0, 0, 500);
    llama_memory_seq_cp (mem, 0, 1, -1, -1);
    llama_memory_seq_rm (mem, 0, 0, 100);
    llama_memory_seq_add(mem, 0, 100, -1, -100);

    if (is_short) {
        setenv("LLAMA_KV_DYNAMIC_FAIL", "1+", 1);
        if (decode(ctx, 0, 400, 110) != 1) {
            exit(2); // the request was not refused
        }
        unsetenv("LLAMA_KV_DYNAMIC_FAIL");
    }

    std::vector<float> res;
    decode(ctx, 2, 0, 1); // performs the copy and the shift
    llama_memory_seq_rm(mem, 0, 40, -1); // back to where those cells are in the window
    decode(ctx, 0, 40, 1, &res);

    llama_free(ctx);

    return res;
}

static std::vector<float> rows(llama_model * model, bool is_short) {
    llama_context * ctx = create(model, 2048, 4);
    llama_memory_t  mem = llama_get_memory(ctx);

    for (int p = 0; p < 1300; p += 100) {
        decode(ctx, 0, p, 100);
        decode(ctx, 2, p, 100);
    }

    llama_memory_seq_cp(mem, 0, 1, -1, -1);

    if (is_short) {
        setenv("LLAMA_KV_DYNAMIC_FAIL", "1+", 1);
        if (decode(ctx, 3, 0, 1) != 1) {
            exit(2); // the request was not refused
        }
        unsetenv("LLAMA_KV_DYNAMIC_FAIL");
    } else {
        decode(ctx, 3, 0, 1); // performs the copy
    }

    llama_memory_seq_rm(mem, 0, -1, -1);
    llama_memory_seq_cp(mem, 2, 0, -1, -1);

    if (is_short) {
        decode(ctx, 3, 0, 1);
    }

    std::vector<float> res;
    decode(ctx, 0, 1300, 1, &res);
    decode(ctx, 1, 1300, 1, &res);

    llama_free(ctx);

    return res;
}

// which: the failing allocations, null: none
static std::vector<float> part(llama_model * model, const char * which, bool & is_late) {
    llama_context * ctx = create(model, 1024, 2);

    decode(ctx, 0, 0, 400);
    llama_memory_seq_cp(llama_get_memory(ctx), 0, 1, -1, -1);

    if (which) {
        setenv("LLAMA_KV_DYNAMIC_FAIL", which, 1);
    }
    is_late = decode(ctx, 1, 400, 1) == 1;
    unsetenv("LLAMA_KV_DYNAMIC_FAIL");

    if (is_late && decode(ctx, 1, 400, 1) != 0) {
        exit(2); // memory is available again
    }

    std::vector<float> res;
    decode(ctx, 1, 401, 1, &res);

    llama_free(ctx);

    return res;
}

static std::vector<float> heap(llama_model * model, long n, bool & has_failed) {
    llama_context * ctx = create(model, 1024, 4);

    decode(ctx, 0, 0, 400);
    for (int s = 1; s < 4; ++s) {
        llama_memory_seq_cp(llama_get_memory(ctx), 0, s, -1, -1);
    }

    setenv("LLAMA_KV_DYNAMIC_FAIL", "1+", 1);
    n_left = n;
    decode(ctx, 0, 400, 1);
    has_failed = n_left.exchange(-1) < 0 && n >= 0;
    unsetenv("LLAMA_KV_DYNAMIC_FAIL");

    std::vector<float> res;
    for (int s = 1; s < 4; ++s) {
        decode(ctx, s, 400, 1, &res);
    }

    llama_free(ctx);

    return res;
}

int main(int, char ** argv) {
    llama_model * model = load_model(argv[1]);

    long n = 0;

    if (strcmp(argv[2], "shift") == 0) {
        const auto expected = shift(model, false);
        if (expected.empty() || shift(model, true) != expected) {
            return 1;
        }
    } else if (strcmp(argv[2], "rows") == 0) {
        const auto expected = rows(model, false);
        if (expected.empty() || rows(model, true) != expected) {
            return 1;
        }
    } else if (strcmp(argv[2], "heap") != 0) {
        bool is_late = false;

        const auto expected = part(model, nullptr, is_late);
        if (expected.empty() || part(model, argv[2], is_late) != expected) {
            return 1;
        }
        n = is_late;
    } else {
        bool has_failed = false;

        const auto expected = heap(model, -1, has_failed);
        for (;; ++n) {
            const auto res = heap(model, n, has_failed);

            if (!has_failed) {
                break;
            }
            if (res != expected) {
                fprintf(stderr, "%ld: other logits\n", n);
                return 1;
            }
        }
    }
    llama_model_free(model);

    printf("%ld\n", n);
}
