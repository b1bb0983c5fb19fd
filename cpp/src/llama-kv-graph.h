#pragma once

// Graphs over the cells of a KV cache, as the scheduler has split them over the backends

#include "llama-kv-storage.h"

#include "ggml.h"

#include <unordered_set>
#include <vector>

// return the views of the cells of these layers that the graph reads as a copy on another device. the scheduler replaces such a view
// by the copy, so no node reads the view itself
// throws std::bad_alloc
std::unordered_set<const ggml_tensor *> llama_kv_views_read_elsewhere(ggml_cgraph * gf, const std::vector<llama_kv_storage::layer> & layers);
