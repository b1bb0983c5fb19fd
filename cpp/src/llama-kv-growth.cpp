#include "llama-kv-growth.h"

#include <algorithm>

static uint64_t llama_kv_growth_pad(uint64_t n, uint64_t pad) {
    return (n + pad - 1)/pad*pad;
}

// a block by copy has 256 cells, because the attention window is padded to 256 cells (llama_kv_cache::get_n_kv) and must be
// inside the tensors
uint32_t llama_kv_growth::block() const {
    return (in_place && !has_windows ? LLAMA_KV_GROWTH_BLOCK_IN_PLACE : LLAMA_KV_GROWTH_START)*std::max(n_pad, 1u);
}

uint32_t llama_kv_growth::start() const {
    return smallest(LLAMA_KV_GROWTH_START*std::max(n_pad, 1u));
}

uint32_t llama_kv_growth::usable(uint32_t n_cur) const {
    return in_place || n_cur >= n_max ? n_cur : n_cur - std::min(n_cur, block());
}

uint32_t llama_kv_growth::smallest(uint32_t n_need) const {
    const uint64_t n_spare = in_place ? 0 : block();

    return (uint32_t) std::min<uint64_t>(n_max, llama_kv_growth_pad(n_need, block()) + n_spare);
}

uint32_t llama_kv_growth::next(uint32_t n_cur, uint32_t n_need) const {
    if (n_need <= usable(n_cur)) {
        return n_cur;
    }

    const size_t size_cell = std::max<size_t>(n_bytes_cell, 1);

    const uint64_t n_step = in_place ?
        std::min<uint64_t>(n_cur/8, LLAMA_KV_GROWTH_STEP_BYTES_IN_PLACE/size_cell) :
        std::max<uint64_t>(n_cur/8, std::min<uint64_t>(n_cur, n_bytes_step/size_cell));

    // grow by at least one block: add at least one cell, and round the new size up to whole blocks
    uint64_t n_grown = llama_kv_growth_pad(n_cur + std::max<uint64_t>(n_step, 1), block());

    // use an odd number of blocks. Add a block if the step allows that. Otherwise remove one, unless the result would not be a
    // growth
    if (!in_place && n_grown/block() % 2 == 0) {
        if (uint64_t(n_cur) + block() <= n_bytes_step/size_cell) {
            n_grown += block();
        } else if (n_grown - block() > n_cur) {
            n_grown -= block();
        }
    }

    return std::max(smallest(n_need), (uint32_t) std::min<uint64_t>(n_max, n_grown));
}

uint32_t llama_kv_growth::shrink(uint32_t n_cur, uint32_t n_keep, uint32_t n_peak) const {
    if (in_place) {
        const uint32_t n_next = std::max(start(), smallest(n_keep));
        const uint32_t n_free = std::max(2*LLAMA_KV_GROWTH_START, n_cur/4);

        return n_next <= n_cur && n_cur - n_next >= n_free ? n_next : n_cur;
    }

    const uint32_t n_next = std::max(start(), smallest(n_keep + n_keep/4));

    return n_keep <= n_peak/2 && (n_next <= n_cur/2 || (n_keep == 0 && n_next < n_cur)) ? n_next : n_cur;
}
