"""What is run: which models, how deep, how often, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.bench.geometry import MODELS, CacheModel

STATIC, COPY, IN_PLACE = "static", "copy", "in-place"
MODES = (STATIC, COPY, IN_PLACE)

STORAGE = "LLAMA_KV_DYNAMIC_STORAGE"
_STORAGE = {STATIC: None, COPY: "copy", IN_PLACE: "inplace"}

CONTEXT = 131072
QUICK_DEPTHS = (89, 809, 6409)
DEPTHS = (*QUICK_DEPTHS, 25609)
DEEP = (40009, 64009, 80009)
GROWN = 32768  # the growth that is held against the machine's limits ends here
QUICK_GROWN = 8192

HEADROOM = 2 * 2**30  # bytes to leave to the rest of the machine
LIMIT = 2**30  # bytes of plain memcpy and page commits in each process, or less for a small cache
COMMIT_CHUNK = 512 * 1024  # 256 cells of one tensor with 1024 f16 elements a row: what one growth commits at a time


@dataclass(frozen=True)
class Plan:
    """depths: where everything is measured, ascending; grown: the last of them but for --full's; spoken: the depths at
    which speed is measured; repeats: processes for each model and mode; timeout: seconds for one process."""

    mode: str
    models: tuple[CacheModel, ...]
    n_ctx: int
    depths: tuple[int, ...]
    grown: int
    spoken: tuple[int, ...]
    repeats: int
    threads: int
    timeout: float

    @property
    def speed_depths(self) -> tuple[int, ...]:
        """The three depths of the bars: the deepest ones at which speed is measured."""
        return self.spoken[-3:]


@dataclass(frozen=True)
class Run:
    """One process to start. repeat counts from 0."""

    model: CacheModel
    mode: str
    repeat: int

    @property
    def label(self) -> str:
        return f"{self.model.name} {self.mode} {self.repeat + 1}"

    @property
    def env(self) -> dict[str, str | None]:
        return {STORAGE: _STORAGE[self.mode]}


def make(
    *, quick: bool, full: bool, models: Sequence[CacheModel] = (), repeats: int = 0, threads: int = 1, n_ctx: int = 0
) -> Plan:
    """The plan for the options; 0 and () mean the default. Depths that do not fit into n_ctx are left out."""
    size = n_ctx or CONTEXT
    grown = QUICK_GROWN if quick else GROWN
    spoken = QUICK_DEPTHS if quick else (*DEPTHS, *(DEEP if full else ()))
    room = size - 512  # what is decoded beyond a depth, and removed again
    fits = tuple(d for d in sorted({*spoken, grown}) if d <= room) or (room // 2,)
    return Plan(
        "quick" if quick else "full" if full else "default",
        tuple(models) or (MODELS[:1] if quick else MODELS),
        size,
        fits,
        max((d for d in fits if d <= grown), default=fits[-1]),
        tuple(d for d in fits if d in spoken) or fits,
        repeats or (2 if quick else 3),
        threads,
        3600.0 if full else 900.0,
    )


def runs(plan: Plan) -> tuple[Run, ...]:
    """Every process, alternating: a change of the machine's speed meets all modes of a model, not one.

    The order of the modes turns with each repeat, so that none of them always comes after the same other.
    """
    out = []
    for model in plan.models:
        for repeat in range(plan.repeats):
            turn = repeat % len(MODES)
            out += [Run(model, mode, repeat) for mode in (*MODES[turn:], *MODES[:turn])]
    return tuple(out)


def argv(plan: Plan, run: Run, program: Path, model: Path) -> list[str | Path]:
    """kv-bench's command line."""
    return [
        program,
        "-m",
        model,
        "--kv-dynamic",
        "off" if run.mode == STATIC else "on",
        "-c",
        str(plan.n_ctx),
        "-d",
        ",".join(str(d) for d in plan.depths),
        "--max-gen",
        str(plan.spoken[-1]),
        "-t",
        str(plan.threads),
        "--limit",
        str(max(16, min(LIMIT, run.model.static_bytes(plan.grown)) // 2**20)),
        "--chunk",
        str(COMMIT_CHUNK // 2**10),
    ]


def needed_memory(plan: Plan, run: Run) -> int:
    """Bytes that a run may fill, headroom included."""
    cells = plan.n_ctx if run.mode == STATIC else min(2 * plan.depths[-1] + 16384, plan.n_ctx)
    return max(run.model.static_bytes(cells), 2 * LIMIT) + HEADROOM
