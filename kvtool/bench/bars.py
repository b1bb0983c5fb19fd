"""The bars: what was promised of the dynamic cache, against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.bench import figures
from kvtool.bench.figures import MIB, Figure
from kvtool.bench.plan import COPY, IN_PLACE, OFF, STATIC, Plan
from kvtool.bench.runner import Measured
from kvtool.bench.sample import Memory
from kvtool.bench.speed import GENERATE, Speed

_SPARE = 32  # MiB that a bar in bytes allows for what is not the cache
_AFTER_CLEAR = 1.4  # of what the live cells need
_SURE = 0.02  # how far a 95 % interval may reach beyond its bar


@dataclass(frozen=True)
class Bar:
    """One figure and what it has to be: at least `least` and at most `most` (None: no such bound).

    value, low, high: median, lowest and highest over the repeats, or with `sure` a 95 % interval that may not reach
    further than that beyond a bound; value is None when it was not measured, and then met is None. unit: "" for a ratio;
    note: what one has to know to read it, or why it was not measured.
    """

    name: str
    model: str
    mode: str
    value: float | None
    low: float | None
    high: float | None
    least: float | None
    most: float | None
    unit: str = ""
    note: str = ""
    sure: float | None = None

    @property
    def met(self) -> bool | None:
        if self.value is None or self.low is None or self.high is None:
            return None
        wide, low, high = (0.0, self.value, self.value) if self.sure is None else (self.sure, self.low, self.high)
        above = self.least is None or (self.value >= self.least and low > self.least - wide)
        below = self.most is None or (self.value <= self.most and high < self.most + wide)
        return above and below

    @property
    def bound(self) -> str:
        """The bar as one reads it: "<= 1.1", "0.99 to 1.01"."""
        unit = f" {self.unit}" if self.unit else ""
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}{unit}"
        return f">= {self.least:g}{unit}" if self.least is not None else f"<= {self.most:g}{unit}"


def bar(
    name: str,
    model: str,
    mode: str,
    found: Figure | None,
    *,
    least: float | None = None,
    most: float | None = None,
    unit: str = "",
    note: str = "",
    sure: float | None = None,
) -> Bar:
    """A bar for a figure that may be missing."""
    if found is None:
        return Bar(name, model, mode, None, None, None, least, most, unit, note or "not measured", sure)
    return Bar(name, model, mode, found.value, found.low, found.high, least, most, unit, note, sure)


def memory_bars(plan: Plan, measured: Measured) -> list[Bar]:
    """Creation, growth and memory of every model."""
    out: list[Bar] = []
    for model in plan.models:
        static = measured.of(model.name, STATIC)
        why = {(s.model, s.mode): s.why for s in measured.skipped}.get((model.name, STATIC))
        note = f"static left out: {why}" if why else f"at {plan.n_ctx} cells"
        for mode in (IN_PLACE, COPY):
            found = measured.of(model.name, mode)
            layer = max((p.usage.n_cells for s in found for p in s.points), default=0) * model.layer_cell_bytes
            out += _memory(plan.depths[-1], model.name, mode, found, static, note, layer if mode == COPY else 0)
    return out


def _memory(
    depth: int, model: str, mode: str, found: Sequence[Memory], static: Sequence[Memory], note: str, transient: int
) -> list[Bar]:
    sides = dict(enumerate(static))
    limit, most = ("memcpy", 1.5) if mode == COPY else ("commit", 1.1)
    spent = figures.figure(figures.growth_over_limit(s, depth, copies=mode == COPY) for s in found)
    peak = _in_mib([figures.peak_over_steady(s, sides.get(i)) for i, s in enumerate(found)])
    left = _in_mib([figures.left_after_clear(s, sides.get(i)) for i, s in enumerate(found)])
    live = max((p.usage.used for s in found if (p := s.point("after-clear"))), default=0)
    time = figures.paired(found, static, lambda s: s.create_seconds)
    size = figures.paired(found, static, figures.resident)
    return [
        bar("creation time / static", model, mode, time, most=0.02, note=note),
        bar("resident after creation / static", model, mode, size, most=0.005, note=note),
        bar(f"growth time / {limit}", model, mode, spent, most=most, note=f"up to {depth} cells"),
        bar("peak over steady", model, mode, peak, most=round(_SPARE + transient / MIB, 1), unit="MiB"),
        bar(
            "KV resident after clear",
            model,
            mode,
            left,
            most=round(_SPARE + _AFTER_CLEAR * live / MIB, 1),
            unit="MiB",
            note="and one more decode",
        ),
    ]


def _in_mib(values: Sequence[float | None]) -> Figure | None:
    return figures.figure(v / MIB for v in values if v is not None)


def speed_bars(speeds: Sequence[Speed]) -> list[Bar]:
    """For each comparison and kind of call the depth with the lowest bound, which is the one that decides."""
    groups: dict[tuple[str, str, bool, str], list[Speed]] = {}
    for s in speeds:
        groups.setdefault((s.model, s.mode, s.flash_attn, s.kind), []).append(s)
    out = []
    for (model, mode, flash_attn, kind), found in groups.items():
        worst = min(found, key=lambda s: (_met(s), s.ratio.low))
        name = f"{kind} speed / {'unpatched' if mode == OFF else 'static'}{'' if flash_attn else ', no flash attention'}"
        depths = ", ".join(f"{s.depth}: {s.ratio.value:.3f}" for s in found)
        out.append(_speed_bar(name, model, mode, worst, f"at {depths}" if len(found) > 1 else ""))
        grew = [s for s in found if s.growing is not None]
        if mode == IN_PLACE and kind == GENERATE and grew:
            slow = max(s.growing or 0.0 for s in grew)
            title = f"token with a growth / static{'' if flash_attn else ', no flash attention'}"
            out.append(bar(title, model, mode, Figure(slow, slow, slow), most=2, note="the worst depth"))
    return out


def _speed_bar(name: str, model: str, mode: str, worst: Speed, note: str) -> Bar:
    most = 1.01 if mode == OFF else None
    return bar(name, model, mode, worst.ratio, least=0.99, most=most, note=note, sure=_SURE)


def _met(speed: Speed) -> bool:
    return bool(_speed_bar("", "", speed.mode, speed, "").met)


def missed(found: Sequence[Bar]) -> tuple[Bar, ...]:
    """Those that were measured and not met."""
    return tuple(b for b in found if b.met is False)
