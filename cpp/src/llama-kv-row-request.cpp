#include "llama-kv-row-request.h"

#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"

#include <new>

void llama_kv_row_request::add(uint32_t s, uint32_t i0, uint32_t i1) {
    const llama_kv_storage & storage = cache.storage();

    const uint32_t n_block = storage.rows().n_block();

    try {
        for (uint32_t i = i0; i < i1; i = (i/n_block + 1)*n_block) {
            if (!storage.has(s, i)) {
                if (!missing) {
                    missing = storage.rows().none();
                }
                missing->add(s, i, i + 1);
            }
        }
    } catch (const std::bad_alloc &) {
        cache.dyn->fail_request(); // upstream's prepare(), which calls this function, cannot report an error here
    }
}

void llama_kv_row_request::add(uint32_t i0, uint32_t i1) {
    for (uint32_t s = 0; cache.is_dynamic() && s < cache.storage().rows().n_stream(); ++s) {
        add(s, i0, i1);
    }
}

void llama_kv_row_request::add(const llama_kv_row_request & other) {
    for (uint32_t s = 0; other.missing && s < other.missing->n_stream(); ++s) {
        other.missing->each_run(s, [&](uint32_t i0, uint32_t i1) { add(s, i0, i1); });
    }
}

bool llama_kv_row_request::is_pending() const {
    return missing || (cache.dyn && cache.dyn->has_failed_request());
}
