// A program that is compiled with upstream's llama.h, like bindings: it loads this libllama instead of upstream's
//
// upstream MODEL   prints how many bytes of the context's parameters differ from upstream's, and the result of llama_decode()

#include "llama.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct guarded {
    struct llama_context_params params;
    uint8_t                     after[64];
};

int main(int argc, char ** argv) {
    struct guarded all;

    memset(&all, 0xAB, sizeof(all));
    all.params = llama_context_default_params();

    int n_written = 0;
    for (size_t i = 0; i < sizeof(all.after); ++i) {
        n_written += all.after[i] != 0xAB;
    }

    all.params.n_ctx     = 1024;
    all.params.n_threads = 1;

    struct llama_model   * model = argc > 1 ? llama_model_load_from_file(argv[1], llama_model_default_params()) : NULL;
    struct llama_context * ctx   = model ? llama_init_from_model(model, all.params) : NULL;
    if (!ctx) {
        return 1;
    }

    llama_token tokens[300];
    for (int i = 0; i < 300; ++i) {
        tokens[i] = i % 100;
    }

    const int32_t res = llama_decode(ctx, llama_batch_get_one(tokens, 300));

    printf("%d %d\n", n_written, res);

    llama_free(ctx);
    llama_model_free(model);
}
