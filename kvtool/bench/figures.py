"""Figures out of samples of memory: medians, ratios and their range. Pure functions; seconds and bytes.

Ratios are made within a repeat and the median of them is taken: the sides of a repeat ran right after one another, so
whatever else the machine did at that time is in both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtool.bench.sample import Memory

MIB = 2**20

Value = Callable[[Memory], float | None]


@dataclass(frozen=True)
class Figure:
    """A number and how sure it is: the lowest and the highest of several repeats, or a 95 % interval."""

    value: float
    low: float
    high: float


def figure(values: Iterable[float | None]) -> Figure | None:
    """The median and the range of those that are known; None when none is."""
    known = sorted(v for v in values if v is not None)
    return Figure(statistics.median(known), known[0], known[-1]) if known else None


def paired(over: Sequence[Memory], under: Sequence[Memory], value: Value) -> Figure | None:
    """over / under, repeat by repeat; repeats where one side has no value, or under has 0, are left out."""
    both = ((value(a), value(b)) for a, b in zip(over, under, strict=False))
    return figure(a / b for a, b in both if a is not None and b)


def medians(samples: Sequence[Memory], value: Value) -> float | None:
    """The median over repeats; None when no repeat has a value."""
    found = figure(value(s) for s in samples)
    return found.value if found else None


def resident(sample: Memory, name: str = "created", depth: int | None = None, *, peak: bool = False) -> float | None:
    """Resident bytes that the context took, or their peak on the way there; None where that is not known."""
    point = sample.point(name, depth)
    if point is None or point.rss < 0 or sample.rss_before < 0:
        return None
    return float((point.peak if peak else point.rss) - sample.rss_before)


def growth_limit(sample: Memory, depth: int, *, copies: bool) -> float | None:
    """Seconds that all growths up to a depth would have taken without a cache; None when there was none."""
    grew = [g for g in sample.growths if g.depth < depth]
    return sum(g.memcpy if copies else g.commit for g in grew) or None


def growth_over_limit(sample: Memory, depth: int, *, copies: bool) -> float | None:
    """Time of all growths up to a depth over that of the limit."""
    limit = growth_limit(sample, depth, copies=copies)
    return sum(g.seconds for g in sample.growths if g.depth < depth) / limit if limit else None


def peak_over_steady(sample: Memory, static: Memory | None) -> float | None:
    """The most that was resident while the cache was filled, over the steady state at the end of each stretch; bytes.

    The steady state is what a static cache of as many bytes as are committed would have: the static side's resident
    memory at that depth, less its cache. So memory that was freed but not given back to the system counts as peak.
    Without a static side it is what is resident at the end.
    """
    peaks: list[int] = []
    for point in sample.points:
        if point.name != "depth" or point.rss < 0 or point.peak < 0:
            continue
        beside = _beside(static, point.depth)
        steady = point.rss if beside is None else sample.rss_before + beside + point.usage.committed
        peaks.append(point.peak - steady)
    return float(max(peaks)) if peaks else None


def left_after_clear(sample: Memory, static: Memory | None) -> float | None:
    """Resident KV bytes after a clear and one more decode: all that is resident, less what is not the cache.

    That is taken from the static side at the deepest depth, or without one from this side before the clear (memory that
    was freed but not given back before is then missed).
    """
    deepest = [p for p in sample.points if p.name == "depth"]
    after = sample.point("after-clear")
    if not deepest or after is None or after.rss < 0:
        return None
    before = deepest[-1]
    other = _beside(static, before.depth)
    beside = before.rss - sample.rss_before - before.usage.committed if other is None else other
    return float(max(0, after.rss - sample.rss_before - beside))


def _beside(static: Memory | None, depth: int) -> int | None:
    """Resident bytes of a static side's context that are not its cache."""
    point = static.point("depth", depth) if static else None
    if static is None or point is None or point.rss < 0:
        return None
    return point.rss - static.rss_before - point.usage.committed
