"""Storage that grows in place."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import CACHE, INPLACE, LARGE, PAGES, TENSORS, Run, Trap, inplace, unit

IN_PLACE = (
    Trap(
        "in place, a sequence that is copied to another stream has no pages there",
        Edit(INPLACE, "res && dyn->inplace->copy_stream(ssrc, sdst)", "true"),
        inplace("llama-dense", "copy", "--seqs", "2"),
        "copy",
    ),
    Trap(
        "in place, a shift goes over the rows of the first stream only",
        Edit(
            CACHE,
            "ggml_row_size(layer.k->type, n_embd_nope) + dyn_rows.first*layer.k->nb[1]",
            "ggml_row_size(layer.k->type, n_embd_nope)",
        ),
        inplace("llama-dense", "shift", "--seqs", "4"),
        "shift",
    ),
    Trap(
        "in place, cells in use are given back",
        Edit(INPLACE, "!v_cells[s].is_empty(i)", "i < 1"),
        Run("llama-dense", ("--checks", "shrink")),
        "shrink",
    ),
    Trap(
        "in place, the zeros that upstream writes at creation make the whole cache resident",
        (
            Edit(CACHE, "!dyn || !dyn->inplace", "true"),
            Edit(TENSORS, "llama_kv_pages_set_size(buf, pages->n_bytes_committed());", ""),
        ),
        Run(LARGE, ("--memory", "-c", "8192", "--kv-dynamic", "on")),  # 512 MiB in all
        f"resident: {128 * 2**20}",
    ),
    Trap(
        "in place, a clear with the data leaves the pages",
        Edit(INPLACE, "dyn->inplace->assign(rest);", ""),
        inplace("llama-dense", "clear"),
        "clear",
    ),
    Trap(
        "huge pages make more resident than was asked for, most of all with transposed V",
        Edit(PAGES, "madvise(res, size, MADV_NOHUGEPAGE);", ""),
        unit("test-kv-pages"),
        "exit",
    ),
    Trap(
        "in place, pages that a growth had got before it failed stay taken",
        Edit(PAGES, "discard(missing[j].first, missing[j].second);", ""),
        unit("test-kv-pages"),
        "exit",
    ),
    Trap(
        "in place, a sequence whose copy found no memory is used as if it had been copied",
        Edit(INPLACE, "dyn->dyn->set_failed();", ""),
        inplace("llama-dense", "no-memory", "--seqs", "2", "--fail", "6+"),
        "no-memory",
    ),
)
