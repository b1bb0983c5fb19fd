#pragma once

// Functions for graphs that read the cells of a KV cache, after the scheduler has split them over the backends

#include "llama-kv-storage.h"

#include "ggml.h"

#include <unordered_set>
#include <vector>

// return the views of the cells of these layers that the graph reads only through a copy of the view on another device
// The scheduler replaces such a view by the copy in the sources of the nodes. So these are the views that no node has as a
// source.
// throws std::bad_alloc
std::unordered_set<const ggml_tensor *> llama_kv_views_read_elsewhere(ggml_cgraph * gf, const std::vector<llama_kv_storage::layer> & layers);
