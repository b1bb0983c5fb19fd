"""Medians of what was measured of memory, as rows: what the tables, the files and the plots show."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtool.bench import figures
from kvtool.bench.plan import COPY, MODES, STATIC, Plan
from kvtool.bench.runner import Measured
from kvtool.bench.sample import Memory, Usage


@dataclass(frozen=True)
class Row:
    """One cache at one moment: created, at a depth (tokens), or after llama_memory_clear() and one more decode.

    Bytes and seconds. resident: what the process grew by; peak: the most of it since the moment before; growth_seconds:
    of all growths so far, growth_worst: of one of them, growth_limit: of the same bytes without a cache.
    """

    model: str
    mode: str
    moment: str
    depth: int
    create_seconds: float
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
    growth_limit: float | None


def rows(plan: Plan, measured: Measured) -> tuple[Row, ...]:
    """All of them, in the order of the plan."""
    moments = [("created", 0), *(("depth", d) for d in plan.depths), ("after-clear", 1)]
    sides = [(m.name, mode, s) for m in plan.models for mode in MODES if (s := measured.of(m.name, mode))]
    return tuple(_row(model, mode, s, *moment) for model, mode, s in sides for moment in moments)


def _row(model: str, mode: str, samples: Sequence[Memory], moment: str, depth: int) -> Row:
    points = [p for s in samples if (p := s.point(moment, depth))]

    def median(value: Callable[[Usage], float]) -> int:
        return int(statistics.median(value(p.usage) for p in points))

    return Row(
        model,
        mode,
        moment,
        depth,
        statistics.median(s.create_seconds for s in samples),
        median(lambda u: u.reserved),
        median(lambda u: u.committed),
        median(lambda u: u.used),
        figures.medians(samples, lambda s: figures.resident(s, moment, depth)),
        figures.medians(samples, lambda s: figures.resident(s, moment, depth, peak=True)),
        median(lambda u: u.n_grow),
        median(lambda u: u.n_shrink),
        median(lambda u: u.n_bytes_copied),
        1e-6 * median(lambda u: u.t_grow_us),
        1e-6 * median(lambda u: u.t_grow_max_us),
        None
        if mode == STATIC or moment != "depth"
        else figures.medians(samples, lambda s: figures.growth_limit(s, depth, copies=mode == COPY)),
    )
