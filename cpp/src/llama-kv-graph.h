#pragma once

// Graphs over the cells of a KV cache, as the scheduler has split them over the backends

#include "llama-kv-storage.h"

#include "ggml.h"

#include <unordered_set>
#include <vector>

// return the views of the cells of these layers of which the graph reads a copy on another device: the scheduler puts the copy in
// the place of the view, which no node reads then
// throws std::bad_alloc
std::unordered_set<const ggml_tensor *> llama_kv_views_read_elsewhere(ggml_cgraph * gf, const std::vector<llama_kv_storage::layer> & layers);
