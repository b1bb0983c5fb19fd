#include "server-slot.h"

#include "llama-kv.h"

#include <algorithm>

bool server_slot_view::is_running() const {
    return state == SLOT_STATE_PROCESSING_PROMPT || state == SLOT_STATE_DONE_PROMPT || state == SLOT_STATE_GENERATING;
}

int32_t server_slot_view::n_computed() const {
    const llama_pos n_pos = llama_memory_seq_pos_max(llama_get_memory(ctx_tgt), id) + 1;

    // with M-RoPE, an image has more cells than positions. So compute the number of tokens from the position
    return n_pos > 0 && prompt.tokens.has_media() ? prompt.tokens.size_up_to_pos(n_pos) : std::min<int32_t>(prompt.tokens.size(), n_pos);
}

bool server_slot_view::has_shared_cells() const {
    return server_n_shared_cells(ctx_tgt, id) > 0 || server_n_shared_cells(ctx_dft, id) > 0;
}

uint32_t server_n_shared_cells(const llama_context * ctx, llama_seq_id id) {
    if (!ctx) {
        return 0;
    }

    const auto usage = llama_memory_seq_usage(ctx, id);

    return std::max(usage.cells.n_shared, usage.window.n_shared);
}
