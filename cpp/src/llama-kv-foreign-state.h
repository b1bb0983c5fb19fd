#pragma once

// Saved states whose types or rotation differ from those of the cells of one llama_kv_cache
//
// Such a state was saved before llama_set_memory_type(), or by a context with other types. Its cells are converted when it is
// read. A state in device memory (LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) cannot be converted and is refused.

#include "ggml.h"

#include <cstdint>
#include <utility>
#include <vector>

class llama_io_read_i;
class llama_kv_cell_types;

class llama_kv_foreign_state {
public:
    explicit llama_kv_foreign_state(llama_kv_cell_types & types) : types(types) {}

    // begin to read the data of a state
    // n_rot_k, n_rot_v: block sizes of the rotation of the state's K and V. 0: no rotation
    void begin_read(uint32_t n_rot_k, uint32_t n_rot_v);

    // check whether a tensor of the state has another type or another rotation than the cells
    // type, type_state: types of the tensor in the cache and in the state
    bool is_foreign(int32_t type, int32_t type_state, bool is_v) const;

    // read rows of a tensor of one stream, and convert them
    // t:    view of the stream in the tensor of the cache
    // runs: ranges [from, to) of rows of t. the state contains the rows of all ranges without gaps
    // returns false if a state of this type cannot be read
    template <typename T>
    bool read(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, bool is_v, const std::vector<T> & runs) {
        std::vector<row_range> rows;
        for (const auto & run : runs) {
            rows.emplace_back(run.from, run.to - run.from);
        }
        return read_rows(io, t, type_state, is_v, is_v ? n_rot_v : n_rot_k, true, rows);
    }

    // read the rows [0, n) of K of the streams [s0, s0 + n_stream), and convert them
    // size_row: bytes of a row in the state
    // throws std::runtime_error if a state of this type cannot be read
    void read_streams(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, uint64_t size_row, uint32_t s0, uint32_t n_stream, uint32_t n);

private:
    using row_range = std::pair<int64_t, int64_t>; // first row, number of rows. row 0 is the first row of the tensor t

    bool read_rows(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, bool is_v, uint32_t n_rot_state, bool has_size_row, const std::vector<row_range> & rows);

    llama_kv_cell_types & types;

    // block sizes of the rotation of the state that is being read
    uint32_t n_rot_k = 0;
    uint32_t n_rot_v = 0;
};
