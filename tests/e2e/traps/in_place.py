"""List traps (known mistakes) in a cache that grows in place."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import (
    CACHE,
    CACHE_COPIES,
    DYNAMIC_CACHE,
    GIVE_BACK,
    INPLACE,
    LARGE,
    PAGES,
    PAGES_HOST,
    Run,
    Trap,
    inplace,
    unit,
)

IN_PLACE = (
    Trap(
        "in place, a sequence copied to another stream has no pages there",
        Edit(CACHE_COPIES, "return storage.copy_stream(ssrc, sdst);", "return true;"),
        inplace("llama-dense", "copy", "--seqs", "2"),
        "copy",
    ),
    Trap(
        "in place, a shift changes only the rows of the first stream",
        Edit(
            CACHE,
            "ggml_row_size(layer.k->type, is_quant ? 0 : n_embd_nope) + dyn->copies.shifted().first*layer.k->nb[1]",
            "ggml_row_size(layer.k->type, is_quant ? 0 : n_embd_nope)",
        ),
        inplace("llama-dense", "shift", "--seqs", "4"),
        "shift",
    ),
    Trap(
        "in place, used cells are freed",
        Edit(DYNAMIC_CACHE, "!cells.is_empty(i)", "i < 1", after="::used_rows() const"),
        Run("llama-dense", ("--checks", "shrink")),
        "shrink",
    ),
    Trap(
        "in place, upstream's zeros at creation make the whole cache resident",
        Edit(
            INPLACE,
            "return mem.buf.release();",
            "std::fill_n((char *) ggml_backend_buffer_get_base(mem.buf.get()), mem.pages->size(), 0); "
            "return mem.buf.release();",
        ),
        Run(LARGE, ("--memory", "-c", "8192", "--kv-dynamic", "on")),  # 512 MiB in all
        f"resident: {128 * 2**20}",
    ),
    Trap(
        "in place, a clear with the data keeps the pages",
        Edit(INPLACE, "try_resize(rest, {});", ""),
        inplace("llama-dense", "clear"),
        "clear",
    ),
    Trap(
        "huge pages make more memory resident than requested, especially with transposed V",
        Edit(PAGES_HOST, "madvise(res, size, MADV_NOHUGEPAGE);", ""),
        unit("test-kv-pages"),
        "exit",
    ),
    Trap(
        "in place, a failed growth keeps the pages that it had committed",
        Edit(PAGES, GIVE_BACK, f"if (res) {{ {GIVE_BACK} }}"),
        unit("test-kv-pages"),
        "exit",
    ),
    Trap(
        "in place, a sequence whose copy found no memory is used as if it had been copied",
        Edit(CACHE_COPIES, "has_late = !pending.empty();", "has_late = false;"),
        inplace("llama-dense", "no-memory", "--seqs", "2", "--fail", "6+"),
        "no-memory",
    ),
    Trap(
        "a sequence whose copy waits for memory is shifted before its rows are copied",
        Edit(CACHE, "dyn->copies.end() && do_shift", "do_shift"),
        inplace("llama-dense", "no-memory", "--seqs", "2", "--fail", "6+"),
        "no-memory",
    ),
    Trap(
        "in place, freed memory is never returned",
        Edit(INPLACE, "return policy.shrink(n_cur, n_used, n_cur) < n_cur;", "return false;"),
        inplace("llama-dense", "random", "--seqs", "8", "--unified"),
        "random",
    ),
)
