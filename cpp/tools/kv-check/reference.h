#pragma once

// What a change of the types of the KV cells must leave behind, computed from the bytes of a saved state and by nothing that the
// change itself uses: see README.md, "The reference"

#include "values.h"

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

// of the context that a state was saved from: a state does not say where its parts end
struct state_shape {
    std::string arch;
    bool     hybrid  = false; // recurrent states behind the KV cells
    uint32_t seqs    = 1;     // in as many streams, or in one
    uint32_t cells   = 0;     // per stream
};

// a run of bytes of a state
struct state_part {
    enum part_kind {
        bytes,   // anything that a change of types leaves as it is
        rot_k,   // the size of the Hadamard blocks by which K is rotated, 0: not
        rot_v,
        rows,    // int32 type, uint64 bytes of a row; then a row for each cell
        columns, // int32 type, uint32 bytes of an element, uint32 elements of a row; then transposed rows (V without flash attention)
        matrix,  // int32 type, uint64 elements of a row, uint64 rows, uint64 bytes of a row; then rows of all streams (DSV4)
    };

    part_kind kind = bytes;
    size_t    at   = 0; // offset in the state, of what stands before the data, too
    size_t    size = 0;

    uint32_t  cache  = 0; // of the context, in the order of the state
    uint32_t  stream = 0;
    uint32_t  layer  = 0;
    bool      is_v   = false;
    ggml_type type   = GGML_TYPE_F16;
    int64_t   n_embd = 0;
    int64_t   n_rows = 0; // a matrix: of all streams
    uint32_t  n_streams = 1; // of a matrix
    uint32_t  n_rot  = 0; // of rows and columns: by what they are rotated if the graphs do so

    size_t data() const; // offset of the data
};

struct state_parts {
    std::string             arch;
    std::vector<uint8_t>    data;
    std::vector<state_part> parts; // all of data, without gaps
    bool                    windowed_hybrid = false; // two caches, then recurrent states
};

// throws std::runtime_error where the bytes are not what llama_state_get_data() writes for such a context
state_parts state_parse(const state_shape & shape, std::vector<uint8_t> data);

// how the basis in which a cache is saved is found
enum class basis {
    by_graph, // as the graphs of the architecture have it
    by_type,  // as the header of the state has it, used or not
    kept,     // never changed
};

// the state after a change of types. like: a state of a context that had these types from the start, for the size of its rotation
state_parts state_convert(const state_parts & from, const state_parts & like, const cell_types & types, basis how = basis::by_graph);

// where a state is not the expected one, in one sentence; "" if it is
std::string state_difference(const state_parts & expected, const std::vector<uint8_t> & is);

// whether a change from one state to another one's types changes the basis of anything
bool state_turns(const state_parts & from, const state_parts & like);

// conversion of n values
std::vector<float>   values_of(ggml_type type, const uint8_t * data, int64_t n);
std::vector<uint8_t> rows_of  (ggml_type type, const std::vector<float> & values, int64_t n_row);

// in place, the normalized Walsh-Hadamard transform of each n values
void hadamard(std::vector<float> & values, uint32_t n);
