"""Implement `kvtool verify --model`: compare a static and a dynamic cache on the user's own models."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import KvtoolError, VerifyError
from kvtool.options import Env
from kvtool.result import CheckOutcome, Result
from kvtool.upstream import models
from kvtool.verify import own_model
from kvtool.verify.checks import Finding
from kvtool.verify.devices import Device
from kvtool.verify.own_model import Comparison, Report, Subject
from kvtool.verify.talk import Pair

KINDS = frozenset(("kv-check", "server"))  # kinds of checks whose programs are built
TARGETS = ("kv-bench",)  # another program that is built
_WORDS = {CheckOutcome.PASSED: "equal", CheckOutcome.SKIPPED: "not possible", CheckOutcome.FAILED: "DIFFERS"}


@dataclass(frozen=True)
class ModelsVerified(Result, command="verify"):
    """Report the checks of all models of the user."""

    tag: str
    bin_dir: Path
    models: tuple[Report, ...]
    seconds: float  # duration of the whole command, including the build

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of all models."""
        return tuple(found for report in self.models for found in report.findings)

    @property
    def failure(self) -> KvtoolError | None:
        wrong = [found for found in self.findings if found.outcome is CheckOutcome.FAILED]
        if wrong:
            first = wrong[0]
            return VerifyError(
                f"{len(wrong)} of {len(self.findings)} checks failed",
                why=f"{first.id}: {first.status}: {first.reason}",
                next_step="the same command with --json (its details end with the program's log)",
            )
        if all(found.outcome is CheckOutcome.SKIPPED for found in self.findings):
            reason = next((found.reason for found in self.findings), "no model was named")
            return VerifyError("nothing was compared", why=reason)
        return self.error

    def render(self, console: Console) -> None:
        for report in self.models:
            _render(console, report)
        passed = sum(found.outcome is CheckOutcome.PASSED for found in self.findings)
        failed = sum(found.outcome is CheckOutcome.FAILED for found in self.findings)
        verdict = f"{failed} checks failed" if failed else "dynamic equals static"
        style = "bold green" if self.failure is None else "bold red"
        console.line(f"llama.cpp {self.tag}: {verdict}: {passed} checks passed, {self.seconds:.0f} s", style=style)


def _render(console: Console, report: Report) -> None:
    """Print the report of one model on one screen."""
    console.line(f"{report.file.name}: {report.arch}, memory class {report.memory_class}, -c {report.context}", "bold")
    rows = [
        (found.details.get("title", found.id), _word(found), found.reason, f"{found.seconds:.0f}")
        for found in report.findings
    ]
    console.table(("check", "result", "comparison", ">s"), rows)
    console.line()
    pairs = [(pair.name, pair.unit, _number(pair.static), _number(pair.dynamic)) for pair in _all_pairs(report)]
    console.table(("measured", "unit", ">static", ">dynamic"), pairs)
    if report.limits:
        console.line(f"{report.memory_class}: {report.limits}", style="dim")
    console.line()


def _word(found: Finding) -> str:
    """Return the result of a check in one word."""
    different = found.outcome is CheckOutcome.FAILED and found.status != "differs"
    return found.status if different else _WORDS[found.outcome]


def _all_pairs(report: Report) -> Sequence[Pair]:
    return (*report.memory, *report.speed)


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


@dataclass(frozen=True)
class Settings:
    """Hold the options that the programs get for every model."""

    context: int = 0  # size of the context in tokens; 0: up to 8192
    gpu_layers: int | None = None  # number of layers on the GPU; None: all
    draft: str = ""  # path of the draft model, "" for none
    mmproj: str = ""  # path of the image projector, "" for none

    @property
    def is_given(self) -> bool:
        """Return True if any of these options is on the command line."""
        return self != Settings()


def model_path(env: Env, name: str) -> Path:
    """Return the path of a model's file.

    `name` is a path, or a name that `kvtool fetch --model` knows. For such a name, the model is downloaded if needed.
    """
    file = Path(name).expanduser()
    if file.exists() or name not in models.names():
        return file
    model = models.find(name)
    models.ensure(env.project.cache, model, env.console)
    return models.folder(env.project.cache) / model.file


def subjects(env: Env, named: Sequence[str], settings: Settings, *, quick: bool) -> list[Subject]:
    """Return the models to check. `named` has files, or names of `kvtool fetch --model`."""
    more = {"draft": settings.draft, "projector": settings.mmproj}
    others = {kind: model_path(env, name) for kind, name in more.items() if name}
    return [
        own_model.subject(model_path(env, name), settings.context, settings.gpu_layers, quick=quick, **others)
        for name in named
    ]


def compare(env: Env, wanted: Sequence[Subject], bin_dir: Path, work: Path, on: Device, tag: str) -> ModelsVerified:
    """Compare a static and a dynamic cache on each model. Before, print how much memory the comparison needs."""
    started = time.monotonic()
    text = own_model.write_text(work / "text.txt")
    in_host_memory = on.label in ("", "metal", "rpc")
    sizes = [own_model.cache_bytes(bin_dir / "kv-check", what) for what in wanted]
    needed = [
        own_model.announce_memory(what, cache, env.console, in_host_memory=in_host_memory)
        for what, cache in zip(wanted, sizes, strict=True)
    ]
    reports = []
    for what, cache, needs in zip(wanted, sizes, needed, strict=True):
        folder = work / "own" / what.file.stem
        folder.mkdir(parents=True, exist_ok=True)
        reports.append(Comparison(what, bin_dir, folder, on, cache, text).run(env.console, needs))
    return ModelsVerified(tag, bin_dir, tuple(reports), time.monotonic() - started)
