// Check cells that become quantized during the life of a context: operations that do not support such cells are
// refused.
//
//   quantized MODEL device   a state on the device is refused, because it would be incomplete. it works again with f16
//   quantized MODEL decoder  a quantized V is refused if attention does not use flash attention, although the context
//                            reports it (T5)
//
// Exit code: 0 if the check passes

#include "dynamic.h"

#include <cstdint>
#include <cstring>
#include <vector>

// decode some more tokens
static bool decode(llama_context * ctx) {
    std::vector<llama_token> tokens(10, 5);

    return llama_decode(ctx, llama_batch_get_one(tokens.data(), tokens.size())) == 0;
}

static bool is_f16(const llama_context * ctx) {
    ggml_type type_k;
    ggml_type type_v;
    llama_get_memory_type(ctx, &type_k, &type_v);

    return type_k == GGML_TYPE_F16 && type_v == GGML_TYPE_F16;
}

static bool device(llama_model * model) {
    llama_context * ctx = llama_init_from_model(model, dynamic_params(512));

    const auto n_saved = [&]() {
        std::vector<uint8_t> data(1 << 20);
        return llama_state_seq_get_data_ext(ctx, data.data(), data.size(), 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
    };

    bool res = decode(ctx) && n_saved() > 0;

    res = res && llama_set_memory_type(ctx, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0) == LLAMA_MEMORY_TYPE_OK && n_saved() == 0;
    res = res && llama_set_memory_type(ctx, GGML_TYPE_F16,  GGML_TYPE_F16)  == LLAMA_MEMORY_TYPE_OK && n_saved() > 0;

    llama_free(ctx);

    return res;
}

static bool decoder(llama_model * model) {
    llama_context * ctx = llama_init_from_model(model, dynamic_params(512));

    llama_token token = 5;
    bool res = llama_encode(ctx, llama_batch_get_one(&token, 1)) == 0 && decode(ctx);

    res = res && llama_set_memory_type(ctx, GGML_TYPE_F16,  GGML_TYPE_Q8_0) == LLAMA_MEMORY_TYPE_NEEDS_FA && is_f16(ctx);
    res = res && llama_set_memory_type(ctx, GGML_TYPE_Q8_0, GGML_TYPE_F16)  == LLAMA_MEMORY_TYPE_OK       && decode(ctx);

    llama_free(ctx);

    return res;
}

int main(int, char ** argv) {
    llama_model * model = load_model(argv[1]);

    const bool res = strcmp(argv[2], "device") == 0 ? device(model) : decoder(model);

    llama_model_free(model);

    return res ? 0 : 1;
}
