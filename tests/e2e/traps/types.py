"""List traps (known mistakes) in changes of the cells' types. Saved bytes and answers show these mistakes."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import (
    BUDGET,
    CACHE,
    CELL_TYPES,
    CONVERT,
    COPIES_FILE,
    DYNAMIC,
    FOREIGN_STATE,
    LARGE,
    REGION,
    RETYPE,
    STORAGE,
    Trap,
    copies,
    inplace,
    unit,
)

BITS = "retype-bits"
RESTORE = "retype-restore"
TRANSPOSED = ("-fa", "off", "--retype", "f32:f16")

TYPES = (
    Trap(
        "K of a graph that never rotates is rotated, because its type requests it",
        Edit(CELL_TYPES, "is_rotated_k ? rotation_delta(rot.n_rot_k, to_k) : 0", "rotation_delta(rot.n_rot_k, to_k)"),
        inplace("deepseek2-moe", BITS),
        BITS,
    ),
    Trap(
        "cells are not rotated to the basis of their new type",
        Edit(
            CELL_TYPES,
            "converter.run(from, to, n_rot, rot_matrix(n_rot));",
            "converter.run(from, to, 0, nullptr);",
        ),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "V is rotated in blocks of K's size",
        Edit(CELL_TYPES, "rotation_delta(rot.n_rot_v, to_v)", "rot.n_rot_k + to_k"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "rotated cells are rotated again",
        Edit(CELL_TYPES, "from == to ? 0 : from + to", "from + to"),
        inplace("llama-dense", BITS, "--retype", "q8_0:q4_0"),
        BITS,
    ),
    Trap(
        "each part of the rows overwrites the first part",
        Edit(
            CONVERT,
            "std::iota(data.begin(), data.end(), to.offs/to.stride);",
            "std::iota(data.begin(), data.end(), 0);",
        ),
        inplace(LARGE, BITS, "-c", "2048", "--retype", "f16:q8_0"),  # 256 rows in each step
        BITS,
    ),
    Trap(
        "new transposed lines have the stride of the old lines",
        Edit(CONVERT, "to.stride", "from.stride", after="cur = ggml_cpy("),
        inplace("llama-dense", BITS, *TRANSPOSED),
        BITS,
    ),
    Trap(
        "in place, the last row is not converted",
        Edit(
            REGION,
            "std::min(i1, n_used[s])",
            "std::min(i1, n_used[s]) - 1",
            after="void llama_kv_region::convert_tensor_inside(",
        ),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "in place, the last row is not converted to a larger type",
        Edit(
            REGION,
            "std::min(i1, n_used[s])",
            "std::min(i1, n_used[s]) - 1",
            after="bool llama_kv_region::convert_tensor(",
        ),
        inplace("llama-dense", BITS, "--retype", "q8_0:f16"),
        BITS,
    ),
    Trap(
        "in place, old bytes after rows that became smaller stay",
        Edit(REGION, "mem.pages->set_zero(offset + offs, size);", "(void) 0;"),
        unit("test-kv-types"),
        "exit",
    ),
    Trap(
        "in place, pages of converted rows are freed",
        Edit(
            REGION,
            "mem.pages->give(offset + offs, size);",
            "mem.pages->give(offset + offs - std::min<size_t>(offs, 2*size_page), size);",
        ),
        unit("test-kv-types"),
        "exit",
    ),
    Trap(
        "in place, transposed V with holes is converted inside of its memory",
        Edit(REGION, "!v_trans && ggml_row_size(type_v, l.v->ne[0]) <= l.v->nb[1]", "true"),
        unit("test-kv-types"),
        "exit",
    ),
    Trap(
        "in place, the pages of old rows stay committed",
        Edit(REGION, "mem.pages->give(offset + offs, size);", "(void) 0;"),
        unit("test-kv-types"),
        "exit",
    ),
    Trap(
        "by copy, the buffer of smaller rows reports its old size",
        Edit(STORAGE, "llama_kv_paged_buffer::shrink(t->buffer, n_bytes_old - in_pages(ggml_nbytes(t)));", "(void) 0;"),
        unit("test-kv-types"),
        "exit",
    ),
    Trap(
        "a layer in host memory keeps the first buffer of a device",
        Edit(STORAGE, "is_created(own) && own.ctx == entry.first.get()", "is_created(own)"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "by copy, the last row is not converted",
        Edit(STORAGE, "std::min(n_used[s], n_rows())", "std::min(n_used[s], n_rows()) - 1", after="void convert_rows("),
        copies("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "by copy, only the first stream is converted",
        Edit(STORAGE, "s < src->ne[2]", "s < 1", after="void convert_rows("),
        copies("llama-dense", BITS, "--seqs", "4"),
        BITS,
    ),
    Trap(
        "in place, transposed V is converted as if its rows were contiguous",
        Edit(REGION, "is_v && v_trans", "false", after="bool llama_kv_region::convert_tensor("),
        inplace("llama-dense", BITS, *TRANSPOSED),
        BITS,
    ),
    Trap(
        "by copy, transposed V is converted as if its rows were contiguous",
        Edit(STORAGE, "is_v && v_trans", "false", after="void convert_rows("),
        copies("llama-dense", BITS, *TRANSPOSED),
        BITS,
    ),
    Trap(
        "old bytes after rows that became smaller are read as numbers",
        Edit(STORAGE, "pages->vacate(offset + offs, size);", "(void) offs; (void) size;"),
        copies("llama-dense", BITS, *TRANSPOSED),
        BITS,
    ),
    Trap(
        "a change by copy uses the memory that others need on a device",
        Edit(STORAGE, "has_memory_beside(type_k, type_v)", "true"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "layers leave their shared buffer for narrower types without memory for the last layer",
        Edit(
            STORAGE,
            "is_created(own) || stays(own) ? new_layer() : make_layer(own, n_rows(), next_k, next_v, n_used)",
            "make_layer(own, n_rows(), next_k, next_v, n_used)",
        ),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "a pending shift is performed after the change, in another basis",
        Edit(RETYPE, "lctx.memory_update(false);", "(void) 0;"),
        inplace("llama-dense", "retype-shift"),
        "retype-shift",
    ),
    Trap(
        "K of bf16, for which no kernel has RoPE, is shifted in place",
        Edit(CACHE, "ggml_is_quantized(cur->type) || cur->type == GGML_TYPE_BF16", "ggml_is_quantized(cur->type)"),
        inplace("llama-dense", "retype-shift", "--retype", "f16:bf16"),
        "retype-shift",
    ),
    Trap(
        "a saved state records the old basis",
        Edit(CELL_TYPES, "init_rot(type_k, type_v);", "(void) 0;", after="cache.storage().moved();"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "tensors keep the types of a failed attempt",
        Edit(RETYPE, "pretend(type_k_old, type_v_old);", "(void) 0;"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "a copy beyond the budget waits forever, and the cells keep their types",
        Edit(COPIES_FILE, "!dyn.limit().step_down()", "true", after="bool llama_kv_copies::finish_copies()"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "the budget ignores the compute buffers that smaller types need",
        Edit(RETYPE, "budget.n_bytes_above_in(type_k, type_v) > n_bytes_above_old", "false"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "a refused change of types loses the larger types to return to",
        Edit(RETYPE, "res == LLAMA_MEMORY_TYPE_OK", "true", after="dyn->retype->set_types(type_k, type_v);"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "a freed context keeps its share of the budget",
        Edit(BUDGET, "        budget->usage.committed -= n_bytes_accounted;", "        (void) 0;"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "a state converted into scattered cells is written to contiguous cells",
        Edit(
            CONVERT,
            "std::copy_n(to.rows, to.n_lines, data.begin());",
            "std::iota(data.begin(), data.end(), to.rows[0]);",
        ),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "empty cells keep the smaller types of the budget",
        Edit(DYNAMIC, "dyn->limit().step_up();", "(void) 0;"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "the new rotation stays with the cells after a change without memory",
        Edit(CELL_TYPES, "init_rot(type_k_cur, type_v_cur);", "(void) 0;"),
        inplace("llama-dense", "retype-fail", "--fail", "4+"),
        "retype-fail",
    ),
    Trap(
        "the test for rotating graphs leaves the cells marked as quantized",
        Edit(CELL_TYPES, "init_rot(type_k, type_v);", "(void) 0;", after="= cache.cell_types();"),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "with small compute buffers, all parts of a tensor are converted from its first rows",
        Edit(CONVERT, "lines.rows ? 0 : l*lines.stride", "0"),
        inplace("llama-dense", BITS, "-ub", "8"),
        BITS,
    ),
    Trap(
        "the abort callback of a batch interrupts a change of types halfway",
        Edit(CONVERT, "lctx.set_abort_callback(callback, data);", "(void) callback; (void) data;"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "V is rotated by K's matrix",
        Edit(CELL_TYPES, "is_v ? next.n_rot_v : next.n_rot_k", "next.n_rot_k"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "a state of other types is read without a change of its basis",
        Edit(FOREIGN_STATE, "types.rotation_to_now(is_v, n_rot_state)", "0u"),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "K of a state is rotated although no graph rotates it",
        Edit(CELL_TYPES, "(is_v ? is_rotated_v : is_rotated_k)", "true"),
        inplace("deepseek2-moe", RESTORE),
        RESTORE,
    ),
    Trap(
        "V of a state is rotated by K's matrix",
        Edit(CELL_TYPES, "rotation_delta(from, n_rot(is_v))", "rotation_delta(from, n_rot(false))"),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "rotated rows of DSV4 in a state are treated as unrotated",
        Edit(
            FOREIGN_STATE,
            "types.wanted_rot(false, (ggml_type) type_state, types.cache.cell_types().second)",
            "0u",
            after="rows.emplace_back((int64_t) s*t->ne[1], n);",
        ),
        inplace("deepseek4-moe", RESTORE),
        RESTORE,
    ),
)
