#include "server-saved-prompts.h"

#include "server-memory.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

server_saved_prompts::server_saved_prompts(
        const common_params & params, const server_contexts & ctxs, std::unique_ptr<server_prompt_cache> & cache)
    : params(params), ctxs(ctxs), cache(cache) {}

void server_saved_prompts::save(server_slot_view & slot) {
    if (can_save() && slot.prompt_save(*cache)) {
        cache->update();
    }
}

bool server_saved_prompts::drop_if_short(int32_t n) {
    is_ram_short = params.kv_budget_mib == 0 && is_cache_in_ram() && server_memory_is_short(ctxs.ctx_tgt, n);

    if (!cache || cache->states.empty() || !is_ram_short) {
        return false;
    }

    SRV_WRN("no memory, dropping the prompt cache, %zu prompts\n", cache->states.size());
    cache->states.clear();

    return true;
}

bool server_saved_prompts::drop_unused() {
    if (!cache || cache->states.empty()) {
        return false;
    }

    SRV_INF("idle, dropping the prompt cache, %zu prompts\n", cache->states.size());
    cache->states.clear();
#ifdef __GLIBC__
    malloc_trim(0); // malloc keeps freed blocks of some MiB
#endif

    return true;
}

bool server_saved_prompts::reserve(size_t n_bytes) {
    if (cache->limit_size > 0 && cache->n_bytes_paused() + n_bytes > cache->limit_size) {
        return false;
    }
    while (cache->limit_size > 0 && !cache->states.empty() && cache->size() + n_bytes > cache->limit_size) {
        cache->states.pop_front();
    }

    return true;
}

// note: llama_supports_gpu_offload() is true for every build with the RPC backend, also without an RPC server
bool server_saved_prompts::is_cache_in_ram() const {
    return params.no_kv_offload || params.n_gpu_layers == 0 ||
        (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) && !ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_IGPU));
}
