// print what upstream's API of llama.h returns, with a hash of the results, for builds with and without the patches. this program
// knows only upstream's llama.h
//
// upstream_bits MODEL [fa] [q8_0] [ref] [streams]   each line has what was done, what it returned, and a hash of the bits

#define _GNU_SOURCE

#include "ggml-cpu.h"
#include "llama.h"

#include <dlfcn.h>

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_CTX = 8192, N_SEQ = 4, N_BATCH = 512 };

static struct llama_context * ctx;
static llama_memory_t         mem;
static int                    n_vocab;
static llama_pos              n_past[N_SEQ];

// FNV-1a, 64 bits
static uint64_t hash(const void * data, size_t size, uint64_t h) {
    for (size_t i = 0; i < size; ++i) {
        h = (h ^ ((const uint8_t *) data)[i])*0x100000001b3u;
    }
    return h;
}

static void say(const char * what, int64_t answer, uint64_t bits) {
    printf("%s %" PRId64 " %016" PRIx64 "\n", what, answer, bits);
}

// decode a batch of one sequence, and free it. return the most likely next token
static llama_token decode_batch(const char * what, llama_seq_id seq, struct llama_batch batch) {
    const int32_t rc = llama_decode(ctx, batch);
    const int     n  = batch.n_tokens;

    uint64_t    bits = 0;
    llama_token best = 0;
    if (rc == 0) {
        n_past[seq] += n;
        for (int i = n > 8 ? n - 8 : 0; i < n; ++i) {
            const float * row = llama_get_logits_ith(ctx, i);
            if (!row) {
                continue;
            }
            bits = hash(row, n_vocab*sizeof(float), bits);
            for (llama_token id = best = 0; id < n_vocab; ++id) {
                best = row[id] > row[best] ? id : best;
            }
        }
    }
    llama_batch_free(batch);
    say(what, rc, bits);

    return best;
}

// return a batch that continues a sequence by n entries, with logits for the last 8. the caller sets the tokens or vectors
static struct llama_batch next_batch(llama_seq_id seq, int n, int n_embd, int n_pos, int n_seq) {
    struct llama_batch batch = llama_batch_init(n*n_pos, n_embd, n_seq);

    batch.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j < n_pos; ++j) {
            batch.pos[j*n + i] = n_past[seq] + i;
        }
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = i >= n - 8;
    }

    return batch;
}

// decode n tokens of a sequence or, if `token` >= 0, only that token. return the most likely next token
static llama_token decode(const char * what, llama_seq_id seq, int n, llama_token token) {
    struct llama_batch batch = next_batch(seq, n, 0, 1, 1);

    for (int i = 0; i < n; ++i) {
        batch.token[i] = token >= 0 ? token : (llama_token) ((7*(n_past[seq] + i) + 13*seq + 3) % (n_vocab < 97 ? n_vocab : 97));
    }

    return decode_batch(what, seq, batch);
}

static void generate(const char * what, llama_seq_id seq, int n) {
    llama_token token = decode(what, seq, 3, -1);
    for (int i = 0; i < n; ++i) {
        token = decode(what, seq, 1, token);
    }
}

// decode vectors instead of tokens, as for an image. M-RoPE needs four positions for each
static void decode_vectors(const char * what, llama_seq_id seq, int n) {
    const int n_embd = llama_model_n_embd_inp(llama_get_model(ctx));
    const int type   = llama_model_rope_type(llama_get_model(ctx));
    const int n_pos  = type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE ? 4 : 1;

    struct llama_batch batch = next_batch(seq, n, n_embd, n_pos, 1);

    for (int i = 0; i < n; ++i) {
        for (int j = 0; j < n_embd; ++j) {
            batch.embd[i*n_embd + j] = (float) ((i*37 + j*11 + seq*5) % 64)/32.0f - 1.0f;
        }
    }
    decode_batch(what, seq, batch);
}

// decode tokens that belong to two sequences
static void decode_both(const char * what, llama_seq_id seq, llama_seq_id other, int n) {
    struct llama_batch batch = next_batch(seq, n, 0, 1, 2);

    for (int i = 0; i < n; ++i) {
        batch.token[i]     = (5*i + 1) % (n_vocab < 97 ? n_vocab : 97);
        batch.n_seq_id[i]  = 2;
        batch.seq_id[i][1] = other;
    }
    decode_batch(what, seq, batch);
    n_past[other] = llama_memory_seq_pos_max(mem, other) + 1;
}

static void control(float strength) {
    const int n_embd = llama_model_n_embd(llama_get_model(ctx));
    const int n_all  = n_embd*llama_model_n_layer(llama_get_model(ctx));
    float *   data   = malloc(n_all*sizeof(float));

    for (int i = 0; i < n_all; ++i) {
        data[i] = strength*((i*7 % 32)/16.0f - 1.0f);
    }
    say("control vector", llama_set_adapter_cvec(ctx, strength != 0.0f ? data : NULL, n_all, n_embd, 1, 100), 0);
    free(data);
}

// abort at the n-th operation
static bool stops(void * user) {
    return --*(int *) user == 0;
}

