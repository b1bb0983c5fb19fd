"""Start the processes of a plan one after the other, and collect what they say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool import process
from kvtool.bench import plan as plans
from kvtool.bench import sample
from kvtool.bench.plan import Plan, Run, Turns
from kvtool.bench.sample import Memory, Pair
from kvtool.errors import DiskError, MeasureError
from kvtool.machine import available_memory

_MODEL_BYTES = 64 * 2**20  # the largest model file, generously

OnRun = Callable[[int, str], None]


@dataclass(frozen=True)
class Skipped:
    """A run that was not made, and why."""

    model: str
    mode: str
    why: str


@dataclass(frozen=True)
class Measured:
    """The samples of each (model name, mode) in the order of the repeats, and what was left out."""

    samples: Mapping[tuple[str, str], tuple[Memory, ...]]
    skipped: tuple[Skipped, ...]

    def of(self, model: str, mode: str) -> tuple[Memory, ...]:
        return self.samples.get((model, mode), ())


def make_models(plan: Plan, work: Path) -> dict[str, Path]:
    """The model files by name. Raises DiskError when there is no room for them."""
    free, needed = shutil.disk_usage(work).free, _MODEL_BYTES * len(plan.models)
    if free < needed:
        raise DiskError(
            "there is no room for the models to measure with",
            why=f"they take up to {needed >> 20} MiB and {free >> 20} MiB are free in {work}",
            next_step="make room there, or build elsewhere with --tree",
        )
    return {model.name: model.make(work) for model in plan.models}


def measure_memory(plan: Plan, program: Path, files: Mapping[str, Path], on_run: OnRun) -> Measured:
    """All runs. One that does not fit into memory is skipped; one that fails raises MeasureError with its log."""
    samples: dict[tuple[str, str], tuple[Memory, ...]] = {}
    skipped: dict[tuple[str, str], Skipped] = {}
    for done, run in enumerate(plans.runs(plan)):
        on_run(done, run.label)
        key = (run.model.name, run.mode)
        if why := _too_large(plan, run):
            skipped[key] = Skipped(*key, why)
        elif key not in skipped:
            found = sample.memory(answer(plan, run, program, files[run.model.name]))
            samples[key] = (*samples.get(key, ()), found)
    return Measured(samples, tuple(skipped.values()))


def measure_speed(
    plan: Plan, program: Path, files: Mapping[str, Path], other: Path | None, on_run: OnRun
) -> dict[Turns, tuple[Pair, ...]]:
    """Both contexts of each comparison, call by call in turns."""
    out = {}
    for done, turns in enumerate(plans.turns(plan, other)):
        on_run(done, turns.label)
        out[turns] = sample.pairs(answer(plan, turns, program, files[turns.model.name]))
    return out


def _too_large(plan: Plan, run: Run) -> str:
    needed, available = plans.needed_memory(plan, run), available_memory()
    if available is None or available >= needed:
        return ""
    return f"it takes {needed / 2**30:.1f} GiB with headroom and {available / 2**30:.1f} GiB are available"


def answer(plan: Plan, run: Run | Turns, program: Path, model: Path) -> dict[str, Any]:
    """What one process says. Raises MeasureError when it fails, is too slow or says what is not understood."""
    command = plans.argv(plan, run, program, model)
    done = process.capture(
        command, env=plans.environment(run), check=False, timeout=plan.timeout, error=MeasureError
    )
    try:
        doc: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        status, reason = str(doc["status"]), str(doc["reason"])
    except (ValueError, KeyError, TypeError, IndexError):
        status, reason, doc = "garbage", f"no document on its output, exit code {done.returncode}", {}
    if status != "ok":
        raise MeasureError(
            f"kv-bench could not measure {run.label}",
            why=f"{status}: {reason}",
            next_step=f"run it by hand: {process.quote(command)}",
            output=done.stderr[-2000:],
        )
    return doc
