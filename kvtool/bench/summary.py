"""Medians of what was measured, as rows: what the tables, the files and the plots show."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtool.bench import figures
from kvtool.bench.geometry import CacheModel
from kvtool.bench.plan import COPY, IN_PLACE, MODES, STATIC, Plan
from kvtool.bench.runner import Measured
from kvtool.bench.sample import Sample, Usage


@dataclass(frozen=True)
class Creation:
    """A context just created. resident: bytes that the process grew by, None where that is not known."""

    model: str
    mode: str
    seconds: float
    committed: int
    resident: float | None
    repeats: int


@dataclass(frozen=True)
class Depth:
    """A cache filled to a depth (tokens). Bytes; growth_seconds: of all growths so far, growth_worst: of one of them.

    peak: the most that was resident on the way from the depth before; generation, prompt: tokens per second there, None
    where speed was not measured.
    """

    model: str
    mode: str
    depth: int
    reserved: int
    committed: int
    used: int
    resident: float | None
    peak: float | None
    growths: int
    shrinks: int
    copied: int
    growth_seconds: float
    growth_worst: float
    generation: float | None
    prompt: float | None


@dataclass(frozen=True)
class Cleared:
    """After llama_memory_clear() at the deepest depth, and one more decode. Bytes."""

    model: str
    mode: str
    depth: int
    committed_before: int
    committed: int
    resident: float | None


@dataclass(frozen=True)
class Growth:
    """All growths up to plan.grown cells against what the machine can do at best. Seconds, bytes.

    limit: memcpy of `copied` into fresh memory for a growth by copy, commit of `added` for one in place.
    both: memcpy of `copied` plus touching the rows that are new, which a growth by copy has to zero.
    """

    model: str
    mode: str
    cells: int
    seconds: float
    added: int
    copied: int
    limit: float
    both: float


@dataclass(frozen=True)
class Rate:
    """What the machine does without a cache, bytes per second over all processes; chunk: bytes per call, 0 one call."""

    name: str
    chunk: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    creations: tuple[Creation, ...]
    depths: tuple[Depth, ...]
    cleared: tuple[Cleared, ...]
    growths: tuple[Growth, ...]
    rates: tuple[Rate, ...]


def summarize(plan: Plan, measured: Measured) -> Summary:
    """All rows, in the order of the plan."""
    sides = [(m, mode, s) for m in plan.models for mode in MODES if (s := measured.of(m.name, mode))]
    return Summary(
        tuple(_creation(m, mode, s) for m, mode, s in sides),
        tuple(row for m, mode, s in sides for d in plan.depths if (row := _depth(m, mode, s, d))),
        tuple(c for m, mode, s in sides if (c := _cleared(m, mode, s, measured.of(m.name, STATIC)))),
        tuple(g for m, mode, s in sides if mode in (COPY, IN_PLACE) and (g := _growth(m, mode, s, plan.grown))),
        _rates([x for _, _, s in sides for x in s]),
    )


def _creation(model: CacheModel, mode: str, samples: Sequence[Sample]) -> Creation:
    return Creation(
        model.name,
        mode,
        statistics.median(s.create_seconds for s in samples),
        int(_usage(samples, "created", lambda u: u.committed)),
        figures.medians(samples, figures.resident),
        len(samples),
    )


def _usage(samples: Sequence[Sample], name: str, value: Callable[[Usage], float]) -> float:
    return statistics.median(value(p.usage) for s in samples if (p := s.point(name)))


def _depth(model: CacheModel, mode: str, samples: Sequence[Sample], depth: int) -> Depth | None:
    points = [p for s in samples if (p := s.at(depth))]
    if not points:
        return None

    def median(value: Callable[[Usage], float]) -> int:
        return int(statistics.median(value(p.usage) for p in points))

    def per_second(kind: str) -> float | None:
        time = figures.medians(samples, lambda s: figures.seconds_per_token(s, kind, depth))
        return 1 / time if time else None

    return Depth(
        model.name,
        mode,
        depth,
        median(lambda u: u.reserved),
        median(lambda u: u.committed),
        median(lambda u: u.used),
        figures.medians(samples, lambda s: figures.resident(s, depth=depth)),
        figures.medians(samples, lambda s: _peak(s, depth)),
        median(lambda u: u.n_grow),
        median(lambda u: u.n_shrink),
        median(lambda u: u.n_bytes_copied),
        1e-6 * median(lambda u: u.t_grow_us),
        1e-6 * median(lambda u: u.t_grow_max_us),
        per_second("generate"),
        per_second("prompt"),
    )


def _peak(sample: Sample, depth: int) -> float | None:
    point = sample.at(depth)
    known = point is not None and point.peak >= 0 and sample.rss_before >= 0
    return float(point.peak - sample.rss_before) if known and point else None


def _cleared(model: CacheModel, mode: str, samples: Sequence[Sample], static: Sequence[Sample]) -> Cleared | None:
    deepest = [[p for p in s.points if p.name == "depth"][-1:] for s in samples]
    if not all(deepest) or any(s.point("after-clear") is None for s in samples):
        return None
    sides = dict(enumerate(static))
    left = (figures.left_after_clear(s, sides.get(i)) for i, s in enumerate(samples))
    found = figures.figure(v for v in left if v is not None)
    return Cleared(
        model.name,
        mode,
        deepest[0][0].depth,
        int(statistics.median(d[0].usage.committed for d in deepest)),
        int(_usage(samples, "after-clear", lambda u: u.committed)),
        found.value if found else None,
    )


def _growth(model: CacheModel, mode: str, samples: Sequence[Sample], cells: int) -> Growth | None:
    found = [_one_growth(s, mode, cells) for s in samples]
    known = [f for f in found if f is not None]
    if not known:
        return None
    seconds, added, copied, limit, both = (statistics.median(column) for column in zip(*known, strict=True))
    return Growth(model.name, mode, cells, seconds, int(added), int(copied), limit, both)


def _one_growth(sample: Sample, mode: str, cells: int) -> tuple[float, float, float, float, float] | None:
    found = figures.spent(sample, cells)
    if found is None:
        return None
    limit = found.memcpy if mode == COPY else found.commit
    return found.seconds, float(found.added), float(found.copied), limit, found.memcpy + found.touch


def _rates(samples: Sequence[Sample]) -> tuple[Rate, ...]:
    by_name: dict[tuple[str, int], list[float]] = {}
    for limit in [x for s in samples for x in s.limits]:
        by_name.setdefault((limit.name, limit.chunk), []).extend(limit.bytes / t for t in limit.seconds)
    return tuple(
        Rate(name, chunk, statistics.median(rates), min(rates), max(rates))
        for (name, chunk), rates in by_name.items()
        if rates
    )
