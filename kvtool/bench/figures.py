"""Figures out of samples: medians, ratios and their spread. Pure functions; seconds and bytes.

Ratios are made within a repeat and the median of them is taken: the sides of a repeat ran right after one another, so
whatever else the machine did at that time is in both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtool.bench.sample import Call, Sample

MIB = 2**20
NEAR = 512  # tokens beyond a depth that still count as that depth


@dataclass(frozen=True)
class Figure:
    """A number from several repeats: their median, the lowest and the highest."""

    value: float
    low: float
    high: float


def figure(values: Iterable[float]) -> Figure | None:
    """The median and the range; None for no values."""
    known = sorted(values)
    return Figure(statistics.median(known), known[0], known[-1]) if known else None


def paired(over: Sequence[Sample], under: Sequence[Sample], value: Callable[[Sample], float | None]) -> Figure | None:
    """over / under, repeat by repeat; repeats where one side has no value, or under has 0, are left out."""
    both = ((value(a), value(b)) for a, b in zip(over, under, strict=False))
    return ratio((a, b) for a, b in both if a is not None and b)


def ratio(pairs: Iterable[tuple[float, float]]) -> Figure | None:
    """The first over the second of each pair."""
    return figure(a / b for a, b in pairs)


def seconds_per_token(sample: Sample, kind: str, depth: int) -> float | None:
    """The fastest call of that kind (generate, prompt) near a depth, per token.

    The fastest: whatever else the machine does makes a call slower, never faster. What growths cost is measured apart.
    """
    return min((c.seconds / c.n_tokens for c in _calls(sample, kind, depth)), default=None)


def _calls(sample: Sample, kind: str, depth: int) -> list[Call]:
    return [c for c in sample.calls if c.kind == kind and depth <= c.depth < depth + NEAR]


def noise(values: Iterable[float]) -> str:
    """How far one and the same thing varies from repeat to repeat: "0.97 to 1.10" of its median; "" for one repeat."""
    known = list(values)
    if len(known) < 2:
        return ""
    middle = statistics.median(known)
    return f"{min(known) / middle:.2f} to {max(known) / middle:.2f}"


def resident(sample: Sample, name: str = "created", depth: int | None = None) -> float | None:
    """Resident bytes that the context took; None where that is not known."""
    point = sample.at(depth) if depth is not None else sample.point(name)
    if point is None or point.rss < 0 or sample.rss_before < 0:
        return None
    return float(point.rss - sample.rss_before)


@dataclass(frozen=True)
class Spent:
    """All growths up to a depth: seconds, bytes copied and added, and the same bytes without a cache, in seconds."""

    seconds: float
    copied: int
    added: int
    memcpy: float
    commit: float
    touch: float


def spent(sample: Sample, depth: int) -> Spent | None:
    """What the growths cost up to a depth; None when there was none, or no limits were measured."""
    grew = [(c, c.limit) for c in sample.calls if c.n_grow and c.depth < depth and c.limit]
    if not grew:
        return None
    return Spent(
        sum(c.grow_seconds for c, _ in grew),
        sum(c.n_bytes_copied for c, _ in grew),
        sum(c.n_bytes_added for c, _ in grew),
        sum(x.memcpy for _, x in grew),
        sum(x.commit for _, x in grew),
        sum(x.touch for _, x in grew),
    )


def growth_over_limit(sample: Sample, depth: int, name: str) -> float | None:
    """Time of all growths up to a depth over that of the limit: memcpy or commit."""
    found = spent(sample, depth)
    if found is None:
        return None
    limit = found.memcpy if name == "memcpy" else found.commit
    return found.seconds / limit if limit else None


def peak_over_steady(sample: Sample, static: Sample | None) -> float | None:
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
        if beside is None:
            peaks.append(point.peak - point.rss)
        else:
            peaks.append(point.peak - sample.rss_before - beside - point.usage.committed)
    return float(max(peaks)) if peaks else None


def layer_bytes(sample: Sample, cell_bytes: int, cell_layers: int) -> int:
    """The largest that one layer's K and V got; cell_bytes is of all cell_layers."""
    return max((p.usage.n_cells for p in sample.points), default=0) * cell_bytes // cell_layers


def growth_calls(sample: Sample) -> dict[int, float]:
    """For each growth that fell on a generated token: depth, and its time over the median of the tokens around it."""
    crossings: list[list[Call]] = []
    for call in [c for c in sample.calls if c.kind == "cross"]:
        if not crossings or call.depth != crossings[-1][-1].depth + 1:
            crossings.append([])
        crossings[-1].append(call)
    found = {}
    for calls in crossings:
        grew = [c for c in calls if c.n_grow]
        if grew:
            worst = max(grew, key=lambda c: c.seconds)
            found[worst.depth] = worst.seconds / statistics.median(c.seconds for c in calls)
    return found


def worst_growth_call(sample: Sample) -> float | None:
    """The worst of growth_calls(); None without one."""
    return max(growth_calls(sample).values(), default=None)


def by_depth(samples: Sequence[Sample], value: Callable[[Sample], dict[int, float]]) -> dict[int, float]:
    """The median over the repeats, for each depth that one of them has."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        for depth, number in value(sample).items():
            found.setdefault(depth, []).append(number)
    return {depth: statistics.median(numbers) for depth, numbers in sorted(found.items())}


def left_after_clear(sample: Sample, static: Sample | None) -> float | None:
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


def _beside(static: Sample | None, depth: int) -> int | None:
    """Resident bytes of a static side's context that are not its cache."""
    point = static.at(depth) if static else None
    if static is None or point is None or point.rss < 0:
        return None
    return point.rss - static.rss_before - point.usage.committed


def live_bytes(sample: Sample) -> int:
    """What the cells in use after the clear need."""
    after = sample.point("after-clear")
    return after.usage.used if after else 0


def committed_over_used(sample: Sample, beyond: int = 4096) -> float | None:
    """The worst of committed / used bytes at the depths beyond so many cells."""
    deep = [p.usage for p in sample.points if p.name == "depth" and p.depth > beyond and p.usage.used]
    return max((u.committed / u.used for u in deep), default=None)


def worst_depth(
    dynamic: Sequence[Sample], static: Sequence[Sample], kind: str, depths: Sequence[int]
) -> tuple[int, Figure] | None:
    """Speed of the dynamic side over the static one's at the depth where it is lowest."""
    found: list[tuple[int, Figure]] = []
    for depth in depths:
        # speed is 1 / time: the ratio is the other way round
        def per_token(sample: Sample, depth: int = depth) -> float | None:
            return seconds_per_token(sample, kind, depth)

        speed = paired(static, dynamic, per_token)
        if speed is not None:
            found.append((depth, speed))
    return min(found, key=lambda pair: pair[1].value, default=None)


def medians(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """The median over repeats; None when no repeat has a value."""
    known = [v for s in samples if (v := value(s)) is not None]
    return statistics.median(known) if known else None
