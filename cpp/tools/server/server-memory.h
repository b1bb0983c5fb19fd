#pragma once

#include "common.h"
#include "llama-kv.h"

#include <cstddef>
#include <cstdint>
#include <string>

// Functions that find out why a batch or a state did not fit into a context. They use llama_get_memory_usage().

// return value of process_mtmd_chunk() if there are no cells for the media chunk
constexpr int32_t SERVER_CHUNK_NO_CELLS = -2;

// return true if the context lacks memory for n_cells more cells. return false if it lacks cells, because all cells are in use
// Call this after a failed decode. No other code decides between these two causes. ctx may be null
bool server_memory_is_short(const llama_context * ctx, size_t n_cells = 1);

// return true if a state was not restored because the context lacked memory. return false if it lacked cells, or if the state is
// invalid
// before: usage of the context before the state was read
bool server_memory_is_short_for_state(const llama_context * ctx, const llama_memory_usage & before);

// return true if the cells of the model are in the memory of the host. This includes devices that use the memory of
// the host as their own, such as integrated GPUs and Apple's GPUs
bool server_memory_is_host(const common_params & params);

// return true if the context has fewer than n_cells free cells
bool server_memory_is_full(const llama_context * ctx, size_t n_cells);

// return true if the context has no cells in use, and already has memory for n_cells
// If an attempt to use n_cells has failed in such a context, it will also fail later, so the caller need not wait. The number of
// free cells alone would not show this. The caches of a context can have different sizes (with a sliding window).
bool server_memory_is_free(const llama_context * ctx, size_t n_cells);

// return true if a sequence of n tokens has lost its cells, because a device failed during a change of types. ctx may be null
bool server_memory_is_lost(const llama_context * ctx, llama_seq_id id, int32_t n);

// return the error message for a client. It says whether memory or cells are missing
std::string server_memory_error(const llama_context * ctx, size_t n_cells = 1);
