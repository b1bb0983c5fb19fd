#include "server-provenance.h"

#include <algorithm>

void server_prompt_provenance::moved(int32_t pos) {
    n_exact = std::min(n_exact, pos);
}

void server_prompt_provenance::computed(int32_t pos, const std::vector<common_adapter_lora_info> & lora) {
    if (pos == 0) {
        this->lora = lora;
    }
    if (!are_lora_equal(lora, this->lora)) {
        n_exact = std::min(n_exact, pos);
    } else if (pos <= n_exact || pos == 0) {
        n_exact = INT32_MAX;
    }
}
