"""List traps (known mistakes) with states that are saved before a growth and restored after it."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import CACHE, CONTEXT, DYNAMIC_CACHE, PAGES_HOST, STATE_ROWS, STORAGE, Trap, copies

STATE = (
    Trap(
        "a state's rows for one stream are written after the growth for the next stream moved them",
        Edit(STATE_ROWS, "io.flush();", "", after="rows that were read but not written yet"),
        copies("llama-dense", "state-self", "--seqs", "4", "-fa", "off"),
        "state-self",
    ),
    Trap(
        "the source of a pending stream copy is lost, because its cells are free when a state lets the cache grow",
        Edit(
            DYNAMIC_CACHE,
            "res[ssrc] = std::max(res[ssrc], res[sdst]);",
            "",
        ),
        copies("llama-dense", "state-seq", "--seqs", "3"),
        "state-seq",
    ),
    Trap(
        "a state on the device is not found again, because the buffers have another type after a growth",
        (
            Edit(
                STORAGE,
                "llama_kv_alloc_zero(ctx, buft, !is_fixed)",
                "is_fixed ? llama_kv_alloc_zero(ctx, buft, false) : "
                "ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)",
                after="ggml_backend_buffer_t alloc(",
            ),
            Edit(PAGES_HOST, "res.buf->buft              = ggml_backend_cpu_buffer_type();", ""),
        ),
        copies("llama-dense", "state-device"),
        "state-device",
    ),
    Trap(
        "a state that is larger than the storage is refused instead of growing the storage",
        Edit(STATE_ROWS, "grow(io) ? cache.n_rows() : 0", "cache.requested.has_rows() ? 0 : cache.n_rows()"),
        copies("llama-dense", "state-into-dynamic"),
        "state-into-dynamic",
    ),
    Trap(
        "a state on the device is mistaken for a view of the tensor that now has its address",
        Edit(CONTEXT, "org0->data != org1->data || org0->buffer != org1->view_src->buffer", "false"),
        copies("llama-dense", "state-device"),
        "state-device",
    ),
    Trap(
        "a saved state has the stride of the full size instead of the storage's",
        Edit(CACHE, "get_size()", "get_size_max()", after="// When v is transposed, we also need the element size"),
        copies("llama-dense", "state-into-static", "-fa", "off"),
        "state-into-static",
    ),
)
