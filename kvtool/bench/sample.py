"""What one run of kv-bench says, as data. Sizes in bytes, times in seconds unless a name ends in _us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtool.errors import MeasureError


@dataclass(frozen=True)
class Usage:
    """llama_memory_usage: what the memory of a context reserves, has taken and uses."""

    reserved: int
    committed: int
    used: int
    n_cells: int
    n_cells_max: int
    n_cells_used: int
    n_grow: int
    n_shrink: int
    n_bytes_copied: int
    t_grow_us: int
    t_grow_max_us: int


@dataclass(frozen=True)
class Point:
    """One moment: after creation, at a depth, after a clear. rss, peak: resident bytes of the process, -1 unknown."""

    name: str
    depth: int
    seconds: float
    rss: int
    peak: int
    usage: Usage


@dataclass(frozen=True)
class GrowthLimit:
    """The same bytes without a cache, right after a growth: memcpy of what it copied, the others of what it added."""

    memcpy: float
    commit: float
    touch: float


@dataclass(frozen=True)
class Call:
    """One llama_decode(). kind: fill, cross, generate, prompt, cleared; depth: tokens before it; limit: of a growth."""

    kind: str
    depth: int
    n_tokens: int
    seconds: float
    n_grow: int
    grow_seconds: float
    n_bytes_copied: int
    n_bytes_added: int
    n_cells: int
    limit: GrowthLimit | None = None


@dataclass(frozen=True)
class Limit:
    """What the machine does without a cache: memcpy, commit, commit-chunks or touch of so many bytes, a few times."""

    name: str
    bytes: int
    chunk: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Sample:
    """One process: one context from creation to its end."""

    kv_dynamic: bool
    n_ctx: int
    n_layer: int
    create_seconds: float
    rss_before: int
    peak_exact: bool
    points: tuple[Point, ...]
    calls: tuple[Call, ...]
    limits: tuple[Limit, ...]

    def point(self, name: str) -> Point | None:
        """The first point of that name."""
        return next((p for p in self.points if p.name == name), None)

    def at(self, depth: int) -> Point | None:
        """The point at a depth."""
        return next((p for p in self.points if p.name == "depth" and p.depth == depth), None)


def parse(doc: Mapping[str, Any]) -> Sample:
    """kv-bench's document. Raises MeasureError when something is missing or of another type."""
    try:
        return Sample(
            bool(doc["kv_dynamic"]),
            int(doc["n_ctx"]),
            int(doc["n_layer"]),
            float(doc["create_seconds"]),
            int(doc["rss_before"]),
            bool(doc["peak_exact"]),
            tuple(_point(p) for p in doc["points"]),
            tuple(_call(c) for c in doc["calls"]),
            tuple(
                Limit(str(x["name"]), int(x["bytes"]), int(x["chunk"]), tuple(float(s) for s in x["seconds"]))
                for x in doc["limits"]
            ),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise MeasureError(
            "kv-bench's answer is not understood", why=f"{type(err).__name__}: {err}", next_step="kvtool build"
        ) from err


def _point(doc: Mapping[str, Any]) -> Point:
    usage = Usage(**{f.name: int(doc["usage"][f.name]) for f in fields(Usage)})
    return Point(str(doc["name"]), int(doc["depth"]), float(doc["seconds"]), int(doc["rss"]), int(doc["peak"]), usage)


def _call(doc: Mapping[str, Any]) -> Call:
    given = {f.name: doc[f.name] for f in fields(Call) if f.name != "limit"}
    limit = doc.get("limit")
    return Call(**given, limit=None if limit is None else GrowthLimit(**{k: float(v) for k, v in limit.items()}))
