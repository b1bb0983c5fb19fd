"""The bars: what was promised of the dynamic cache, against what was measured."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.bench.runs import COPY, IN_PLACE, OFF, STATIC, Row, at
from kvtool.bench.speed import Speed

MIB = 2**20
SPARE = 32 * MIB  # that a bar in bytes allows for what is not the cache
_AFTER_CLEAR = 1.4  # of what the live cells need
_SURE = 0.02  # how far a 95 % interval may reach beyond its bar


@dataclass(frozen=True)
class Bar:
    """One figure and what it has to be: at least `least` and at most `most` (None: no such bound).

    value is None when it was not measured, and then met is None. low, high: its 95 % interval, if it has one, which may
    not reach further than 0.02 beyond a bound. unit: "" for a ratio; note: what one has to know to read it.
    """

    name: str
    mode: str
    value: float | None
    least: float | None = None
    most: float | None = None
    unit: str = ""
    note: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        low = self.value if self.low is None else min(self.value, self.low + _SURE)
        high = self.value if self.high is None else max(self.value, self.high - _SURE)
        return (self.least is None or low >= self.least) and (self.most is None or high <= self.most)

    @property
    def bound(self) -> str:
        """The bar as one reads it: "<= 1.1", "0.99 to 1.01"."""
        least, most = self.least, self.most
        text = f">= {least:g}" if most is None else f"<= {most:g}" if least is None else f"{least:g} to {most:g}"
        return f"{text} {self.unit}".rstrip()


def memory_bars(rows: Sequence[Row]) -> list[Bar]:
    """Creation, growth and memory of the two dynamic caches."""
    return [bar for mode in (IN_PLACE, COPY) if any(r.mode == mode for r in rows) for bar in _memory(rows, mode)]


def _memory(rows: Sequence[Row], mode: str) -> list[Bar]:
    created, *depths, cleared = (r for r in rows if r.mode == mode)
    static, last = at(rows, STATIC, "created"), depths[-1]
    seconds, size = (static.create_seconds, static.resident) if static else (None, None)
    limit, most = ("memcpy", 1.5) if mode == COPY else ("commit", 1.1)
    peaks = [r.peak - r.committed - beside for r in depths if r.peak and (beside := _beside(rows, r)) is not None]
    beside = _beside(rows, last)
    left = None if cleared.resident is None or beside is None else max(0, cleared.resident - beside)
    # by copy a layer is there twice while it is copied
    transient = SPARE + (last.committed // last.n_layer if mode == COPY else 0)
    kept = SPARE + _AFTER_CLEAR * cleared.used
    return [
        Bar("creation time / static", mode, over(created.create_seconds, seconds), most=0.02),
        Bar("resident after creation / static", mode, over(created.resident, size), most=0.005),
        Bar(f"growth time / {limit}", mode, over(last.growth_seconds, last.growth_limit), most=most),
        Bar("peak over steady", mode, over(max(peaks, default=None), MIB), most=round(transient / MIB, 1), unit="MiB"),
        Bar("KV resident after clear and a decode", mode, over(left, MIB), most=round(kept / MIB, 1), unit="MiB"),
    ]


def _beside(rows: Sequence[Row], row: Row) -> int | None:
    """Resident bytes of a context of that depth that are not its cache: the static one's, or this one's own without it.

    So memory that was freed but not given back to the system counts as the cache's.
    """
    other = at(rows, STATIC, row.moment, row.depth) or row
    return None if other.resident is None else other.resident - other.committed


def over(value: float | None, under: float | None) -> float | None:
    """A ratio, None where one of the two is not known or is nothing to measure by."""
    return value / under if value is not None and under else None


def speed_bars(speeds: Sequence[Speed]) -> list[Bar]:
    """For each comparison and kind of call the depth that decides: one that misses the bar, or has the lowest bound."""
    groups = itertools.groupby(speeds, lambda s: (s.mode, s.flash_attn, s.kind))
    found = [min(map(_speed_bar, group), key=lambda b: (bool(b.met), b.low or 0.0)) for _key, group in groups]
    grew = [s.growing for s in speeds if s.mode == IN_PLACE and s.kind == "generate" and s.growing is not None]
    return [*found, Bar("token with a growth / static", IN_PLACE, max(grew, default=None), most=2)]


def _speed_bar(s: Speed) -> Bar:
    base, most = ("unpatched", 1.01) if s.mode == OFF else ("static", None)
    name = f"{s.kind} speed / {base}{'' if s.flash_attn else ', no flash attention'}"
    return Bar(name, s.mode, s.ratio.value, 0.99, most, note=f"at {s.depth}", low=s.ratio.low, high=s.ratio.high)
