#pragma once

#include "server-common.h"

#include <cstdint>
#include <vector>

// Record how the cells of a prompt were computed. Another slot copies only cells that it would have computed in the same way.
struct server_prompt_provenance {
    // number of tokens from the start whose cells were never moved and were all computed with the adapters in `lora`
    // 0 for a prompt that was read from a file
    int32_t n_exact = 0;

    // adapters that the first cells were computed with
    std::vector<common_adapter_lora_info> lora;

    // number of tokens before the last user message, -1 without messages
    int32_t n_last_user = -1;

    // note that the cells from pos on now have other positions than they were computed for
    void moved(int32_t pos);

    // note that the cells from pos on are computed now, with these adapters
    void computed(int32_t pos, const std::vector<common_adapter_lora_info> & lora);
};
