#pragma once

// Rows of one llama_kv_cache for saved states (--kv-dynamic): rows that a state is written from or read into

#include "llama-kv-cache.h"

#include <cstdint>
#include <optional>
#include <vector>

class llama_io_read_i;
class llama_kv_dynamic_cache;

// the cells that a state can be read into, or cleared in, where llama_kv_cache has the cells of a static cache. 0 if some of the
// cells have no rows: they hold nothing
struct llama_kv_dynamic_room {
    uint32_t n_rows;

    uint32_t size() const {
        return n_rows;
    }
};

class llama_kv_state_rows {
public:
    explicit llama_kv_state_rows(llama_kv_dynamic_cache & cache) : cache(cache) {}

    // begin to write a state of a sequence, or of all (-1): do its pending copy first
    // throws std::runtime_error when there is no memory, or when such a state cannot be had
    void begin_write(llama_seq_id seq_id, llama_state_seq_flags flags);

    // begin to read a state
    void begin_read(llama_seq_id seq_id, llama_state_seq_flags flags);

    // have rows for the cells of a state. 0 if there is no memory
    llama_kv_dynamic_room reserve(llama_io_read_i & io, const llama_kv_cache::slot_info & sinfo);

    // the rows behind the cells, as they are
    llama_kv_dynamic_room room(const llama_kv_cache::slot_info & sinfo) const;

    // grow to the rows that were requested for a state. returns false without memory; the state is removed from all caches then
    bool grow(llama_io_read_i & io);

    // the sequence that the state is read for, -1: all. none: no state was read
    std::optional<llama_seq_id> seq_id() const { return seq_id_read; }

    // the state is on the device
    bool is_on_device() const { return on_device; }

private:
    // clear what all caches have of the state that is read: the other caches may have their part already
    void drop();

    llama_kv_dynamic_cache & cache;

    bool on_device = false;

    std::optional<llama_seq_id> seq_id_read;
};
