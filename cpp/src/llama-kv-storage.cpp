#include "llama-kv-storage.h"

#include "llama-kv-layout.h"

#include <algorithm>

llama_kv_storage::llama_kv_storage(uint32_t n_stream, const llama_kv_growth & growth) :
    growth(growth), cur(n_stream, growth.n_max, std::min(growth.block(), growth.n_max)), start(cur) {
    start.add(0, growth.start());
}

bool llama_kv_storage::is_wider(const layer & l, ggml_type type_k, ggml_type type_v) {
    return ggml_row_size(type_k, l.k->ne[0]) > l.k->nb[1] || (l.v && ggml_row_size(type_v, l.v->ne[0]) > l.v->nb[1]);
}

void llama_kv_storage::set_views(const std::vector<ggml_tensor *> & views, ggml_tensor * t) {
    for (size_t s = 0; s < views.size(); ++s) {
        llama_kv_set_stream_view(views[s], t, s);
    }
}
