#include "llama-kv-graph.h"

#include <algorithm>

std::unordered_set<const ggml_tensor *> llama_kv_views_read_elsewhere(ggml_cgraph * gf, const std::vector<llama_kv_storage::layer> & layers) {
    const auto is_view = [&](const ggml_tensor * node) {
        const bool has_kernel = node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE && node->op != GGML_OP_PERMUTE && node->op != GGML_OP_TRANSPOSE;

        return !has_kernel && std::any_of(layers.begin(), layers.end(), [&](const auto & layer) {
            return node->view_src && (node->view_src == layer.k || node->view_src == layer.v);
        });
    };

    std::unordered_set<const ggml_tensor *> views;

    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);

        if (is_view(node)) {
            views.insert(node);
        }
        for (const ggml_tensor * src : node->src) {
            views.erase(src);
        }
    }

    return views;
}
