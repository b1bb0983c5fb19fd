"""List traps (known mistakes) in requesting a growth and completing it."""

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
        "mirrored caches have two sizes after a state lets only the first one grow",
        Edit(DYNAMIC, "cache->follow(*other);", ""),
        copies("minimax-m3-moe", "no-memory", "--fail", "7"),
        "no-memory",
    ),
    Trap(
        "a mirrored cache does not grow with the cache that requested rows first",
        Edit(
            DYNAMIC,
            "std::all_of(all.begin(), all.end(), [&](auto * cache) { return cache->grow(ahead); })",
            "all[0]->grow(ahead)",
        ),
        copies("deepseek32-moe", "generate", "--fill", "1100"),
        "generate",
    ),
    Trap(
        "mirrored caches shrink to different sizes while all of their rows exist",
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
        "mirrored caches grow in steps of different sizes, each by the bytes of its own cells",
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
        "the expected size of the compute buffers is from before the growth",
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
        "the time of a growing batch is lost, because the context is synchronized instead of its scheduler",
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
        "memory is freed while a batch is still computed",
        Edit(DYNAMIC_CACHE, "cache->dyn->synchronize();", ""),
        Run("llama-dense", ("--fill", "1100", "--checks", "unread"), {"KV_WATCH": "1"}),
        "unread",
    ),
    Trap(
        "in place, assigned cells have no pages and are not counted",
        Edit(DYNAMIC_CACHE, "requested.add(sinfo.strm[s], idx, idx + 1);", ""),
        inplace("llama-dense", "prompt"),
        "status: same-not-grown",
    ),
    Trap(
        "training requests cells while growth is impossible",
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
