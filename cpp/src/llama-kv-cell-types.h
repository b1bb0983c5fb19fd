#pragma once

// The types of the cells of one llama_kv_cache, and the basis in which K and V are stored. llama_kv_retype changes the types
//
// For quantized types, most graphs rotate K and V before they write them, and rotate them back after reading. In
// llama_kv_cache, n_rot_k and n_rot_v are the block sizes of this rotation. But some graphs never rotate, although n_rot_k and
// n_rot_v are not 0. So this class sets n_rot_k and n_rot_v and builds a graph. It counts a cache as rotated only if the graph
// uses the rotation matrix.

#include "llama-kv-foreign-state.h"
#include "llama-kv-storage.h"

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

class llama_kv_converter;
class llama_kv_dynamic_cache;
struct llama_hparams;

class llama_kv_cell_types {
public:
    // references to the rotation of llama_kv_cache, which depends on its types
    struct rotation {
        uint32_t & n_rot_k; // block size: each block of n_rot_k elements of a row of K is rotated. 0: no rotation
        uint32_t & n_rot_v;

        const std::unordered_map<int64_t, std::vector<float>> & matrices; // rotation matrices, by the number of elements of a block

        // set the rotation that cells of these types need
        // force: ignore LLAMA_ATTN_ROT_DISABLE, which turns the rotation off
        std::function<void(ggml_type, ggml_type, bool force)> init;
    };

    // create the object. Call this after all layers of the cache were created
    llama_kv_cell_types(llama_kv_dynamic_cache & cache, const llama_hparams & hparams, bool v_trans, rotation rot);

    //
    // checks
    //

    // return LLAMA_MEMORY_TYPE_OK, or the error if the head sizes forbid the types
    int32_t check_types(ggml_type type_k, ggml_type type_v) const;

    // check for each layer whether a backend can write cells of these types into the memory that contains the cells now
    // throws std::bad_alloc
    bool can_write(ggml_backend_sched_t sched, ggml_type type_k, ggml_type type_v) const;

    // return the views of the cells that the graph reads only through a copy of the view on another device
    // throws std::bad_alloc
    std::unordered_set<const ggml_tensor *> read_elsewhere(ggml_cgraph * gf) const;

    // check whether attention makes a transposed copy of V. Attention with such a copy does not use flash attention, even if
    // the context has flash attention enabled. The model T5 has such attention
    bool transposes_v(ggml_cgraph * gf) const;

    //
    // the basis
    //

    // find out whether K is rotated. Call this before a K-shift, because the graph of the shift depends on is_rotated()
    void prepare_shift();

    // check whether K is stored in a rotated basis now
    bool is_rotated() const { return is_rotated_k && rot.n_rot_k > 0; }

    // remember the rotation matrix that a graph uses as an input. null: the graph does not rotate
    void note_rot_k(ggml_tensor * t) { noted_rot_k = t; }
    void note_rot_v(ggml_tensor * t) { noted_rot_v = t; }

    // begin to find out whether the graphs rotate K and V: set n_rot_k and n_rot_v as for quantized cells, so that the next
    // graph rotates K and V if it ever does
    // After the graph is built, end_find_rotation() looks for the rotation matrix in it, and sets n_rot_k and n_rot_v back.
    void begin_find_rotation();
    void end_find_rotation(ggml_backend_sched_t sched); // null: no graph was built

    // n_rot():      return the block size of the rotation for the current types. 0: no rotation
    // wanted_rot(): return the block size of the rotation for other types. 0: no rotation
    // force: ignore LLAMA_ATTN_ROT_DISABLE, which turns the rotation off
    uint32_t n_rot(bool is_v) const { return is_v ? rot.n_rot_v : rot.n_rot_k; }
    uint32_t wanted_rot(bool is_v, ggml_type type_k, ggml_type type_v, bool force = false);

    // return the block size of the rotation that converts rows to the current basis. 0: no rotation
    // from: block size of the rotation that the rows have now. 0: the rows are not rotated
    uint32_t rotation_to_now(bool is_v, uint32_t from) const;

    const float * rot_matrix(uint32_t n) const { return n > 0 ? rot.matrices.at(n).data() : nullptr; }

    //
    // the change
    //

    // set the types of the tensors and the rotation that new graphs use, but do not convert the data of the tensors
    void pretend_types(ggml_type type_k, ggml_type type_v);

    // allocate the memory for a change of types. returns false if there is not enough memory
    // This includes the compute buffers of the conversion and llama_kv_storage::prepare_types().
    bool prepare_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v);

    // convert the cells to the types that prepare_types() was called with
    void set_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v);

    llama_kv_foreign_state foreign;

    llama_kv_dynamic_cache & cache;

    const llama_hparams & hparams;

    const bool v_trans;

    const std::vector<llama_kv_storage::layer> layers;

private:
    // a change of types, from prepare_types() to set_types()
    struct change {
        uint32_t n_rot_k; // block size of the rotation that the change applies to K. 0: no rotation
        uint32_t n_rot_v;
    };

    // return the block size of the rotation that converts rows from one basis to another. 0: no rotation
    // from, to: block sizes of the rotation in the old and the new basis. 0: the basis is not rotated
    // A model has one block size for all rotated types. So from and to are equal, or one of them is 0.
    static uint32_t rotation_delta(uint32_t from, uint32_t to);

    // set the rotation that cells of these types need
    // force: ignore LLAMA_ATTN_ROT_DISABLE, which turns the rotation off
    // throws std::bad_alloc if there is no memory for a matrix. nothing has changed then
    void init_rot(ggml_type type_k, ggml_type type_v, bool force = false);

    // return the block sizes of the rotation of K and of V for these types
    std::pair<uint32_t, uint32_t> wanted_rots(ggml_type type_k, ggml_type type_v, bool force = false);

    rotation rot;

    change next = { 0, 0 };

    bool is_rotated_k = false; // the graphs rotate K if its type requires that
    bool is_rotated_v = false;

    ggml_tensor * noted_rot_k = nullptr;
    ggml_tensor * noted_rot_v = nullptr;
};
