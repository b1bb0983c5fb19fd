#pragma once

// The expected result of a change of the types of the KV cells. It is computed from the bytes of a saved state, without the code
// that makes the change. See README.md, "The reference"

#include "values.h"

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

// shape of the context that saved a state. It is needed because a state does not record where its parts end
struct state_shape {
    std::string arch;
    bool     hybrid  = false; // the state contains recurrent states after the KV cells
    uint32_t seqs    = 1;     // number of sequences. They have a stream each, or share one
    uint32_t cells   = 0;     // cells per stream
};

// a range of bytes of a state
struct state_part {
    enum part_kind {
        bytes,   // data that a change of types keeps
        rot_k,   // the block size of the rotation of K. 0: no rotation
        rot_v,
        rows,    // int32 type, uint64 bytes of a row; then a row for each cell
        columns, // int32 type, uint32 bytes of an element, uint32 elements of a row; then transposed rows (V without flash attention)
        matrix,  // int32 type, uint64 elements of a row, uint64 rows, uint64 bytes of a row; then rows of all streams (DSV4)
    };

    part_kind kind = bytes;
    size_t    at   = 0; // offset in the state. if the part has a header, offset of the header
    size_t    size = 0;

    uint32_t  cache  = 0; // index of the cache in the context, in the order of the state
    uint32_t  stream = 0;
    uint32_t  layer  = 0;
    bool      is_v   = false;
    ggml_type type   = GGML_TYPE_F16;
    int64_t   n_embd = 0;
    int64_t   n_rows = 0; // of a matrix: rows of all streams
    uint32_t  n_streams = 1; // of a matrix: number of streams
    uint32_t  n_rot  = 0; // of rows and columns: their block size of rotation, if the graphs rotate

    size_t data() const; // offset of the data after the header
};

struct state_parts {
    std::string             arch;
    std::vector<uint8_t>    data;
    std::vector<state_part> parts; // parts that cover all of `data`, without gaps
    bool                    windowed_hybrid = false; // the state contains two caches, and then recurrent states
};

// split a state into parts
// throws std::runtime_error if llama_state_get_data() cannot have written these bytes for a context of this shape
state_parts state_parse(const state_shape & shape, std::vector<uint8_t> data);

// rule that decides whether the cells of a saved cache are rotated (stored in a rotated basis)
enum class basis {
    by_graph, // rotated if the graphs of the architecture rotate
    by_type,  // rotated if the header of the state says so, whether the graphs rotate or not
    kept,     // a change of types never changes the basis
};

// return the state that is expected after a change of types
// like: a state of a context that has these types from the start. it contains the block size of the rotation
state_parts state_convert(const state_parts & from, const state_parts & like, const cell_types & types, basis how = basis::by_graph);

// return the first difference from the expected state, as one sentence. "": there is no difference
std::string state_difference(const state_parts & expected, const std::vector<uint8_t> & is);

// return true if a change to the types of `like` rotates the cells of at least one cache
bool state_turns(const state_parts & from, const state_parts & like);

// convert n values of a type to floats, and floats to rows of n_row values of a type
std::vector<float>   values_of(ggml_type type, const uint8_t * data, int64_t n);
std::vector<uint8_t> rows_of  (ggml_type type, const std::vector<float> & values, int64_t n_row);

// apply the normalized Walsh-Hadamard transform to each block of n values, in place
void hadamard(std::vector<float> & values, uint32_t n);
