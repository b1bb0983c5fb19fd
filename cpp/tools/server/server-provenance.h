#pragma once

// How the cells of a prompt have come to be: another slot takes only what it would have computed itself

#include "server-common.h"

#include <algorithm>
#include <cstdint>
#include <vector>

struct server_prompt_provenance {
    // tokens from the start whose cells nobody has moved, all computed with the same adapters. none of a prompt that came from a file
    int32_t n_exact = 0;

    // what the first of them were computed with
    std::vector<common_adapter_lora_info> lora;

    // the cells from pos on have taken other positions than they were computed for
    void moved(int32_t pos) {
        n_exact = std::min(n_exact, pos);
    }

    // the cells from pos on are computed now, with these adapters
    void computed(int32_t pos, const std::vector<common_adapter_lora_info> & lora) {
        if (pos == 0) {
            this->lora = lora;
        }
        if (!are_lora_equal(lora, this->lora)) {
            n_exact = std::min(n_exact, pos);
        } else if (pos <= n_exact || pos == 0) {
            n_exact = INT32_MAX;
        }
    }
};
