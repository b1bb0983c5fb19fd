"""List traps (known mistakes) in copying a layer, and in the rule that limits how much is copied."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import GROWTH, LAYOUT, PAGES, Trap, copies, unit

COPYING = (
    Trap(
        "a growth leaves the blocks of transposed V at their old stride",
        Edit(LAYOUT, "to + b.offset(s, i, n_dst)", "to + b.offset(s, i, n_src)"),
        copies("llama-dense", "prompt", "-fa", "off"),
        "prompt",
    ),
    Trap(
        "a growth leaves the streams of K at their old stride",
        Edit(LAYOUT, "to + b.offset(s, i, n_dst)", "to + b.offset(s, i, n_src)"),
        copies("llama-dense", "prompt", "--seqs", "4"),
        "prompt",
    ),
    Trap(
        "on a device, a growth leaves transposed V at its old stride",
        Edit(LAYOUT, "to + b.offset(s, i, n_dst)", "to + b.offset(s, i, n_src)"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "on a device, a growth leaves the streams of K at their old stride",
        Edit(LAYOUT, "b.offset(s, i, n_dst)", "b.offset(s, i, n_src)", after="copy_bytes(ctx, src,"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "the last live cell is not copied",
        Edit(LAYOUT, "std::min(n_used.at(s), n_rows)", "std::max(1u, std::min(n_used.at(s), n_rows)) - 1"),
        copies("qwen35-dense", "generate"),
        "generate",
    ),
    Trap(
        "new rows are not zero, and garbage in V becomes NaN through the mask",
        Edit(PAGES, "ggml_backend_buffer_clear(res, 0);", "ggml_backend_buffer_clear(res, 0xff);"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "the views of the streams point into the old layout",
        Edit(LAYOUT, "view->view_offs = s*t->nb[2];", "view->view_offs = s*t->nb[2]/2;"),
        copies("llama-dense", "copy", "--seqs", "4"),
        "copy",
    ),
    Trap(
        "a layer on a device moves to host memory",
        Edit(
            PAGES,
            "ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)",
            "ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type())",
        ),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "with steps of a fixed size, the copied bytes grow with the square of the context",
        Edit(GROWTH, "std::max<uint64_t>(n_cur/8, std::min<uint64_t>(n_cur, n_bytes_step/size_cell))", "256"),
        unit("test-kv-growth"),
        "exit",
    ),
    Trap(
        "the window covers all of the storage, so its view is contiguous and uses other kernels than the static view",
        Edit(GROWTH, "in_place ? 0 : block()", "0"),
        unit("test-kv-growth"),
        "exit",
    ),
)
