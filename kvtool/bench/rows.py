"""Memory: what a run of kv-bench says, and the medians of runs, as the rows that bars, tables, files and plots show.

Sizes in bytes, times in seconds unless a name ends in _us.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    Bytes and seconds. resident: what the process grew by; peak: the most of it since the moment before, both None where
    that is not known; growth_seconds: of all growths so far, growth_worst: of one of them, growth_limit: of the same
    bytes without a cache, None where nothing grew.
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
    some = ((mode, measured[mode]) for mode in MODES if measured[mode])
    return tuple(_row(mode, samples, i) for mode, samples in some for i in range(len(samples[0].points)))


def at(found: Sequence[Row], mode: str, moment: str, depth: int | None = None) -> Row | None:
    """The row of a mode and a moment, and at a depth if one is given."""
    return next((r for r in found if (r.mode, r.moment) == (mode, moment) and depth in (None, r.depth)), None)


def _row(mode: str, samples: Sequence[Memory], i: int) -> Row:
    first = samples[0].points[i]

    def median(value: Callable[[Point], int]) -> int:
        return int(statistics.median(value(s.points[i]) for s in samples))

    def grown_by(value: Callable[[Point], int]) -> int | None:
        known = all(s.rss_before >= 0 and value(s.points[i]) >= 0 for s in samples)
        return int(statistics.median(value(s.points[i]) - s.rss_before for s in samples)) if known else None

    def limit(sample: Memory) -> float:
        return sum(g.memcpy if mode == COPY else g.commit for g in sample.growths if g.depth < first.depth)

    return Row(
        mode,
        first.name,
        first.depth,
        samples[0].n_layer,
        statistics.median(s.create_seconds for s in samples),
        median(lambda p: p.usage.reserved),
        median(lambda p: p.usage.committed),
        median(lambda p: p.usage.used),
        grown_by(lambda p: p.rss),
        grown_by(lambda p: p.peak),
        median(lambda p: p.usage.n_grow),
        median(lambda p: p.usage.n_shrink),
        median(lambda p: p.usage.n_bytes_copied),
        1e-6 * median(lambda p: p.usage.t_grow_us),
        1e-6 * median(lambda p: p.usage.t_grow_max_us),
        (statistics.median(map(limit, samples)) or None) if first.name == "depth" else None,
    )
