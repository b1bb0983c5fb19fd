#include "server-memory.h"

#include "server-common.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>

bool server_memory_is_short(const llama_context * ctx, size_t n_cells) {
    if (!ctx) {
        return false;
    }

    const auto usage = llama_get_memory_usage(ctx);

    return usage.n_cells < usage.n_cells_max && usage.n_cells_max - usage.n_cells_used >= n_cells;
}

bool server_memory_is_short_for_state(const llama_context * ctx, const llama_memory_usage & before) {
    return llama_get_memory_usage(ctx).n_no_memory > before.n_no_memory;
}

// note: llama_supports_gpu_offload() is true for every build with the RPC backend, also without an RPC server
bool server_memory_is_host(const common_params & params) {
    if (params.no_kv_offload || params.n_gpu_layers == 0) {
        return true;
    }

    auto devices = params.devices; // a null ends the list
    for (size_t i = 0; params.devices.empty() && i < ggml_backend_dev_count(); ++i) {
        devices.push_back(ggml_backend_dev_get(i));
    }

    return std::none_of(devices.begin(), devices.end(), [](ggml_backend_dev_t dev) {
        return dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU &&
            strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "MTL") != 0;
    });
}

bool server_memory_is_full(const llama_context * ctx, size_t n_cells) {
    const auto usage = llama_get_memory_usage(ctx);

    return usage.n_cells_max - usage.n_cells_used < n_cells;
}

bool server_memory_is_free(const llama_context * ctx, size_t n_cells) {
    const auto usage = llama_get_memory_usage(ctx);

    return usage.n_cells_used == 0 && usage.n_cells >= std::min<size_t>(n_cells, usage.n_cells_max);
}

bool server_memory_is_lost(const llama_context * ctx, llama_seq_id id, int32_t n) {
    auto * mem = ctx ? llama_get_memory(ctx) : nullptr;

    return mem && n > 0 && llama_memory_seq_pos_max(mem, id) < 0;
}

std::string server_memory_error(const llama_context * ctx, size_t n_cells) {
    const auto usage = llama_get_memory_usage(ctx);

    if (!server_memory_is_short(ctx, n_cells)) {
        return string_format("the KV cache of %u cells has no place left, try again when other requests are done", usage.n_cells_max);
    }

    return string_format("not enough memory for the KV cache to grow beyond %u of %u cells, try again when there is more",
            usage.n_cells, usage.n_cells_max);
}
