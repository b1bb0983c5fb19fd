"""Start the processes of a plan one after the other, and collect what they say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.bench import plan as plans
from kvtool.bench.plan import Plan, Run
from kvtool.bench.sample import Sample, parse
from kvtool.errors import DiskError, MeasureError
from kvtool.machine import available_memory

_MODEL_BYTES = 64 * 2**20  # the largest model file, generously


@dataclass(frozen=True)
class Skipped:
    """A run that was not made, and why."""

    model: str
    mode: str
    why: str


@dataclass(frozen=True)
class Measured:
    """The samples of each (model name, mode) in the order of the repeats, and what was left out."""

    samples: Mapping[tuple[str, str], tuple[Sample, ...]]
    skipped: tuple[Skipped, ...]

    def of(self, model: str, mode: str) -> tuple[Sample, ...]:
        return self.samples.get((model, mode), ())


def make_models(plan: Plan, work: Path) -> dict[str, Path]:
    """The model files by name. Raises DiskError when there is no room for them."""
    work.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(work).free, _MODEL_BYTES * len(plan.models)
    if free < needed:
        raise DiskError(
            "there is no room for the models to measure with",
            why=f"they take up to {needed >> 20} MiB and {free >> 20} MiB are free in {work}",
            next_step="make room there, or build elsewhere with --tree",
        )
    return {model.name: model.make(work) for model in plan.models}


def measure(
    plan: Plan,
    program: Path,
    files: Mapping[str, Path],
    on_run: Callable[[int, str], None] = lambda _done, _label: None,
    on_tick: Callable[[], None] | None = None,
) -> Measured:
    """All runs. One that does not fit into memory is skipped; one that fails raises MeasureError with its log."""
    samples: dict[tuple[str, str], tuple[Sample, ...]] = {}
    skipped: dict[tuple[str, str], Skipped] = {}
    for done, run in enumerate(plans.runs(plan)):
        on_run(done, run.label)
        key = (run.model.name, run.mode)
        if key in skipped:
            continue
        if why := _too_large(plan, run):
            skipped[key] = Skipped(*key, why)
            continue
        samples[key] = (*samples.get(key, ()), one(plan, run, program, files[run.model.name], on_tick))
    return Measured(samples, tuple(skipped.values()))


def _too_large(plan: Plan, run: Run) -> str:
    needed, available = plans.needed_memory(plan, run), available_memory()
    if available is None or available >= needed:
        return ""
    return f"it takes {needed / 2**30:.1f} GiB with headroom and {available / 2**30:.1f} GiB are available"


def one(plan: Plan, run: Run, program: Path, model: Path, on_tick: Callable[[], None] | None = None) -> Sample:
    """One process. Raises MeasureError when it fails, is too slow or says what is not understood."""
    command: Sequence[str | Path] = plans.argv(plan, run, program, model)
    done = process.capture(command, env=run.env, check=False, timeout=plan.timeout, error=MeasureError, on_tick=on_tick)
    try:
        doc = json.loads(done.stdout.strip().splitlines()[-1])
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
    return parse(doc)
