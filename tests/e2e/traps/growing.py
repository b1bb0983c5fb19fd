"""What goes wrong when a cache asks to grow, and when it has grown."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import CONTEXT, COPY, DYNAMIC, INPLACE, Run, Trap, copies, inplace

NO_EVEN_OUT = Edit(DYNAMIC, "even_out(res);", "void();")

GROWING = (
    Trap(
        "caches that mirror each other keep two sizes after a growth that fell short",
        NO_EVEN_OUT,
        copies("minimax-m3-moe", "no-memory", "--fail", "7"),
        "no-memory",
    ),
    Trap(
        "a mirrored cache does not grow with the one that asked first",
        Edit(DYNAMIC, "res = kv->dyn_grow(res) && res;", "if (kv->dyn_grow(res)) { break; }"),
        copies("deepseek32-moe", "prompt", "--fill", "1100"),
        "prompt",
    ),
    Trap(
        "caches that mirror each other take steps of different sizes, each by the bytes of its own cells",
        Edit(DYNAMIC, "dyn->dyn->n_bytes_cell(dyn->n_max)", "dyn_usage().reserved/dyn->n_max"),
        Run(
            "qwen4exp-moe",
            ("-c", "16384", "--kv-dynamic", "on", "-d", "4400"),
            {**COPY, "LLAMA_KV_DYNAMIC_STEP": "200000"},
            "kv-bench",
        ),
        "exit",
    ),
    Trap(
        "a request that was answered stays pending, and decode() tries forever",
        Edit(DYNAMIC, "is_pending = false;", ""),
        copies("llama-dense", "full", "--timeout", "10"),
        "full",
    ),
    Trap(
        "the compute buffers do not follow the size of the cache",
        Edit(DYNAMIC, "graph_reserve(n_tokens, n_seqs, n_outputs, mctx.get())", "(ggml_cgraph *) this"),
        Run("llama-dense", ("-fa", "off", "--fill", "1100", "--checks", "prompt", "-v"), COPY),
        "log: does not match expectation",
    ),
    Trap(
        "the size that is expected of the compute buffers is that of before the growth",
        Edit(
            DYNAMIC, "backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(sched.get(), backend_ptrs[i]);", ""
        ),
        Run("llama-dense", ("-fa", "off", "--fill", "1100", "--checks", "prompt", "-v"), COPY),
        "log: does not match expectation",
    ),
    Trap(
        "the time of the batch that grows is lost, because the context is synchronized and not its scheduler",
        Edit(DYNAMIC, "ggml_backend_sched_synchronize(lctx->get_sched());", "lctx->synchronize();"),
        copies("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "storage moves while a batch is still computed",
        Edit(
            DYNAMIC,
            "dyn->dyn->synchronize();",
            "",
            after="bool llama_kv_cache::try_resize(",
        ),
        Run("llama-dense", ("--quick", "--checks", "unread"), {**COPY, "KV_WATCH": "1"}),
        "unread",
    ),
    Trap(
        "memory goes back while a batch is still computed",
        Edit(INPLACE, "dyn->dyn->synchronize();", "", after="void llama_kv_cache::dyn_release_blocks()"),
        Run("llama-dense", ("--fill", "1100", "--checks", "unread"), {"KV_WATCH": "1"}),
        "unread",
    ),
    Trap(
        "in place, cells that were given out have no pages, and nobody counts them",
        Edit(DYNAMIC, "dyn->want(sinfo.strm[s], idx, idx + 1);", ""),
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
        Edit(CONTEXT, "mctx->get_status() == LLAMA_MEMORY_STATUS_FAILED_PREPARE", "false", after="kv_dynamic_grow()"),
        copies("deepseek4-moe", "prompt", "--fill", "2300"),
        "prompt",
    ),
)
