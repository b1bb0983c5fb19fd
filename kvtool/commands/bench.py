"""`kvtool bench`: what a static cache and the two kinds of dynamic ones cost, side by side in one run."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvtool import machine
from kvtool.alone import alone
from kvtool.bench import bars, baseline, files, geometry, plan, plots, runner, summary
from kvtool.bench.plan import Plan
from kvtool.bench.report import Benched
from kvtool.build import cmake
from kvtool.commands import build
from kvtool.console import Console
from kvtool.env import Env
from kvtool.errors import MeasureError, UsageError
from kvtool.project import Project
from kvtool.upstream.lock import load_lock

TARGETS = (cmake.BENCH_TARGET, "llama-bench", "llama-batched-bench")


@dataclass(frozen=True)
class Options:
    """What to measure. models: a glob over the names ("" for the mode's); repeats, n_ctx: 0 for the mode's.

    baseline: programs of an unpatched build; bin_dir: programs to measure as they are; out: where files go.
    """

    quick: bool = False
    full: bool = False
    models: str = ""
    repeats: int = 0
    threads: int = 1
    n_ctx: int = 0
    baseline: Path | None = None
    bin_dir: Path | None = None
    out: Path | None = None
    strict: bool = False


def make_plan(options: Options) -> Plan:
    """The plan; UsageError for options that make no sense."""
    if options.quick and options.full:
        raise UsageError("--quick and --full are opposites", next_step="leave one of them out")
    for name, value, least in (("repeats", options.repeats, 0), ("threads", options.threads, 1)):
        if value < least:
            raise UsageError(f"--{name} {value} makes no sense", next_step=f"--{name} {least} or more")
    if options.n_ctx and options.n_ctx < 1024:
        raise UsageError(f"--ctx {options.n_ctx} is too small to measure in", next_step="--ctx 1024 or more")
    chosen = [m for m in geometry.MODELS if fnmatch.fnmatch(m.name.lower(), options.models.lower())]
    if options.models and not chosen:
        names = ", ".join(m.name for m in geometry.MODELS)
        raise UsageError(f"no model is called {options.models}", next_step=f"one of {names}, or a glob")
    return plan.make(
        quick=options.quick,
        full=options.full,
        models=chosen,
        repeats=options.repeats,
        threads=options.threads,
        n_ctx=options.n_ctx,
    )


def _programs(project: Project, console: Console, options: Options) -> Path:
    if options.bin_dir is not None:
        return options.bin_dir.absolute()
    return build.run(project, console, build.Options(targets=TARGETS)).bin_dir


def _measure(
    console: Console, planned: Plan, bin_dir: Path, options: Options, work: Path
) -> tuple[runner.Measured, tuple[bars.Bar, ...]]:
    program = baseline.program(bin_dir, cmake.BENCH_TARGET)
    if program is None:
        raise MeasureError(
            f"{cmake.BENCH_TARGET} is not in {bin_dir}", next_step=f"kvtool build --target {cmake.BENCH_TARGET}"
        )
    with console.progress("making models of random weights", None):
        made = runner.make_models(planned, work)
    todo = float(len(plan.runs(planned)))
    with console.progress("measuring static, copy and in-place", todo) as bar:
        measured = runner.measure(planned, program, made, bar.update)
    found = bars.bars(planned, measured)
    if options.baseline is not None:
        turns = 2 * planned.repeats  # a difference of 1 % needs more turns than one of a factor
        model = planned.models[0]
        with console.progress("patched against unpatched, flag off", float(turns)) as bar:
            sides = baseline.measure(
                bin_dir, options.baseline.absolute(), made[model.name], turns, planned.threads, bar.update
            )
        found += baseline.bars(*sides, model.name)
    return measured, found


def run(project: Project, console: Console, options: Options) -> Benched:
    """Measure what the options ask for; a bar that is missed is in the result, not an exception.

    Raises UsageError, TreeError for a stale tree, BuildError, MissingToolError without matplotlib when --out is given,
    DiskError, and MeasureError when something could not be measured.
    """
    started = time.monotonic()
    planned = make_plan(options)
    if options.out is not None:
        plots.require()
    bin_dir = _programs(project, console, options)
    work = project.tree / "build" / "bench"
    work.mkdir(parents=True, exist_ok=True)
    with alone(work, MeasureError, "bench is running"):
        measured, found = _measure(console, planned, bin_dir, options, work)
    result = Benched(
        load_lock(project.lock).current,
        planned.mode,
        bin_dir,
        machine.machine(),
        planned.n_ctx,
        planned.depths,
        planned.repeats,
        planned.threads,
        tuple(m.name for m in planned.models),
        found,
        summary.summarize(planned, measured),
        measured.skipped,
        options.strict,
        (),
        time.monotonic() - started,
    )
    if options.out is None:
        return result
    written = files.write(options.out, result, plots.draw(result.summary))
    return dataclasses.replace(result, files=written)


def command(
    env: Env,
    quick: Annotated[
        bool, typer.Option("--quick", help="Some minutes: one model, up to 8192 cells, two runs of each.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Also 40009, 64009 and 80009 tokens.")] = False,
    models: Annotated[str, typer.Option("--models", metavar="GLOB", help="Only these models, such as 'gemma*'.")] = "",
    repeats: Annotated[int, typer.Option("--repeats", "-r", metavar="N", help="Runs of each; 0: 3, or 2.")] = 0,
    threads: Annotated[
        int, typer.Option("--threads", "-t", metavar="N", help="Threads to compute with. Growing takes one.")
    ] = 1,
    ctx: Annotated[int, typer.Option("--ctx", "-c", metavar="N", help="Cells; 0: 131072.")] = 0,
    baseline_dir: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            metavar="DIR",
            help="Programs of an unpatched build, for the cost of the patches without the flag.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Also write bench.md, .json, .csv and plots.", show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 8 when a bar is missed.")] = False,
    bin_dir: Annotated[
        Path | None,
        typer.Option("--bin", metavar="DIR", help="Measure the programs in DIR; build nothing.", show_default=False),
    ] = None,
) -> Benched:
    """Measure what the dynamic cache costs and saves.

    Builds what it needs, then runs a static cache, one that grows by copy and one that grows in place, taking turns, on
    random weights with the cache geometry of Qwen3.5-27B, Gemma 3 4B (sliding windows) and DeepSeek-V2-Lite (MLA):
    creation, memory at each depth, growth against plain memcpy and page commits on this machine, speed, memory after a
    clear; and holds the figures against the project's bars. A side that does not fit into memory is left out.

        kvtool bench --quick                             some minutes
        kvtool bench --full --out bench                  everything, with plots (pip install 'kvtool[bench]')
        kvtool bench --baseline ../llama.cpp/build/bin   also against an unpatched build

    Exit codes: 4 stale tree, 7 build, 8 could not be measured, or with --strict a bar was missed.
    """
    options = Options(quick, full, models, repeats, threads, ctx, baseline_dir, bin_dir, out, strict)
    return run(env.project, env.console, options)
