#include "llama-kv-storage.h"

#include "ggml-alloc.h"

#include <algorithm>

llama_kv_storage::llama_kv_storage(uint32_t n_stream, const llama_kv_growth & growth) :
    growth(growth), cur(n_stream, growth.n_max, std::min(growth.block(), growth.n_max)), start(cur) {
    start.add(0, growth.start());
}

ggml_backend_buffer_t llama_kv_storage::alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers) {
    (void) layers;

    return ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
}

namespace {

struct storage_fixed : llama_kv_storage {
    storage_fixed(uint32_t n_stream, uint32_t n_rows) : llama_kv_storage(n_stream, { n_rows, 1, 0 }) {
        cur.add(0, n_rows);
    }
};

} // namespace

std::unique_ptr<llama_kv_storage> llama_kv_storage::create_fixed(uint32_t n_stream, uint32_t n_rows) {
    return std::make_unique<storage_fixed>(n_stream, n_rows);
}
