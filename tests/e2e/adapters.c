// Check adapters, which enlarge graphs. llama.cpp enlarges its reserve with the next batch, but other operations build
// graphs earlier
//
// adapters MODEL ADAPTER WHAT   perform the operation WHAT before a batch: a change of types, a state of other types, or
//                               the return of a budget to larger types. print its result, and that of the next
//                               llama_decode()

#include "llama-kv.h"
#include "llama.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_ADAPTERS = 16 };

static struct llama_context * new_context(struct llama_model * model, enum ggml_type type, bool kv_dynamic) {
    struct llama_context_params params = llama_context_default_params();

    params.n_ctx           = 4096;
    params.n_batch         = 128;
    params.n_ubatch        = 128;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.type_k          = type;
    params.type_v          = type;
    params.kv_dynamic      = kv_dynamic;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;

    return llama_init_from_model(model, params);
}

static int32_t decode(struct llama_context * ctx, int n) {
    llama_token tokens[128];
    for (int i = 0; i < n; ++i) {
        tokens[i] = 3 + i % 100;
    }
    return llama_decode(ctx, llama_batch_get_one(tokens, n));
}

static void set_adapters(struct llama_context * ctx, struct llama_model * model, const char * path) {
    struct llama_adapter_lora * adapters[N_ADAPTERS];
    float                       scales[N_ADAPTERS];
    for (int i = 0; i < N_ADAPTERS; ++i) {
        adapters[i] = llama_adapter_lora_init(model, path);
        scales[i]   = 1.0f;
    }
    llama_set_adapters_lora(ctx, adapters, N_ADAPTERS, scales);
}

static int32_t decode_many(struct llama_context * ctx, int n_batches) {
    int32_t res = 0;
    for (int i = 0; i < n_batches && res == 0; ++i) {
        res = decode(ctx, 100);
    }
    return res;
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        return 2;
    }
    const bool has_budget = strcmp(argv[3], "budget") == 0;
    const bool has_state  = strcmp(argv[3], "state")  == 0;

    struct llama_model   * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_context * ctx   = new_context(model, GGML_TYPE_F16, true);

    const enum ggml_type         types[] = { GGML_TYPE_F16, GGML_TYPE_Q8_0 };
    struct llama_memory_budget * budget  = llama_memory_budget_init(5000 << 10, types, 2);

    int res = 1;

    if (has_budget) {
        llama_memory_budget_add(budget, ctx);
    }
    decode_many(ctx, has_budget ? 30 : 1);

    if (has_state) {
        // a static cache reads the state in its own types
        const size_t size = llama_state_seq_get_size(ctx, 0);
        uint8_t *    data = malloc(size);
        llama_state_seq_get_data(ctx, data, size, 0);
        llama_free(ctx);

        ctx = new_context(model, GGML_TYPE_Q8_0, false);
        set_adapters(ctx, model, argv[2]);
        res = llama_state_seq_set_data(ctx, data, size, 0) == size ? 0 : 1;
        free(data);
    } else {
        set_adapters(ctx, model, argv[2]);
        if (has_budget) {
            llama_memory_clear(llama_get_memory(ctx), true);
            res = llama_memory_budget_get_usage(budget).n_down == 1 && llama_memory_budget_get_usage(budget).n_up == 1 ? 0 : 1;
        } else {
            res = llama_set_memory_type(ctx, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0);
        }
    }
    printf("%d %d\n", res, decode(ctx, 100));

    llama_free(ctx);
    llama_memory_budget_free(budget);
    llama_model_free(model);
}
