"""List the traps of changing cell types, which saved bytes and answers reveal."""

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
        "K of a graph that never rotates is turned, because its type wants that",
        Edit(CELL_TYPES, "is_rotated_k ? rotation_delta(rot.n_rot_k, to_k) : 0", "rotation_delta(rot.n_rot_k, to_k)"),
        inplace("deepseek2-moe", BITS),
        BITS,
    ),
    Trap(
        "cells are not turned into the basis of their new type",
        Edit(
            CELL_TYPES,
            "converter.run(from, to, n_rot, rot_matrix(n_rot));",
            "converter.run(from, to, 0, nullptr);",
        ),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "V is turned in blocks of K's size",
        Edit(CELL_TYPES, "rotation_delta(rot.n_rot_v, to_v)", "rot.n_rot_k + to_k"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "cells that are turned already are turned again",
        Edit(CELL_TYPES, "from == to ? 0 : from + to", "from + to"),
        inplace("llama-dense", BITS, "--retype", "q8_0:q4_0"),
        BITS,
    ),
    Trap(
        "each part of the rows is written over the first one",
        Edit(
            CONVERT,
            "std::iota(data.begin(), data.end(), to.offs/to.stride);",
            "std::iota(data.begin(), data.end(), 0);",
        ),
        inplace(LARGE, BITS, "-c", "2048", "--retype", "f16:q8_0"),  # 256 rows per step
        BITS,
    ),
    Trap(
        "transposed, the new lines have the stride of the old ones",
        Edit(CONVERT, "to.stride", "from.stride", after="cur = ggml_cpy("),
        inplace("llama-dense", BITS, *TRANSPOSED),
        BITS,
    ),
    Trap(
        "in place, the last row is left out",
        Edit(REGION, "std::min(i1, n_used[s])", "std::min(i1, n_used[s]) - 1"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "by copy, the last row is left out",
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
        "in place, transposed V is converted as if its rows lay one after the other",
        Edit(REGION, "is_v && v_trans", "false", after="bool llama_kv_region::convert_tensor("),
        inplace("llama-dense", BITS, *TRANSPOSED),
        BITS,
    ),
    Trap(
        "by copy, transposed V is converted as if its rows lay one after the other",
        Edit(STORAGE, "is_v && v_trans", "false", after="void convert_rows("),
        copies("llama-dense", BITS, *TRANSPOSED),
        BITS,
    ),
    Trap(
        "what lies behind rows that became smaller is read as numbers",
        Edit(STORAGE, "llama_kv_shrink_layout(t, trans, n_rows(), n_used);", "(void) 0;", after="// inside:"),
        copies("llama-dense", "retype-fail", "--fail", "6+", *TRANSPOSED),  # 1 to 5 belong to the compute buffers
        "status: not-run",
    ),
    Trap(
        "types by copy take on a device what others need",
        Edit(STORAGE, "has_memory_beside(type_k, type_v)", "true"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "layers leave the buffer of all for narrower types when there is no memory for the last of them",
        Edit(
            STORAGE,
            "is_created(own) ? new_layer() : make_layer(own, n_rows(), next_k, next_v, n_used)",
            "make_layer(own, n_rows(), next_k, next_v, n_used)",
        ),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "a shift that waits is done after the change, in another basis",
        Edit(RETYPE, "lctx.memory_update(false);", "(void) 0;"),
        inplace("llama-dense", "retype-shift"),
        "retype-shift",
    ),
    Trap(
        "K of bf16, over which no kernel has RoPE, is shifted in place",
        Edit(CACHE, "ggml_is_quantized(cur->type) || cur->type == GGML_TYPE_BF16", "ggml_is_quantized(cur->type)"),
        inplace("llama-dense", "retype-shift", "--retype", "f16:bf16"),
        "retype-shift",
    ),
    Trap(
        "a saved state says that it has the basis of before",
        Edit(CELL_TYPES, "init_rot(type_k, type_v);", "(void) 0;", after="moved(); // the context"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "tensors keep the types that were only tried",
        Edit(RETYPE, "pretend(type_k_old, type_v_old);", "(void) 0;"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "a copy that the budget has no room for waits for good, and the cells keep their types",
        Edit(COPIES_FILE, "!dyn.limit().step_down()", "true", after="bool llama_kv_copies::finish_copies()"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "the budget does not see the compute buffers that smaller types need",
        Edit(RETYPE, "budget.n_bytes_above_in(type_k, type_v) > n_bytes_above_old", "false"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "a change of types that was refused forgets the types to step up to",
        Edit(RETYPE, "res == LLAMA_MEMORY_TYPE_OK", "true", after="dyn->retype->set_types(type_k, type_v);"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "a context that goes leaves what it had in the budget",
        Edit(BUDGET, "        budget->usage.committed -= n_bytes_accounted;", "        (void) 0;"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "a state that is converted into scattered cells goes where they would be if they were not",
        Edit(
            CONVERT,
            "std::copy_n(to.rows, to.n_lines, data.begin());",
            "std::iota(data.begin(), data.end(), to.rows[0]);",
        ),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "empty, the cells keep the types that the budget has led to",
        Edit(DYNAMIC, "dyn->limit().step_up();", "(void) 0;"),
        inplace("llama-dense", "retype-budget"),
        "retype-budget",
    ),
    Trap(
        "what a type would want of the rotation stays with the cells when the change finds no memory",
        Edit(CELL_TYPES, "init_rot(type_k_cur, type_v_cur);", "(void) 0;"),
        inplace("llama-dense", "retype-fail", "--fail", "4+"),
        "retype-fail",
    ),
    Trap(
        "to find out which graphs rotate leaves the cells as one that is quantized",
        Edit(CELL_TYPES, "init_rot(type_k, type_v);", "(void) 0;", after="= cache.cell_types();"),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "with small compute buffers, all parts of a tensor are made of its first rows",
        Edit(CONVERT, "lines.rows ? 0 : l*lines.stride", "0"),
        inplace("llama-dense", BITS, "-ub", "8"),
        BITS,
    ),
    Trap(
        "who interrupts a batch interrupts a change of types, half of which is of no use",
        Edit(CONVERT, "lctx.set_abort_callback(callback, data);", "(void) callback; (void) data;"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "V is turned by K's matrix",
        Edit(CELL_TYPES, "is_v ? next.n_rot_v : next.n_rot_k", "next.n_rot_k"),
        inplace("llama-dense", BITS),
        BITS,
    ),
    Trap(
        "a state of other types is read in the basis of its own",
        Edit(FOREIGN_STATE, "types.rotation_to_now(is_v, n_rot_state)", "0u"),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "K of a state is turned where no graph rotates it",
        Edit(CELL_TYPES, "(is_v ? is_rotated_v : is_rotated_k)", "true"),
        inplace("deepseek2-moe", RESTORE),
        RESTORE,
    ),
    Trap(
        "V of a state is turned by K's matrix",
        Edit(CELL_TYPES, "rotation_delta(from, n_rot(is_v))", "rotation_delta(from, n_rot(false))"),
        inplace("llama-dense", RESTORE),
        RESTORE,
    ),
    Trap(
        "rows of DSV4 in a state are taken for rows that are not turned",
        Edit(
            FOREIGN_STATE,
            "types.wanted_rot(false, (ggml_type) type_state, types.cache.cell_types().second)",
            "0u",
            after="assume the rotation of its type",
        ),
        inplace("deepseek4-moe", RESTORE),
        RESTORE,
    ),
)
