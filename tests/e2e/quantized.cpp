// Cells become quantized while the context lives: what cannot go on with such cells is refused.
//
//   quantized MODEL device   a state on the device would have a part of their rows: there is none. with f16 again there is
//   quantized MODEL decoder  attention without flash attention, whatever the context says (T5), reads no quantized V
//
// Exit code: 0 so it is

#include "llama.h"
#include "llama-kv.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

static llama_context * create(llama_model * model) {
    auto params = llama_context_default_params();
    params.n_ctx           = 512;
    params.n_batch         = 512;
    params.n_ubatch        = 64;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.kv_dynamic      = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;

    return llama_init_from_model(model, params);
}

// the tokens [p0, n) of a sequence
static bool decode(llama_context * ctx, llama_seq_id seq_id, int p0, int n) {
    llama_batch batch = llama_batch_init(512, 0, 1);
    bool res = true;

    for (int p = p0; p < n && res; p += batch.n_tokens) {
        batch.n_tokens = std::min(n - p, 512);
        for (int i = 0; i < batch.n_tokens; ++i) {
            batch.token   [i]    = 5 + (p + i)*37 % 90;
            batch.pos     [i]    = p + i;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = seq_id;
            batch.logits  [i]    = i == batch.n_tokens - 1;
        }
        res = llama_decode(ctx, batch) == 0;
    }
    llama_batch_free(batch);

    return res;
}

static bool is_f16(const llama_context * ctx) {
    ggml_type type_k;
    ggml_type type_v;
    llama_get_memory_type(ctx, &type_k, &type_v);

    return type_k == GGML_TYPE_F16 && type_v == GGML_TYPE_F16;
}

static bool device(llama_model * model) {
    llama_context * ctx = create(model);

    const auto n_saved = [&]() {
        std::vector<uint8_t> data(1 << 20);
        return llama_state_seq_get_data_ext(ctx, data.data(), data.size(), 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
    };

    bool res = decode(ctx, 0, 0, 100) && n_saved() > 0;

    res = res && llama_set_memory_type(ctx, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0) == LLAMA_MEMORY_TYPE_OK && n_saved() == 0;
    res = res && llama_set_memory_type(ctx, GGML_TYPE_F16,  GGML_TYPE_F16)  == LLAMA_MEMORY_TYPE_OK && n_saved() > 0;

    llama_free(ctx);

    return res;
}

static bool decoder(llama_model * model) {
    llama_context * ctx = create(model);

    llama_token token = 5;
    bool res = llama_encode(ctx, llama_batch_get_one(&token, 1)) == 0 && decode(ctx, 0, 0, 10);

    res = res && llama_set_memory_type(ctx, GGML_TYPE_F16,  GGML_TYPE_Q8_0) == LLAMA_MEMORY_TYPE_NEEDS_FA && is_f16(ctx);
    res = res && llama_set_memory_type(ctx, GGML_TYPE_Q8_0, GGML_TYPE_F16)  == LLAMA_MEMORY_TYPE_OK       && decode(ctx, 0, 10, 20);

    llama_free(ctx);

    return res;
}

int main(int, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_backend_load_all();

    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());

    const bool res = strcmp(argv[2], "device") == 0 ? device(model) : decoder(model);

    llama_model_free(model);

    return res ? 0 : 1;
}
