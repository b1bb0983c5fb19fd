"""What is run: which models, how deep, how often, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.bench.geometry import MODELS, CacheModel

STATIC, COPY, IN_PLACE, OFF = "static", "copy", "in-place", "off"
MODES = (STATIC, COPY, IN_PLACE)

STORAGE = "LLAMA_KV_DYNAMIC_STORAGE"
_STORAGE = {STATIC: None, OFF: None, COPY: "copy", IN_PLACE: "inplace"}

CONTEXT = 131072
QUICK_DEPTHS = (89, 809, 6409, 8192)
DEPTHS = (89, 809, 6409, 25609, 32768)

SPEED_DEPTHS = (256, 1024, 4000)  # at 25 tokens per second, what is deeper takes hours
SPEED_CONTEXT = 8192  # two contexts at a time, made anew every round

HEADROOM = 2 * 2**30  # bytes to leave to the rest of the machine


@dataclass(frozen=True)
class Plan:
    """depths: where memory is measured, ascending; repeats: processes for each model and mode; rounds: how often both
    contexts of a comparison are made; timeout: seconds for one process."""

    mode: str
    models: tuple[CacheModel, ...]
    n_ctx: int
    depths: tuple[int, ...]
    repeats: int
    rounds: int
    threads: int
    timeout: float = 1800.0

    @property
    def speed_ctx(self) -> int:
        return min(self.n_ctx, SPEED_CONTEXT)

    @property
    def speed_depths(self) -> tuple[int, ...]:
        return _fitting(SPEED_DEPTHS, self.speed_ctx)


@dataclass(frozen=True)
class Run:
    """One process that measures memory. repeat counts from 0."""

    model: CacheModel
    mode: str
    repeat: int

    @property
    def label(self) -> str:
        return f"{self.model.name} {self.mode} {self.repeat + 1}"


@dataclass(frozen=True)
class Turns:
    """One process that measures speed: a context of this mode against a static one.

    other: libllama of an unpatched build that makes the static one; None: the same build does.
    """

    model: CacheModel
    mode: str
    flash_attn: bool
    other: Path | None = None

    @property
    def label(self) -> str:
        return f"{self.model.name} {self.mode} flash attention {'on' if self.flash_attn else 'off'}"


def make(
    *, quick: bool, models: Sequence[CacheModel] = (), repeats: int = 0, rounds: int = 0, threads: int = 1, n_ctx: int = 0
) -> Plan:
    """The plan for the options; 0 and () mean the default. Depths that do not fit into n_ctx are left out."""
    size = n_ctx or CONTEXT
    return Plan(
        "quick" if quick else "default",
        tuple(models) or (MODELS[:1] if quick else MODELS),
        size,
        _fitting(QUICK_DEPTHS if quick else DEPTHS, size),
        repeats or (2 if quick else 3),
        rounds or (6 if quick else 12),
        threads,
    )


def _fitting(depths: Sequence[int], n_ctx: int) -> tuple[int, ...]:
    room = n_ctx - 1024  # what is decoded beyond a depth, and removed again
    return tuple(d for d in depths if d <= room) or (room // 2,)


def runs(plan: Plan) -> tuple[Run, ...]:
    """Every process that measures memory; the modes take turns, and which of them begins changes."""
    out = []
    for model in plan.models:
        for repeat in range(plan.repeats):
            turn = repeat % len(MODES)
            out += [Run(model, mode, repeat) for mode in (*MODES[turn:], *MODES[:turn])]
    return tuple(out)


def turns(plan: Plan, other: Path | None) -> tuple[Turns, ...]:
    """Every process that measures speed: the first model's, as only K and V rows differ from model to model."""
    model = plan.models[0]
    out = [Turns(model, mode, flash) for mode in (IN_PLACE, COPY) for flash in (True, False)]
    return (*out, *(Turns(model, OFF, flash, other) for flash in (True, False) if other is not None))


def environment(run: Run | Turns) -> dict[str, str | None]:
    """A variable of the user's shell is taken away from a static run."""
    return {STORAGE: _STORAGE[run.mode]}


def argv(plan: Plan, run: Run | Turns, program: Path, model: Path) -> list[str | Path]:
    """kv-bench's command line."""
    dynamic = "off" if run.mode in (STATIC, OFF) else "on"
    common: list[str | Path] = [program, "-m", model, "--kv-dynamic", dynamic, "-t", str(plan.threads)]
    if isinstance(run, Run):
        return [*common, "-c", str(plan.n_ctx), "-d", _list(plan.depths), "--limit"]
    flash = ["-fa", "on" if run.flash_attn else "off"]
    other: list[str | Path] = ["--other", run.other] if run.other else []
    sizes = ["-c", str(plan.speed_ctx), "-d", _list(plan.speed_depths), "--rounds", str(plan.rounds)]
    return [*common, *sizes, *flash, *other]


def _list(depths: Sequence[int]) -> str:
    return ",".join(map(str, depths))


def needed_memory(plan: Plan, run: Run) -> int:
    """Bytes that a run may fill, headroom included."""
    cells = plan.n_ctx if run.mode == STATIC else min(2 * plan.depths[-1] + 16384, plan.n_ctx)
    return run.model.static_bytes(cells) + HEADROOM
