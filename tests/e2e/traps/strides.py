"""List traps (known mistakes) with strides that are equal to the size of the cache."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import CACHE, DSV4, Trap, copies

STRIDES = (
    *(
        Trap(
            f"{what} has the stride of the full size, not that of the storage",
            Edit(CACHE, "get_size()", "get_size_max()", after=after),
            copies("llama-dense", check, *args),
            check,
        )
        for what, after, check, args in (
            ("the K that attention reads", "::get_k(ggml_context", "prompt", ("--seqs", "4")),
            ("the transposed V that attention reads", "::get_v(ggml_context", "prompt", ("-fa", "off")),
            ("the K that a batch writes", "::cpy_k(ggml_context", "prompt", ("--seqs", "4")),
            ("the V that a batch writes", "::cpy_v(ggml_context", "prompt", ("--seqs", "4")),
            ("the row of K that a token gets", "::set_input_k_idxs(", "prompt", ("--seqs", "4")),
            ("the row of V that a token gets", "::set_input_v_idxs(", "prompt", ("--seqs", "4")),
            (
                "the element of transposed V that a token gets",
                "// note: the V cache is transposed",
                "prompt",
                ("-fa", "off"),
            ),
        )
    ),
    Trap(
        "the worst case is reserved for the full size with smaller tensors",
        Edit(CACHE, "kv->get_size()", "kv->get_size_max()", after="status(LLAMA_MEMORY_STATUS_SUCCESS), kv(kv)"),
        copies("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "the worst case of DSV4's window is reserved for the full size with a smaller window (--swa-full)",
        Edit(
            DSV4,
            "kv_swa->get_size()",
            "kv_swa->get_size_max()",
            after="llama_kv_cache_dsv4_raw_context::llama_kv_cache_dsv4_raw_context(llama_kv_cache_iswa * kv) :",
        ),
        copies("deepseek4-moe", "generate", "--swa-full"),
        "generate",
    ),
    Trap(
        "the shift of a cell in a later stream has the stride of the full size instead of the storage's",
        Edit(CACHE, "s*get_size() + i", "s*get_size_max() + i", after="void llama_kv_cache::set_input_k_shift("),
        copies("llama-dense", "shift", "--seqs", "4"),
        "shift",
    ),
)
