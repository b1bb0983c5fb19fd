#pragma once

// Rows of one llama_kv_cache that a saved state is written from or read into (--kv-dynamic)

#include "llama-kv-cache.h"

#include <cstdint>
#include <optional>
#include <vector>

class llama_io_read_i;
class llama_kv_dynamic_cache;

// the number of rows of a stream, if a state can be read into the cells of a slot, or if these cells can be cleared
// The number is 0 if some of these cells have no rows. A cell without a row contains no data.
// llama_kv_cache calls size() of this object at places where upstream calls size() of the cells.
struct llama_kv_dynamic_room {
    uint32_t n_rows;

    uint32_t size() const {
        return n_rows;
    }
};

class llama_kv_state_rows {
public:
    explicit llama_kv_state_rows(llama_kv_dynamic_cache & cache) : cache(cache) {}

    // prepare to write a state of a sequence: first make its pending copies. -1: of all sequences
    // throws std::runtime_error if there is no memory for a copy, or if a state with these flags is not supported
    void begin_write(llama_seq_id seq_id, llama_state_seq_flags flags);

    // remember the sequence and the flags of the state that is read next
    void begin_read(llama_seq_id seq_id, llama_state_seq_flags flags);

    // allocate rows for the cells of a state. The result is 0 if there is no memory
    llama_kv_dynamic_room reserve(llama_io_read_i & io, const llama_kv_cache::slot_info & sinfo);

    // return the number of rows if all cells of the slot have rows. Otherwise return 0. Nothing is allocated
    llama_kv_dynamic_room room(const llama_kv_cache::slot_info & sinfo) const;

    // grow to the rows that were requested for a state
    // returns false if there is no memory. the state is removed from all caches then
    bool grow(llama_io_read_i & io);

    // return the sequence that the state is read for. -1: all sequences. none: no state was read
    std::optional<llama_seq_id> seq_id() const { return seq_id_read; }

    // check whether the state is in device memory
    bool is_on_device() const { return on_device; }

private:
    // remove the cells of the sequence whose state is being read, in all caches of the context: some caches may have read their
    // part of the state already
    void drop();

    llama_kv_dynamic_cache & cache;

    bool on_device = false;

    std::optional<llama_seq_id> seq_id_read;
};
