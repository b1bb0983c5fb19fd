"""List the mistakes that the design excludes. Each has the reason, and a test of the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Impossible:
    """Describe a mistake that the design excludes.

    why: the reason
    absent: words that no line of cpp/src may contain
    """

    name: str
    why: str
    absent: tuple[str, ...] = ()


IMPOSSIBLE = (
    Impossible(
        "the cells are wiped, or marked as occupied, when they are resized",
        "the cells have their full size from the start and are never resized",
        ("cells.resize", "].resize(kv_size", "pos.resize"),
    ),
    Impossible(
        "a second cache is built by a constructor whose filters capture destroyed local variables",
        "the tensor objects stay, and only their buffers change",
        ("new llama_kv_cache", "make_unique<llama_kv_cache>", "make_unique<llama_kv_cache_iswa>"),
    ),
    Impossible(
        "--fit measures the small start, accepts too large a context and runs out of memory later",
        "without allocations the storage never requests memory, and keeps all rows",
        ("hparams.no_alloc",),
    ),
    Impossible(
        "an ordinary growth is logged as an error, because find_slot() found no cell",
        "find_slot() searches the cells, all of which exist",
        ("find_slot(", "FAILED_COMPUTE"),
    ),
    Impossible(
        "a pending shift is dropped, because the cells are copied into larger ones",
        "the cells have their full size from the start and are never copied",
        ("cells.cp(", "cells.set(", "std::move(cells"),
    ),
    Impossible(
        "new rows are zeroed or old rows copied on a separate device stream while the graph already writes them",
        "only the buffer interface is used, whose calls are complete on return, with the scheduler synchronized",
        ("_async(", "ggml_backend_event"),
    ),
    Impossible(
        "a cache without V (MLA) or without layers (the base of DSV4) is asked for its types",
        "a growth reads only the existing tensors",
        ("type_k()", "type_v()"),
    ),
    Impossible(
        "the layout of V is computed again after flash attention was enabled or disabled",
        "the cache determines the layout at its creation, and passes it to the storage",
        ("v_trans = ",),
    ),
    Impossible(
        "the tensors of a larger cache have other names, and --split-mode does not find them",
        "the tensor objects stay, with their names",
        ("format_name(", "set_name(l."),
    ),
)