static void state(const char * what, llama_seq_id from, llama_seq_id to) {
    const size_t size = llama_state_seq_get_size(ctx, from);
    uint8_t *    data = malloc(size + 1);
    const size_t n    = llama_state_seq_get_data(ctx, data, size, from);

    say(what, (int64_t) n, hash(data, n, 0));
    say(what, (int64_t) llama_state_seq_set_data(ctx, data, n, to), 0);
    n_past[to] = llama_memory_seq_pos_max(mem, to) + 1;
    free(data);
}

static int has(int argc, char ** argv, const char * word) {
    for (int i = 2; i < argc; ++i) {
        if (strcmp(argv[i], word) == 0) {
            return 1;
        }
    }
    return 0;
}

// drop the log, and only notice whether a cache grew
static void quiet(enum ggml_log_level level, const char * text, void * user) {
    (void) level;
    (void) user;
    if (strstr(text, "resizing KV cache")) {
        fputs("grew\n", stderr);
    }
}

// true: the CPU backend computes with its reference kernels
static int use_ref = 0;

// replace ggml's function with this name. it is called for each CPU backend that libllama makes
ggml_backend_t ggml_backend_cpu_init(void) {
    ggml_backend_t (*init)(void);
    void           (*set_use_ref)(ggml_backend_t, bool);
    *(void **) &init        = dlsym(RTLD_NEXT, "ggml_backend_cpu_init");
    *(void **) &set_use_ref = dlsym(RTLD_NEXT, "ggml_backend_cpu_set_use_ref");

    ggml_backend_t backend = init();
    if (use_ref) {
        set_use_ref(backend, true);
    }

    return backend;
}

int main(int argc, char ** argv) {
    use_ref = has(argc, argv, "ref");

    llama_log_set(quiet, NULL);
    setvbuf(stdout, NULL, _IOLBF, 0); // so that no output is lost if an assertion fails

    struct llama_context_params params = llama_context_default_params();

    params.n_ctx           = N_CTX;
    params.n_batch         = N_BATCH;
    params.n_ubatch        = N_BATCH;
    params.n_seq_max       = N_SEQ;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.kv_unified      = !has(argc, argv, "streams");
    params.flash_attn_type = has(argc, argv, "fa") ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (has(argc, argv, "q8_0")) {
        params.type_k = params.type_v = GGML_TYPE_Q8_0;
    }

    struct llama_model * model = argc > 1 ? llama_model_load_from_file(argv[1], llama_model_default_params()) : NULL;

    ctx = model ? llama_init_from_model(model, params) : NULL;
    if (!ctx) {
        printf("no context\n");
        return 0; // upstream refuses this model or this type, too
    }
    mem     = llama_get_memory(ctx);
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    decode("prompt", 0, 300, -1);
    generate("generate", 0, 20);
    decode("second sequence", 1, 200, -1);

    if (mem) {
        llama_memory_seq_cp(mem, 0, 2, -1, -1);
        n_past[2] = llama_memory_seq_pos_max(mem, 2) + 1;
        generate("copy", 2, 4);
        state("state", 1, 3);
        generate("restored", 3, 4);
        if (llama_memory_seq_rm(mem, 0, n_past[0] - 5, -1)) {
            n_past[0] -= 5;
        }
        generate("removed", 0, 4);
        if (llama_memory_can_shift(mem) && llama_memory_seq_rm(mem, 1, 20, 60)) {
            llama_memory_seq_add(mem, 1, 60, -1, -40);
            n_past[1] -= 40;
        }
        generate("shifted", 1, 4);
        llama_memory_seq_rm(mem, 2, -1, -1);
        n_past[2] = llama_memory_seq_pos_max(mem, 2) + 1;
        decode("long", 3, N_BATCH, -1);
        generate("after it", 0, 4);
        llama_memory_clear(mem, true);
        memset(n_past, 0, sizeof(n_past));
        decode("cleared", 0, 40, -1);
        decode("more", 0, 300, -1);

        decode_vectors("vectors", 0, 60);
        generate("after vectors", 0, 3);
        // MiniMax-01 does not set all inputs of its graph for such tokens, so upstream's results depend on what ran before
        char arch[32] = "";
        llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));
        if (strcmp(arch, "minimax-01") != 0) {
            decode_both("both", 2, 3, 90);
            generate("after both", 3, 3);
        }
        llama_set_causal_attn(ctx, false);
        decode("not causal", 0, 200, -1);
        llama_set_causal_attn(ctx, true);
        generate("causal", 0, 3);
        control(0.1f);
        decode("controlled", 1, 100, -1);
        control(0.0f);
        int n_left = 20;
        llama_set_abort_callback(ctx, stops, &n_left);
        decode("stopped", 0, 400, -1);
        llama_set_abort_callback(ctx, NULL, NULL);
        n_past[0] = llama_memory_seq_pos_max(mem, 0) + 1;
        generate("after a stop", 0, 3);
        llama_set_n_threads(ctx, 2, 2);
        decode("two threads", 0, 300, -1);
        generate("two threads", 0, 3);
    }
    llama_free(ctx);
    llama_model_free(model);

    return 0;
}
