#include "llama-kv-foreign-state.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-cell-types.h"
#include "llama-kv-convert.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"
#include "llama-kv-retype.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <stdexcept>

void llama_kv_foreign_state::begin_read(uint32_t n_rot_k, uint32_t n_rot_v) {
    this->n_rot_k = n_rot_k;
    this->n_rot_v = n_rot_v;
}

bool llama_kv_foreign_state::is_foreign(int32_t type, int32_t type_state, bool is_v) const {
    return type != type_state || types.n_rot(is_v) != (is_v ? n_rot_v : n_rot_k);
}

void llama_kv_foreign_state::read_streams(
        llama_io_read_i & io, ggml_tensor * t, int32_t type_state, uint64_t size_row, uint32_t s0, uint32_t n_stream, uint32_t n) {
    if (!llama_kv_is_type(type_state) || t->ne[0] % ggml_blck_size((ggml_type) type_state) != 0 ||
            size_row != ggml_row_size((ggml_type) type_state, t->ne[0])) {
        throw std::runtime_error("a state of a type that KV cells cannot have");
    }

    std::vector<row_range> rows;
    for (uint32_t s = s0; s < s0 + n_stream; ++s) {
        rows.emplace_back((int64_t) s*t->ne[1], n);
    }

    // a state with the rows of whole streams does not contain its rotation. Assume the rotation that graphs use for its type
    const uint32_t n_rot_state = types.wanted_rot(false, (ggml_type) type_state, types.cache.cell_types().second);

    if (!read_rows(io, t, type_state, false, n_rot_state, false, rows)) {
        throw std::runtime_error("failed to read KV cells of another type");
    }
}

// read the rows of a tensor from a state in groups of lines, and convert each group before the next group is read
// K, and V with flash attention: the state contains one row after the other, and a line is a row. Transposed V: the state
// contains one line after the other, and a line has one element of each row.
bool llama_kv_foreign_state::read_rows(
        llama_io_read_i & io, ggml_tensor * t, int32_t type_state, bool is_v, uint32_t n_rot_state, bool has_size_row,
        const std::vector<row_range> & rows) try {
    const bool trans = is_v && types.v_trans;

    const auto & cache = types.cache;

    const auto type = (ggml_type) type_state;

    // The state is external data. Check that its type is a type of cells, and that it has no rotation, or the rotation of its type.
    // A state can be rotated although the cells are not (LLAMA_ATTN_ROT_DISABLE).
    const auto has_rot = [&]() {
        const auto [type_k, type_v] = cache.cell_types();
        const uint32_t n_rot = is_v ? types.wanted_rot(true, type_k, type, true) : types.wanted_rot(false, type, type_v, true);

        return n_rot_state == 0 || n_rot_state == n_rot;
    };

    if (cache.state.is_on_device() || !cache.dyn || !llama_kv_is_type(type_state) || t->ne[0] % ggml_blck_size(type) != 0 ||
            (trans && ggml_is_quantized(type)) || !has_rot()) {
        LLAMA_LOG_ERROR("%s: a state of type %d with a rotation of %u cannot be read into a KV cache of type %s\n",
                __func__, type_state, n_rot_state, ggml_type_name(t->type));
        return false;
    }

    // read the remaining fields of a saved tensor: the size of a row or of an element, and the number of elements
    uint32_t n_embd = t->ne[0];

    if (trans) {
        uint32_t size_el;
        io.read(&size_el, sizeof(size_el));
        io.read(&n_embd,  sizeof(n_embd));
        const auto layer = std::find_if(types.layers.begin(), types.layers.end(), [&](const auto & layer) {
            return std::find(layer.v_stream.begin(), layer.v_stream.end(), t) != layer.v_stream.end();
        });
        if (size_el != ggml_type_size(type) || layer == types.layers.end() || n_embd != types.hparams.n_embd_v_gqa(layer->il)) {
            return false;
        }
    } else if (has_size_row) {
        uint64_t size_row;
        io.read(&size_row, sizeof(size_row));
        if (size_row != ggml_row_size(type, n_embd)) {
            return false;
        }
    }

    std::vector<int64_t> idxs; // indices of the rows
    for (const auto & [r, n] : rows) {
        idxs.resize(idxs.size() + n);
        std::iota(idxs.end() - n, idxs.end(), r);
    }

    const int64_t n_rows = idxs.size();

    if (n_rows == 0) {
        return true;
    }

    const int64_t n_line      = trans ? n_rows : n_embd;
    const int64_t n_lines     = trans ? n_embd : n_rows;
    const int64_t n_lines_max = std::min(n_lines, std::max<int64_t>(1, LLAMA_KV_CONVERT_ELEMENTS/n_line));

    ggml_init_params params = {
        /*.mem_size   =*/ ggml_tensor_overhead(),
        /*.mem_buffer =*/ NULL,
        /*.no_alloc   =*/ true,
    };

    const ggml_context_ptr ctx { ggml_init(params) };
    if (!ctx) {
        throw std::bad_alloc();
    }

    ggml_tensor * src = ggml_new_tensor_2d(ctx.get(), type, n_line, n_lines_max);

    const ggml_backend_buffer_ptr buf { ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), ggml_nbytes(src)) };
    if (!buf) {
        throw std::bad_alloc();
    }

    ggml_backend_tensor_alloc(buf.get(), src, ggml_backend_buffer_get_base(buf.get()));

    cache.dyn->retype->convert([&](llama_kv_converter & converter) {
        const uint32_t n_rot = types.rotation_to_now(is_v, n_rot_state);

        for (int64_t l = 0; l < n_lines; l += n_lines_max) {
            const int64_t n = std::min(n_lines_max, n_lines - l);

            io.read(src->data, n*src->nb[1]);

            if (!trans) {
                converter.run({ src, 0, src->nb[1], n_line, n }, { t, 0, t->nb[1], n_line, n, idxs.data() + l }, n_rot, types.rot_matrix(n_rot));
                continue;
            }

            // write the group of lines into the cache, one range of rows after the other
            int64_t i = 0; // index of the row in the state
            for (const auto & [r, n_run] : rows) {
                const size_t size_el = ggml_type_size(t->type); // transposed V is not quantized, so a block is one element

                converter.run(
                    { src, i*ggml_type_size(type), src->nb[1], n_run, n },
                    { t, (l*t->ne[1] + r)*size_el, t->ne[1]*size_el, n_run, n }, n_rot, types.rot_matrix(n_rot));

                i += n_run;
            }
        }
    });

    return true;
} catch (const std::bad_alloc &) {
    types.cache.dyn->usage.count_no_memory();
    throw;
}
