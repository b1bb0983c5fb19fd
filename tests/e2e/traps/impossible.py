"""Traps that the design excludes, with the reason and with what tests the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Impossible:
    """A trap that the design excludes. why: what excludes it; absent: what no line of cpp/src may have for that."""

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
        "a second cache is built through a constructor whose filters capture locals that are gone",
        "the tensor objects stay, only their buffers change",
        ("new llama_kv_cache", "make_unique<llama_kv_cache>", "make_unique<llama_kv_cache_iswa>"),
    ),
    Impossible(
        "an ordinary growth is logged as an error, because find_slot() found no cell",
        "find_slot() looks at the cells, which are all there",
        ("find_slot(", "FAILED_COMPUTE"),
    ),
    Impossible(
        "a cache that grows gets another type, and with it another rotation",
        "a growth allocates with the type of the tensor that it moves",
        ("GGML_TYPE_F16", "attn_rot"),
    ),
)
