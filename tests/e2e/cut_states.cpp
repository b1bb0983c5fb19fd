// Check that a truncated state leaves nothing in any of the caches of a context.
//
//   cut_states MODEL
//
// Exit code: 0 if the check passes

#include "dynamic.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

static llama_context * create(llama_model * model) {
    auto params = dynamic_params(4096);
    params.n_batch   = 512;
    params.n_ubatch  = 64;
    params.n_seq_max = 1;

    return llama_init_from_model(model, params);
}

// return the logits of the last of the tokens [0, n)
static std::vector<float> decode(llama_context * ctx, int n) {
    std::vector<llama_token> tokens;
    for (int i = 0; i < n; ++i) {
        tokens.push_back(5 + i*37 % 90);
    }
    for (int i = 0; i < n; i += 500) {
        if (llama_decode(ctx, llama_batch_get_one(tokens.data() + i, std::min(500, n - i))) != 0) {
            exit(2);
        }
    }
    const float * logits = llama_get_logits_ith(ctx, -1);

    return { logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))) };
}

int main(int, char ** argv) {
    llama_model   * model = load_model(argv[1]);
    llama_context * from  = create(model);

    decode(from, 1500);

    std::vector<uint8_t> whole(llama_state_get_size(from));
    llama_state_get_data(from, whole.data(), whole.size());

    std::vector<uint8_t> seq(llama_state_seq_get_size(from, 0));
    llama_state_seq_get_data(from, seq.data(), seq.size(), 0);

    llama_free(from);

    llama_context * fresh    = create(model);
    const auto      expected = decode(fresh, 700);
    llama_free(fresh);

    // in the cells, among the rows, and before the last row
    for (const bool is_whole : { true, false }) {
        const auto & state = is_whole ? whole : seq;

        for (const size_t size : { (size_t) 8192, state.size()/3, state.size()/2, state.size() - 1000 }) {
            llama_context * ctx = create(model);

            const size_t n_read = is_whole ? llama_state_set_data(ctx, state.data(), size) : llama_state_seq_set_data(ctx, state.data(), size, 0);

            // the remaining state can be saved, and a conversation can start again
            std::vector<uint8_t> left(llama_state_get_size(ctx));
            const bool is_saved = llama_state_get_data(ctx, left.data(), left.size()) == left.size();

            if (n_read != 0 || !is_saved || llama_memory_seq_pos_max(llama_get_memory(ctx), 0) != -1 || decode(ctx, 700) != expected) {
                fprintf(stderr, "%s of %zu bytes, cut at %zu\n", is_whole ? "all" : "a sequence", state.size(), size);
                return 1;
            }
            llama_free(ctx);
        }
    }
    llama_model_free(model);
}
