#pragma once

#include "llama-kv.h"

#include <cstddef>
#include <cstdint>
#include <string>

// Find out why a batch or a state found no place in a context, from llama_get_memory_usage().

// return value of process_mtmd_chunk() if there are no cells for the chunk that it decodes
constexpr int32_t SERVER_CHUNK_NO_CELLS = -2;

// return true if the context lacks memory for n_cells more, false if it lacks cells: all of them are in use
// only this function decides that. call it after a failed decode. ctx may be null
bool server_memory_is_short(const llama_context * ctx, size_t n_cells = 1);

// return true if a state was not restored because the context lacked memory, false if it lacked cells or the state is invalid
// before: usage before the state was read
bool server_memory_is_short_for_state(const llama_context * ctx, const llama_memory_usage & before);

// return true if the context has fewer than n_cells free cells
bool server_memory_is_full(const llama_context * ctx, size_t n_cells);

// return true if the context is empty and has memory for n_cells: what failed now will also fail later
// note: free cells do not show that, because a context can have caches of several sizes (windows)
bool server_memory_is_free(const llama_context * ctx, size_t n_cells);

// return true if a sequence has lost the cells of its n tokens: a device failed during a change of types. ctx may be null
bool server_memory_is_lost(const llama_context * ctx, llama_seq_id id, int32_t n);

// return the message for a client: whether memory or cells are missing
std::string server_memory_error(const llama_context * ctx, size_t n_cells = 1);
