#include "random-heap.h"

#include <algorithm>

static constexpr size_t N_BLOCK   = 64;   // number of blocks of each kind
static constexpr size_t SIZE_STEP = 16;   // alignment of malloc()
static constexpr size_t PAGE_STEP = 4096;

random_heap::random_heap(const llama_api & api, std::mt19937 & rng) : api(api) {
    // small blocks of up to 4 KiB are on the heap. Large blocks of 64 KiB to 320 KiB are mapped, see llama_api_map_large_buffers()
    for (size_t i = 0; i < N_BLOCK; ++i) {
        blocks.push_back(api.malloc(SIZE_STEP*(1 + rng()%256)));
        blocks.push_back(api.malloc(PAGE_STEP*(16 + rng()%64)));
    }

    // free some blocks, so that there are holes for small blocks
    std::shuffle(blocks.begin(), blocks.end(), rng);
    for (size_t i = 0; i < N_BLOCK; ++i) {
        api.free(blocks.back());
        blocks.pop_back();
    }
}

random_heap::~random_heap() {
    for (void * block : blocks) {
        api.free(block);
    }
}
