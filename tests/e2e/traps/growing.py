"""List the traps of requesting and completing a growth."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import (
    COMPUTE,
    CONTEXT,
    COPY,
    DYNAMIC,
    DYNAMIC_CACHE,
    PLANNED_ROWS,
    Run,
    Trap,
    copies,
    inplace,
)

GROWING = (
    Trap(
        "caches that mirror each other get two sizes when the state of the first one makes it grow, and not the second",
        Edit(DYNAMIC, "cache->follow(*other);", ""),
        copies("minimax-m3-moe", "no-memory", "--fail", "7"),
        "no-memory",
    ),
    Trap(
        "a mirrored cache does not grow with the one that asked first",
        Edit(
            DYNAMIC,
            "std::all_of(all.begin(), all.end(), [&](auto * cache) { return cache->grow(ahead); })",
            "all[0]->grow(ahead)",
        ),
        copies("deepseek32-moe", "generate", "--fill", "1100"),
        "generate",
    ),
    Trap(
        "caches that mirror each other shrink apart when all of their rows are there",
        Edit(
            DYNAMIC_CACHE,
            "cache->rows->has_size()",
            "cache->n_rows() < cache->n_max_cells",
            after="void llama_kv_dynamic_cache::release(",
        ),
        copies("qwen4exp-moe", "shrink-full"),
        "shrink-full",
    ),
    Trap(
        "caches that mirror each other take steps of different sizes, each by the bytes of its own cells",
        Edit(DYNAMIC_CACHE, "cache->n_max_cells == n_max_cells", "cache == this"),
        Run(
            "qwen4exp-moe",
            ("-c", "16384", "--kv-dynamic", "on", "-d", "4400"),
            {**COPY, "LLAMA_KV_DYNAMIC_STEP": "400000"},
            "kv-bench",
        ),
        "exit",
    ),
    Trap(
        "the compute buffers do not follow the size of the cache",
        Edit(COMPUTE, "!build_graph(false)", "false"),
        Run("llama-dense", ("-fa", "off", "--fill", "1100", "--checks", "prompt", "-v"), COPY),
        "log: does not match expectation",
    ),
    Trap(
        "the size that is expected of the compute buffers is that of before the growth",
        Edit(
            COMPUTE,
            "lctx.backend_buf_exp_size[i] = "
            "ggml_backend_sched_get_buffer_size(lctx.sched.get(), lctx.backend_ptrs[i]);",
            "",
        ),
        Run("llama-dense", ("-fa", "off", "--fill", "1100", "--checks", "prompt", "-v"), COPY),
        "log: does not match expectation",
    ),
    Trap(
        "the time of the batch that grows is lost, because the context is synchronized and not its scheduler",
        Edit(COMPUTE, "ggml_backend_sched_synchronize(lctx.get_sched());", "lctx.synchronize();"),
        copies("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "storage moves while a batch is still computed",
        Edit(DYNAMIC, "synchronize();", "", after="if (is_requested) {"),
        Run("llama-dense", ("--quick", "--checks", "unread"), {**COPY, "KV_WATCH": "1"}),
        "unread",
    ),
    Trap(
        "memory goes back while a batch is still computed",
        Edit(DYNAMIC_CACHE, "cache->dyn->synchronize();", ""),
        Run("llama-dense", ("--fill", "1100", "--checks", "unread"), {"KV_WATCH": "1"}),
        "unread",
    ),
    Trap(
        "in place, cells that were given out have no pages, and nobody counts them",
        Edit(DYNAMIC_CACHE, "requested.add(sinfo.strm[s], idx, idx + 1);", ""),
        inplace("llama-dense", "prompt"),
        "status: same-not-grown",
    ),
    Trap(
        "training asks for cells where nothing can grow",
        Edit(CONTEXT, "!kv_dynamic->grow_max()", "false"),
        copies("llama-dense", "train", "--train", "-fa", "off", "-ctk", "f32", "-ctv", "f32"),
        "train",
    ),
    Trap(
        "a plan that was made before the growth is used after it",
        Edit(PLANNED_ROWS, "!dyn || dyn->grow()", "true"),
        copies("deepseek4-moe", "rows"),
        "rows",
    ),
)
