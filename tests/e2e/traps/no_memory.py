"""Memory runs out."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import (
    CACHE,
    COPY,
    DYNAMIC,
    DYNAMIC_CACHE,
    DYNAMIC_CELLS,
    DYNAMIC_GROW,
    LAYOUT,
    STORAGE,
    Run,
    Trap,
    copies,
    unit,
)

RANDOM = ("--quick", "--checks", "random", "--seqs", "3")

NO_MEMORY = (
    Trap(
        "a batch that finds no memory leaves a stream with the head of another one",
        Edit(CACHE, "it->v_heads_old[sinfo.strm[s]]", "it->v_heads_old[s]"),
        Run("qwen35-dense", (*RANDOM, "--seed", "8")),
        "random",
    ),
    Trap(
        "a batch that finds no memory takes positions out of a window",
        Edit(DYNAMIC_CELLS, "cells.seq_pos_min(seq_id) < pos_max[seq_id]", "false"),
        Run("gemma3-dense", (*RANDOM, "--seed", "9")),
        "random",
    ),
    Trap(
        "a copy to another stream takes more than the budget has",
        Edit(DYNAMIC_CACHE, "dyn->fits(false)", "true"),
        Run("llama-dense", RANDOM),
        "random",
    ),
    Trap(
        "a growth that fails half way leaves layers of two sizes",
        Edit(STORAGE, "shrink_layer(layers[j], n_old, n_used);", ""),
        copies("llama-dense", "no-memory", "--fail", "2+", "-fa", "off"),
        "no-memory",
    ),
    Trap(
        "a growth that fails half way keeps the memory that it had got",
        Edit(STORAGE, "!move_layer(layers[j], n_old, n_used)", "true"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "rows behind the live cells are not zero after a growth that failed",
        Edit(LAYOUT, "memset (data + offs_dst + size_live, 0, size_full - size_live);", ""),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "an exception leaves llama_decode() when the compute buffers cannot be had",
        Edit(
            DYNAMIC,
            'LLAMA_LOG_WARN("%s: %s\\n", __func__, err.what());',
            "throw;",
            after="lctx->sched_reserve();",
        ),
        Run(
            "llama-dense", ("--quick", "--checks", "no-memory", "--fail", "1000000"), {**COPY, "KV_WATCH": "no-reserve"}
        ),
        "no-memory",
    ),
    Trap(
        "a growth that passes the budget with its compute buffers keeps its cells",
        Edit(DYNAMIC_GROW, "resize(*before, n_used_before, false);", ""),
        copies("llama-dense", "random", "--seqs", "8", "--unified"),
        "random",
    ),
)
