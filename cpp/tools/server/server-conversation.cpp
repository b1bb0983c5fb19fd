#include "server-conversation.h"

#include <algorithm>

size_t server_n_bytes_checkpoints(const server_prompt & prompt) {
    size_t res = 0;
    for (const auto & ckpt : prompt.checkpoints) {
        res += ckpt.size();
    }
    return res;
}

std::vector<const common_prompt_checkpoint *> server_checkpoints_to_keep(const server_prompt & prompt) {
    std::vector<const common_prompt_checkpoint *> res;

    // With n_last_user < 0, the prompt has no user message. Then keep the second newest checkpoint, which is the last one of an
    // earlier request.
    const int32_t n_last_user = prompt.provenance.n_last_user;

    for (auto it = prompt.checkpoints.rbegin(); it != prompt.checkpoints.rend() && res.size() < 2; ++it) {
        if (res.empty() || n_last_user < 0 || it->n_tokens <= n_last_user) {
            res.push_back(&*it);
        }
    }

    return res;
}

size_t server_conversation::size() const {
    return data.size() + server_n_bytes_checkpoints(prompt);
}

bool server_has_all(const server_contexts & ctxs, const server_prompt & has, llama_pos pos_min, const server_prompt & prompt) {
    if (!server_has_same_lora(prompt.provenance.lora, has.provenance.lora) ||
            prompt.tokens.get_common_prefix(has.tokens) < prompt.tokens.size()) {
        return false;
    }
    if (has.n_tokens() == prompt.n_tokens()) {
        return true;
    }

    const std::vector<common_adapter_lora_info> no_lora; // empty, because the adapters were compared above

    return server_conversation_query { prompt.tokens, ctxs, no_lora }.n_usable(has, pos_min) >= prompt.n_tokens();
}

bool server_has_same_lora(const std::vector<common_adapter_lora_info> & a, const std::vector<common_adapter_lora_info> & b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto & x, const auto & y) {
        return x.path == y.path && x.scale == y.scale;
    });
}

// The conditions must be the same as in update_slots().
int32_t server_conversation_query::n_usable(const server_prompt & has, llama_pos pos_min, int32_t n_max) const {
    const int32_t n = std::min<int32_t>(has.tokens.get_common_prefix(tokens), n_max);
    if (n <= 0) {
        return 0;
    }

    const llama_pos pos_next = has.tokens.pos_next(n);
    const llama_pos thold    = std::max(0, pos_next - ctxs.n_swa - (n < (int32_t) tokens.size() ? 0 : 1));
    if (pos_min < thold) {
        return n;
    }

    const auto & ckpts = has.checkpoints;
    const auto   ckpt  = std::find_if(ckpts.rbegin(), ckpts.rend(), [&](const auto & cur) {
        return cur.pos_max <= pos_next && (cur.pos_min < thold || cur.pos_min == 0);
    });
    if (ckpt == ckpts.rend()) {
        return 0;
    }

    const llama_pos pos = std::min(pos_next, std::max(ckpt->pos_min + 1, ckpt->pos_max));

    return std::min<int64_t>({ n, (int64_t) has.tokens.size_up_to_pos(pos), ckpt->n_tokens });
}

int32_t server_conversation_query::n_usable(const server_conversation & has) const {
    if (lora.empty()) {
        return n_usable(has.prompt, has.pos_min);
    }

    const auto & provenance = has.prompt.provenance;

    return server_has_same_lora(provenance.lora, lora) ? n_usable(has.prompt, has.pos_min, provenance.n_exact) : 0;
}
