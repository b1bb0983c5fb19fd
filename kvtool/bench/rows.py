"""Memory: what a run of kv-bench says, and the medians of runs, as the rows that bars, tables, files and plots show.

Sizes in bytes, times in seconds unless a name ends in _us.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

STATIC, COPY, IN_PLACE, OFF = "static", "copy", "in-place", "off"
MODES = (IN_PLACE, COPY, STATIC)


@dataclass(frozen=True)
class Usage:
    """llama_memory_usage: what the memory of a context reserves, has taken and uses."""

    reserved: int
    committed: int
    used: int
    n_grow: int
    n_shrink: int
    n_bytes_copied: int
    t_grow_us: int
    t_grow_max_us: int


@dataclass(frozen=True)
class Point:
    """One moment. name: created, depth, after-clear; rss, peak: resident bytes of the process, -1 unknown."""

    name: str
    depth: int
    rss: int
    peak: int
    usage: Usage


@dataclass(frozen=True)
class Growth:
    """The growths of one call, and right after it the same bytes without a cache: memcpy of what was copied into fresh
    memory, commit of what was added."""

    depth: int
    seconds: float
    memcpy: float
    commit: float


@dataclass(frozen=True)
class Memory:
    """One process: one context from creation to its end."""

    n_layer: int
    create_seconds: float
    rss_before: int
    points: tuple[Point, ...]
    growths: tuple[Growth, ...]


@dataclass(frozen=True)
class Row:
    """One cache at one moment: created, at a depth (tokens), or after llama_memory_clear() and one more decode.

    resident: what the process grew by; peak: the most of it since the moment before, both None where that is not known;
    growth_seconds: of all growths so far, growth_worst: of one of them, growth_limit: of the same bytes without a
    cache, None where nothing grew.
    """

    mode: str
    moment: str
    depth: int
    n_layer: int
    create_seconds: float
    reserved: int
    committed: int
    used: int
    resident: int | None
    peak: int | None
    growths: int
    shrinks: int
    copied: int
    growth_seconds: float
    growth_worst: float
    growth_limit: float | None


def rows(measured: Mapping[str, Sequence[Memory]]) -> tuple[Row, ...]:
    """Of each mode and moment the medians over its processes."""
    moments = (same for mode in MODES for same in zip(*(_rows(mode, m) for m in measured[mode]), strict=True))
    return tuple(Row(*map(_median, zip(*map(astuple, same), strict=True))) for same in moments)


def at(found: Sequence[Row], mode: str, moment: str, depth: int | None = None) -> Row | None:
    """The row of a mode and a moment, and at a depth if one is given."""
    return next((r for r in found if (r.mode, r.moment) == (mode, moment) and depth in (None, r.depth)), None)


def _median(values: tuple[Any, ...]) -> Any:
    """One of the values; None as soon as one is not known."""
    return None if None in values else statistics.median_low(values)


def _rows(mode: str, said: Memory) -> Iterator[Row]:
    """What one process says, moment by moment."""
    for point in said.points:
        usage = point.usage
        rss, peak = (r - said.rss_before if min(r, said.rss_before) >= 0 else None for r in (point.rss, point.peak))
        before = [g for g in said.growths if point.name == "depth" and g.depth < point.depth]
        limit = sum(g.memcpy if mode == COPY else g.commit for g in before) or None
        sizes = usage.reserved, usage.committed, usage.used, rss, peak
        counts = usage.n_grow, usage.n_shrink, usage.n_bytes_copied
        seconds = 1e-6 * usage.t_grow_us, 1e-6 * usage.t_grow_max_us, limit
        yield Row(mode, point.name, point.depth, said.n_layer, said.create_seconds, *sizes, *counts, *seconds)
