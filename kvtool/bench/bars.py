"""The bars: what was promised of the dynamic cache, against what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtool.bench import figures
from kvtool.bench.figures import MIB, Figure
from kvtool.bench.geometry import CacheModel
from kvtool.bench.plan import COPY, IN_PLACE, STATIC, Plan
from kvtool.bench.runner import Measured
from kvtool.bench.sample import Sample

SLACK = 32  # MiB that a bar in bytes allows for what is not the cache
_AFTER_CLEAR = 1.4  # of what the live cells need


@dataclass(frozen=True)
class Bar:
    """One figure and what it has to be: at least `least` and at most `most` (None: no such bound).

    value, low, high: median, lowest and highest over the repeats, None when it was not measured; met: None then.
    unit: "" for a ratio; note: what one has to know to read it, or why it was not measured.
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

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

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
) -> Bar:
    """A bar for a figure that may be missing."""
    if found is None:
        return Bar(name, model, mode, None, None, None, least, most, unit, note or "not measured")
    return Bar(name, model, mode, found.value, found.low, found.high, least, most, unit, note)


def bars(plan: Plan, measured: Measured) -> tuple[Bar, ...]:
    """Every bar for every model, without those against an unpatched build."""
    out: list[Bar] = []
    for model in plan.models:
        side = _Side(plan, model, measured)
        for mode in (IN_PLACE, COPY):
            out += [*side.creation(mode), *side.growth(mode), *side.speed(mode), *side.memory(mode)]
    return tuple(out)


class _Side:
    """The bars of one model."""

    def __init__(self, plan: Plan, model: CacheModel, measured: Measured) -> None:
        self.plan, self.model = plan, model
        self.samples = {mode: measured.of(model.name, mode) for mode in (STATIC, COPY, IN_PLACE)}
        self.why = {(s.model, s.mode): s.why for s in measured.skipped}.get((model.name, STATIC), "")

    def _each(self, mode: str, value: Callable[[Sample], float | None]) -> Figure | None:
        return figures.figure(v for s in self.samples[mode] if (v := value(s)) is not None)

    def _against_static(self, mode: str, value: Callable[[Sample], float | None]) -> Figure | None:
        return figures.paired(self.samples[mode], self.samples[STATIC], value)

    def _beside_static(self, mode: str, value: Callable[[Sample, Sample | None], float | None]) -> Figure | None:
        """In MiB; the value gets the static side of the same repeat, if there is one."""
        static = dict(enumerate(self.samples[STATIC]))
        found = (value(s, static.get(i)) for i, s in enumerate(self.samples[mode]))
        return figures.figure(v / MIB for v in found if v is not None)

    def _static_note(self, note: str = "") -> str:
        return f"static left out: {self.why}" if self.why else note

    def creation(self, mode: str) -> list[Bar]:
        time = self._against_static(mode, lambda s: s.create_seconds)
        size = self._against_static(mode, figures.resident)
        at = self._static_note(f"at {self.plan.n_ctx} cells")
        note = self._static_note(f"at {self.plan.n_ctx} cells, compute buffers of both included")
        return [
            bar("creation time / static", self.model.name, mode, time, most=0.02, note=at),
            bar("resident after creation / static", self.model.name, mode, size, most=0.005, note=note),
        ]

    def growth(self, mode: str) -> list[Bar]:
        cells = self.plan.grown
        limit, most = ("commit", 1.1) if mode == IN_PLACE else ("memcpy", 1.5)
        what = "commit of as many fresh pages" if mode == IN_PLACE else "memcpy of what it copied into fresh memory"
        note = f"up to {cells} cells"
        spent = self._each(mode, lambda s: figures.growth_over_limit(s, cells, limit))
        out = []
        if mode == IN_PLACE:
            copied = self._each(mode, lambda s: _copied(s, cells))
            out.append(bar("bytes copied", self.model.name, mode, copied, most=0, unit="MiB", note=note))
        out.append(bar(f"growth time / {limit}", self.model.name, mode, spent, most=most, note=f"{note}; {what}"))
        peak = self._beside_static(mode, figures.peak_over_steady)
        layer = max((self._layer(s) for s in self.samples[mode]), default=0)
        allowed = SLACK if mode == IN_PLACE else SLACK + layer / MIB
        out.append(bar("peak over steady", self.model.name, mode, peak, most=round(allowed, 1), unit="MiB"))
        return out

    def _layer(self, sample: Sample) -> int:
        return figures.layer_bytes(sample, self.model.cell_bytes, self.model.cell_layers)

    def speed(self, mode: str) -> list[Bar]:
        out = []
        for kind, name in (("generate", "generation"), ("prompt", "prompt")):
            depths = self.plan.speed_depths
            shown = ", ".join(map(str, depths))
            worst = figures.worst_depth(self.samples[mode], self.samples[STATIC], kind, depths)
            found, note = None, self._static_note()
            if worst:
                depth, found = worst
                times = (figures.seconds_per_token(s, kind, depth) for s in self.samples[STATIC])
                alone = figures.noise(t for t in times if t is not None)
                note = f"the lowest of {shown}: at {depth}" + (f"; static alone varies {alone}" if alone else "")
            out.append(bar(f"{name} speed / static", self.model.name, mode, found, least=0.99, note=note))
        if mode == IN_PLACE:
            worst_call = self._each(mode, figures.worst_growth_call)
            each = figures.by_depth(self.samples[mode], figures.growth_calls)
            note = "a generated token; at " + ", ".join(f"{depth} cells {ratio:.1f}" for depth, ratio in each.items())
            title = "worst call with a growth / median"
            out.append(bar(title, self.model.name, mode, worst_call, most=2, note=note if each else ""))
        return out

    def memory(self, mode: str) -> list[Bar]:
        left = self._beside_static(mode, figures.left_after_clear)
        live = max((figures.live_bytes(s) for s in self.samples[mode]), default=0)
        allowed = round(_AFTER_CLEAR * live / MIB + SLACK, 1)
        out = [
            bar(
                "KV resident after clear",
                self.model.name,
                mode,
                left,
                most=allowed,
                unit="MiB",
                note="and one more decode",
            ),
        ]
        if mode == IN_PLACE:
            waste = self._each(mode, figures.committed_over_used)
            out.append(bar("KV committed / used", self.model.name, mode, waste, most=1.4, note="beyond 4096 cells"))
        return out


def _copied(sample: Sample, depth: int) -> float | None:
    point = sample.at(depth)
    return point.usage.n_bytes_copied / MIB if point else None


def missed(found: Sequence[Bar]) -> tuple[Bar, ...]:
    """Those that were measured and not met."""
    return tuple(b for b in found if b.met is False)
