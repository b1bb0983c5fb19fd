#pragma once

// Change the types of the cells of one llama_context while they are in use: llama_set_memory_type()
//
// Positions, cells, rows and the tensor objects stay the same. The types, strides and addresses of the tensors change, and so does
// the basis in which K and V are stored (llama-kv-cell-types.h).
//
// The steps that can fail without loss run first. Some of them build graphs while the tensors have the new types and still the old
// data: a graph must not read more of the cells on another backend than before, and the compute buffers must fit. Then, with the old
// types set again, larger rows get all of their memory. At last, the data is moved layer by layer. If that fails, the cells are lost.

#include "llama-kv.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>

class llama_kv_budget_member;
class llama_kv_converter;
class llama_kv_dynamic;
struct ggml_cgraph;

class llama_kv_retype {
public:
    llama_kv_retype(llama_kv_dynamic & dyn, llama_kv_budget_member & budget) : budget(budget), dyn(dyn) {}

    // return the types of K and V. GGML_TYPE_COUNT: there are no cells
    std::pair<ggml_type, ggml_type> types() const;

    // return what llama_set_memory_type() returns for what can be known before it begins
    int32_t check_types(ggml_type type_k, ggml_type type_v) const;

    // change the types of all caches. returns a llama_memory_type_result
    // throws std::bad_alloc
    int32_t set_types(ggml_type type_k, ggml_type type_v);

    // find out which caches the graphs rotate. builds a graph the first time, so no compute may be in flight
    void find_rotation();

    // call f(converter), after which no graph that was built before runs again
    // throws std::runtime_error when the cells could not be converted
    void convert(const std::function<void(llama_kv_converter &)> & f);

    llama_kv_budget_member & budget;

private:
    // check that graphs can run with the new types, and allocate the memory for the change. on failure, nothing has changed
    int32_t prepare_types(ggml_type type_k, ggml_type type_v);

    // return the number of views of each tensor that the graph reads as a copy on another device, over all caches
    std::unordered_map<const ggml_tensor *, size_t> read_elsewhere(ggml_cgraph * gf) const;

    llama_kv_dynamic & dyn;

    bool is_rotation_known = false;
};
