// The storage that caches start with

#include "llama-kv-dynamic-cache.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-log.h"
#include "llama-kv-pages.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

bool llama_kv_dynamic_default() {
    const char * LLAMA_KV_DYNAMIC = getenv("LLAMA_KV_DYNAMIC");

    return LLAMA_KV_DYNAMIC && *LLAMA_KV_DYNAMIC && strcmp(LLAMA_KV_DYNAMIC, "0") != 0;
}

bool llama_kv_dynamic_cache::can_grow() const {
    if (!dyn || !dyn->enabled || owner) {
        return false;
    }

    // this backend keeps a part of each tensor on every device and knows them by the address of the tensor they came from
    if (kv.model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        LLAMA_LOG_WARN("%s: the KV cache cannot grow with --split-mode tensor, it takes its full size\n", __func__);
        return false;
    }

    return true;
}

// one layout for all layers: a single one whose memory does not come in pages, and all of them grow by copy
std::unique_ptr<llama_kv_storage> llama_kv_dynamic_cache::create_inplace() const {
    const char *      LLAMA_KV_DYNAMIC_STORAGE = getenv("LLAMA_KV_DYNAMIC_STORAGE");
    const std::string wanted                   = LLAMA_KV_DYNAMIC_STORAGE ? LLAMA_KV_DYNAMIC_STORAGE : "";

    if (wanted == "copy") {
        return nullptr;
    }
    if (LLAMA_KV_DYNAMIC_STORAGE && wanted != "inplace") {
        LLAMA_LOG_WARN("%s: LLAMA_KV_DYNAMIC_STORAGE=%s is neither copy nor inplace, and is ignored\n", __func__, wanted.c_str());
    }

    bool is_soft = true;

    for (uint32_t il = 0; offload && il < kv.hparams.n_layer_all; ++il) {
        if (kv.hparams.has_kv(il)) {
            ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(kv.model.dev_layer(il));

            if (llama_kv_pages::page_size(buft) == 0) {
                return nullptr;
            }
            is_soft = is_soft && llama_kv_pages::is_soft(buft);
        }
    }

    // on a device only for who asks for it: it has not run on a GPU yet
    // transposed V: a page of a device has an element of each of a million rows, all of it would be there after a few
    if (!is_soft && (wanted != "inplace" || kv.v_trans)) {
        return nullptr;
    }

    return llama_kv_storage::create_inplace(kv.n_stream, n_max_cells, kv.n_pad, kv.v_trans, is_soft, kv.ctxs_bufs);
}

std::vector<llama_kv_storage::layer> llama_kv_dynamic_cache::layers_of(ggml_context * ctx) const {
    std::vector<llama_kv_storage::layer> res;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        for (const auto & l : kv.layers) {
            if (l.k == t) {
                res.push_back({ l.k, l.v, l.k_stream, l.v_stream });
            }
        }
    }

    return res;
}

ggml_backend_buffer_t llama_kv_dynamic_cache::alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const auto layers = layers_of(ctx);

    // a cache that shares has all of its layers from the other context, and no buffer, on every upstream so far. layers of its own
    // would have to grow with those, and change their types with them
    if (owner && owner->is_dynamic()) {
        LLAMA_LOG_ERROR("%s: layers beside those of another context, whose KV cache grows\n", __func__);
        return nullptr;
    }

    // with its first buffer. one that has gone back to a fixed size keeps it
    if (kv.ctxs_bufs.empty() && can_grow()) {
        auto inplace = dyn->any([&](const auto * other) { return other->has_size_like(*this); }) ? nullptr : create_inplace();
        auto copy    = llama_kv_storage::create_copy(kv.n_stream, n_max_cells, kv.n_pad, kv.v_trans, kv.ctxs_bufs);

        if (inplace && inplace->can_grow()) {
            take_storage(std::move(inplace));
            by_copy = std::move(copy);
        } else if (copy->can_grow()) {
            take_storage(std::move(copy));
        }
    }

    ggml_backend_buffer_t res = storage->alloc(ctx, buft, layers);
    if (!res && by_copy) {
        LLAMA_LOG_WARN("%s: no addresses for the full KV cache in place, or no memory for its start\n", __func__);

        // graphs are built over caches of one size
        const auto follows = [&](auto * other) { return !other->by_copy || !has_size_like(*other) || other->restart(); };

        if (restart() && std::all_of(dyn->caches.begin(), dyn->caches.end(), follows)) {
            res = storage->alloc(ctx, buft, layers);
        }
    }

    return res;
}

void llama_kv_dynamic_cache::take_storage(std::unique_ptr<llama_kv_storage> from) {
    storage = std::move(from);

    LLAMA_LOG_INFO("%s: " LLAMA_KV_LOG_START ", max = %u cells, grows %s\n", __func__,
            storage->rows().size(), n_max_cells*kv.n_stream, storage->has_size() ? "by copy" : "in place");
}

bool llama_kv_dynamic_cache::restart() {
    const auto before = std::move(storage); // goes after its buffers

    if (by_copy->can_grow()) {
        take_storage(std::move(by_copy));
    } else {
        storage = llama_kv_storage::create_fixed(kv.n_stream, n_max_cells, kv.v_trans, kv.ctxs_bufs);
        by_copy.reset();
    }

    for (auto & [ctx, buf] : kv.ctxs_bufs) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buf.get());

        for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
            t->buffer = nullptr;
            t->data   = nullptr;
        }
        buf.reset(); // nothing is in it

        buf.reset(storage->alloc(ctx.get(), buft, layers_of(ctx.get())));
        if (!buf) {
            return false;
        }
    }

    return true;
}

bool llama_kv_dynamic_cache::has_size_like(const llama_kv_dynamic_cache & other) const {
    return is_like(other) && is_dynamic() && storage->has_size();
}

bool llama_kv_dynamic_cache::has_gaps() const {
    return by_copy && storage->reads_below();
}

// the scheduler puts the copy in the place of the view, which no node reads then
std::unordered_set<const ggml_tensor *> llama_kv_dynamic_cache::read_elsewhere(ggml_cgraph * gf) const {
    const auto is_view = [this](const ggml_tensor * node) {
        const bool has_kernel = node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE && node->op != GGML_OP_PERMUTE && node->op != GGML_OP_TRANSPOSE;

        return !has_kernel && std::any_of(kv.layers.begin(), kv.layers.end(), [&](const auto & layer) {
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

bool llama_kv_dynamic_cache::reads_gaps_elsewhere(ggml_cgraph * gf) const {
    const auto views = read_elsewhere(gf);

    return std::any_of(views.begin(), views.end(), [&](const ggml_tensor * view) {
        const ggml_tensor * t = view->view_src;

        // attention's have heads there
        const bool is_all = view->op == GGML_OP_VIEW && view->ne[1] == t->ne[1]*t->ne[2];

        return kv.n_stream > 1 || is_all;
    });
}

//
// llama_kv_dynamic
//

void llama_kv_dynamic::begin() {
    if (!any([](const auto * cache) { return cache->has_gaps(); })) {
        return;
    }

    ggml_cgraph * gf = build_graph(true);

    if (!any([&](const auto * cache) { return cache->has_gaps() && cache->reads_gaps_elsewhere(gf); })) {
        return;
    }

    LLAMA_LOG_WARN("%s: attention does not run where the cells are\n", __func__);

    // all of them: those that mirror each other have one size
    for (auto * cache : caches) {
        if (cache->has_gaps() && !cache->restart()) {
            throw std::runtime_error("failed to allocate buffer for kv cache");
        }
    }

    set_moved(false);
    reset_sched();
}
