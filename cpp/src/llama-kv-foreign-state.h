#pragma once

// States whose types differ from the cells of one llama_kv_cache: saved before llama_set_memory_type(), or by a context of other
// types. They are converted when they are read. A state on the device is refused

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
    // n_rot_k, n_rot_v: the rotation that the types of the state wanted
    void begin_read(uint32_t n_rot_k, uint32_t n_rot_v);

    // check whether a tensor of the state has another type, or another basis, than the cells
    bool is_foreign(int32_t type, int32_t type_state, bool is_v) const;

    // read the rows of the runs [from, to), one after the other, of a tensor of one stream
    // returns false when that type cannot be read
    template <typename T>
    bool read(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, bool is_v, const std::vector<T> & runs) {
        std::vector<row_range> rows;
        for (const auto & run : runs) {
            rows.emplace_back(run.from, run.to - run.from);
        }
        return read_rows(io, t, type_state, is_v, is_v ? n_rot_v : n_rot_k, true, rows);
    }

    // read rows [0, n) of the streams [s0, s0 + n_stream) of K
    // size_row: bytes of a row in the state
    // throws std::runtime_error if the type cannot be read
    void read_streams(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, uint64_t size_row, uint32_t s0, uint32_t n_stream, uint32_t n);

private:
    using row_range = std::pair<int64_t, int64_t>; // first row, number of rows, over all streams

    bool read_rows(llama_io_read_i & io, ggml_tensor * t, int32_t type_state, bool is_v, uint32_t n_rot_state, bool has_size_row, const std::vector<row_range> & rows);

    llama_kv_cell_types & types;

    // of the state at hand
    uint32_t n_rot_k = 0;
    uint32_t n_rot_v = 0;
};
