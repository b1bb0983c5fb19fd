#pragma once

// The types of the cells of one llama_kv_cache, and the basis that K and V are stored in. They change with llama_kv_retype
//
// For quantized types, most graphs rotate K and V before they are written and after they are read (the flags n_rot_k and n_rot_v of
// llama_kv_cache). Some graphs never do, and the flags do not show this. So a graph is built with all flags set, and a cache counts as
// rotated if the graph uses the matrix.

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
    // the rotation that llama_kv_cache has for its types
    struct rotation {
        uint32_t & n_rot_k; // the size of the blocks of a row that are rotated. 0: none
        uint32_t & n_rot_v;

        const std::unordered_map<int64_t, std::vector<float>> & matrices; // by the size of a block

        // for other types. force: also where LLAMA_ATTN_ROT_DISABLE is set
        std::function<void(ggml_type, ggml_type, bool force)> init;
    };

    // for a cache, when all of its layers are there
    llama_kv_cell_types(llama_kv_dynamic_cache & cache, const llama_hparams & hparams, bool v_trans, rotation rot);

    //
    // checks
    //

    // return LLAMA_MEMORY_TYPE_OK, or the error if the head sizes forbid the types
    int32_t check_types(ggml_type type_k, ggml_type type_v) const;

    // check whether a device writes such cells where they are
    // throws std::bad_alloc
    bool can_write(ggml_backend_sched_t sched, ggml_type type_k, ggml_type type_v) const;

    // return the views of the cells that the graph reads as a copy on another device
    // throws std::bad_alloc
    std::unordered_set<const ggml_tensor *> read_elsewhere(ggml_cgraph * gf) const;

    // check whether attention makes a transposed copy of V. such attention is never flash attention, whatever the context's flag (T5)
    bool transposes_v(ggml_cgraph * gf) const;

    //
    // the basis
    //

    // called before a K-shift, whose graph depends on is_rotated()
    void prepare_shift();

    // K is stored in a rotated basis where its type wants it
    bool is_rotated() const { return is_rotated_k && rot.n_rot_k > 0; }

    // called when an input is built: the graph rotates with t. null: it does not
    void note_rot_k(ggml_tensor * t) { noted_rot_k = t; }
    void note_rot_v(ggml_tensor * t) { noted_rot_v = t; }

    // have the graphs rotate if they can, and see which do
    void begin_find_rotation();
    void end_find_rotation(ggml_backend_sched_t sched); // null: there is no graph

    // the size of the rotated blocks: of now, and of other types if graphs rotate
    // force: also where LLAMA_ATTN_ROT_DISABLE is set
    uint32_t n_rot(bool is_v) const { return is_v ? rot.n_rot_v : rot.n_rot_k; }
    uint32_t wanted_rot(bool is_v, ggml_type type_k, ggml_type type_v, bool force = false);

    // return the size of the rotation that leads from blocks of this size to the current blocks
    uint32_t rotation_to_now(bool is_v, uint32_t from) const;

    const float * rot_matrix(uint32_t n) const { return n > 0 ? rot.matrices.at(n).data() : nullptr; }

    //
    // the change
    //

    // set the types of the tensors and the rotation of the graphs without touching the data
    void pretend_types(ggml_type type_k, ggml_type type_v);

    // have compute buffers for the change, and the memory of llama_kv_storage::prepare_types(). returns false when there is none
    bool prepare_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v);

    // convert the cells
    void set_types(llama_kv_converter & converter, ggml_type type_k, ggml_type type_v);

    llama_kv_foreign_state foreign;

    llama_kv_dynamic_cache & cache;

    const llama_hparams & hparams;

    const bool v_trans;

    const std::vector<llama_kv_storage::layer> layers;

private:
    // a change of types, from prepare_types() to set_types()
    struct change {
        uint32_t n_rot_k; // the size of the blocks to rotate
        uint32_t n_rot_v;
    };

    // return the block size of the rotation that converts rows from one block size of rotation to another (0: not rotated). it is 0 if
    // they are equal. a model has one block size for all rotated types, so both are equal or one of them is 0
    static uint32_t rotation_delta(uint32_t from, uint32_t to);

    // have the rotation of these types
    // force: also where LLAMA_ATTN_ROT_DISABLE is set
    // throws std::bad_alloc, and nothing has changed then
    void init_rot(ggml_type type_k, ggml_type type_v, bool force = false);

    // return the size of the rotated blocks that types want: of K and V
    std::pair<uint32_t, uint32_t> wanted_rots(ggml_type type_k, ggml_type type_v, bool force = false);

    rotation rot;

    change next = { 0, 0 };

    bool is_rotated_k = false; // by the graphs, where the types want it
    bool is_rotated_v = false;

    ggml_tensor * noted_rot_k = nullptr;
    ggml_tensor * noted_rot_v = nullptr;
};
