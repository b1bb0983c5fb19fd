#pragma once

#include "server-common.h"

#include <cstdint>
#include <vector>

// Records how the cells of a prompt were computed. Another slot copies only those cells that it would have computed in the same
// way.
struct server_prompt_provenance {
    // number of tokens from the start of the prompt whose cells were never moved and were computed with the adapters in `lora`
    // The number is 0 for a prompt that was read from a file.
    int32_t n_exact = 0;

    // LoRA adapters with which the first n_exact cells were computed
    std::vector<common_adapter_lora_info> lora;

    // number of tokens before the last user message. -1 means: the prompt has no messages
    int32_t n_last_user = -1;

    // note that the cells from position pos on were moved, so their positions differ from those that they were computed for
    void moved(int32_t pos);

    // note that the cells from position pos on are computed now, with these adapters
    void computed(int32_t pos, const std::vector<common_adapter_lora_info> & lora);
};
