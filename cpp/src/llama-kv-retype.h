#pragma once

// Change the types of the cells of one llama_context while they are in use: llama_set_memory_type()
//
// The change keeps the positions, the cells, the rows and the tensor objects. It changes the types, strides and addresses of the
// tensors, and the basis in which K and V are stored (see llama-kv-cell-types.h).
//
// The order of the steps ensures that a step that can fail runs before any data is lost:
//
//  1. set the new types in the tensors without converting the data, and build graphs. They must not read more of the cells on
//     another backend than before, and the compute buffers for them must fit
//  2. set the old types again. If the rows become larger, allocate all of their memory
//  3. convert the data layer by layer. If the device fails during this step, the cells are lost

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

    // return the types of K and V. The result is GGML_TYPE_COUNT if the context has no cells
    std::pair<ggml_type, ggml_type> types() const;

    // return the error of llama_set_memory_type() that is known before the change begins, or LLAMA_MEMORY_TYPE_OK
    int32_t check_types(ggml_type type_k, ggml_type type_v) const;

    // change the types of the cells of all caches. returns a llama_memory_type_result
    // throws std::bad_alloc
    int32_t set_types(ggml_type type_k, ggml_type type_v);

    // find out for which caches the graphs rotate K and V. These caches contain K and V in a rotated basis
    // The first call builds a graph, so no compute may be in flight.
    void find_rotation();

    // call f(converter). f uses the converter to convert the cells of a state that is being restored
    // Graphs that were built before the call are not reused after the call.
    // throws std::runtime_error if the cells could not be converted
    void convert(const std::function<void(llama_kv_converter &)> & f);

    llama_kv_budget_member & budget;

private:
    // check that graphs can run with the new types, and reserve the compute buffers for them. on failure, nothing has changed
    int32_t prepare_types(ggml_type type_k, ggml_type type_v);

    // return the number of views of each cache tensor that the graph does not read directly, but as a copy on another device
    std::unordered_map<const ggml_tensor *, size_t> read_elsewhere(ggml_cgraph * gf) const;

    llama_kv_dynamic & dyn;

    bool is_rotation_known = false;
};
