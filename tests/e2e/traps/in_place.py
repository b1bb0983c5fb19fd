"""Storage that grows in place."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import CACHE, INPLACE, Run, Trap, inplace

IN_PLACE = (
    Trap(
        "in place, a sequence that is copied to another stream has no pages there",
        Edit(INPLACE, "!dyn->inplace->copy_stream(ssrc, sdst)", "false"),
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
)
