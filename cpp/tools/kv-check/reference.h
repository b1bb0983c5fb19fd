#pragma once

// The expected result of a change of the types of the KV cells, computed from the bytes of a saved state without code
// of the change: see README.md, "The reference"

#include "values.h"

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

// of the context that saved the state: a state does not record the end of its parts
struct state_shape {
    std::string arch;
    bool     hybrid  = false; // recurrent states after the KV cells
    uint32_t seqs    = 1;     // in as many streams, or in one
    uint32_t cells   = 0;     // per stream
};

// a range of bytes of a state
struct state_part {
    enum part_kind {
        bytes,   // all data that a change of types keeps
        rot_k,   // the size of the Hadamard blocks that rotate K, 0: none
        rot_v,
        rows,    // int32 type, uint64 bytes of a row; then a row for each cell
        columns, // int32 type, uint32 bytes of an element, uint32 elements of a row; then transposed rows (V without flash attention)
        matrix,  // int32 type, uint64 elements of a row, uint64 rows, uint64 bytes of a row; then rows of all streams (DSV4)
    };

    part_kind kind = bytes;
    size_t    at   = 0; // offset in the state, also of the header before the data
    size_t    size = 0;

    uint32_t  cache  = 0; // index in the context, in the order of the state
    uint32_t  stream = 0;
    uint32_t  layer  = 0;
    bool      is_v   = false;
    ggml_type type   = GGML_TYPE_F16;
    int64_t   n_embd = 0;
    int64_t   n_rows = 0; // a matrix: rows of all streams
    uint32_t  n_streams = 1; // of a matrix
    uint32_t  n_rot  = 0; // of rows and columns: their rotation if the graphs rotate

    size_t data() const; // offset of the data
};

struct state_parts {
    std::string             arch;
    std::vector<uint8_t>    data;
    std::vector<state_part> parts; // all of data, without gaps
    bool                    windowed_hybrid = false; // two caches, then recurrent states
};

// throws std::runtime_error if llama_state_get_data() cannot have written the bytes for such a context
state_parts state_parse(const state_shape & shape, std::vector<uint8_t> data);

// the basis of a saved cache
enum class basis {
    by_graph, // like the graphs of the architecture
    by_type,  // from the header of the state, used or not
    kept,     // never changed
};

// return the state after a change of types. like: a state of a context with these types from the start, for its
// rotation size
state_parts state_convert(const state_parts & from, const state_parts & like, const cell_types & types, basis how = basis::by_graph);

// return the first difference from the expected state in one sentence; "" if equal
std::string state_difference(const state_parts & expected, const std::vector<uint8_t> & is);

// return true if a change to the types of another state changes the basis of any cache
bool state_turns(const state_parts & from, const state_parts & like);

// convert n values
std::vector<float>   values_of(ggml_type type, const uint8_t * data, int64_t n);
std::vector<uint8_t> rows_of  (ggml_type type, const std::vector<float> & values, int64_t n_row);

// transform each n values in place, with the normalized Walsh-Hadamard transform
void hadamard(std::vector<float> & values, uint32_t n);
