"""The steps of `kvtool verify`: what is built and made for it, and each kind of comparison."""

import contextlib
import fnmatch
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from kvtool.build import cmake, toolchain
from kvtool.commands import build
from kvtool.console import Console, Progress
from kvtool.errors import UsageError, VerifyError
from kvtool.machine import available_memory
from kvtool.options import Backend, BinDir, Jobs, Preset
from kvtool.project import Project
from kvtool.verify import checks, conversation, devices, drafts, matrix, models, named, plan, runner, texts
from kvtool.verify.checks import Check, Finding
from kvtool.verify.journal import Journal

_SWITCHES = ("LLAMA_", "GGML_", "CUDA_VISIBLE")  # what programs under test read of the environment
TARGETS = (*cmake.VERIFY_TARGETS, "llama-completion", "llama-bench", "llama-server")


@dataclass(frozen=True)
class Options:
    quick: Annotated[bool, typer.Option("--quick", help="Two minutes: one or two models per memory class.")] = False
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="Only kv-check, on every kind of cache: types, sequences, in place and by copy."),
    ] = False
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Also write the table of --matrix.", show_default=False),
    ] = None
    models: Annotated[
        str, typer.Option("--models", metavar="GLOB,...", help="Only kv-check, only on these toys, such as 'qwen*'.")
    ] = ""
    patch: Annotated[
        str, typer.Option("--patch", metavar="ID", help="Only the tests that series.toml names for this patch.")
    ] = ""
    jobs: Jobs = 0
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report.", show_default=False)
    ] = None
    backend: Backend = "cpu"
    preset: Preset = "release"
    bin_dir: BinDir = None

    @property
    def mode(self) -> str:
        how = "quick" if self.quick else "matrix" if self.matrix else "full"
        return f"{how}, patch {self.patch}" if self.patch else how

    @property
    def only_kv_check(self) -> bool:
        return self.matrix or bool(self.models)

    def refuse_contradictions(self) -> None:
        """UsageError for options that make no sense together."""
        if self.quick and self.matrix:
            raise UsageError("--quick and --matrix are opposites", next_step="leave one of them out")
        if self.patch and self.matrix:
            raise UsageError("--patch and --matrix are two choices", next_step="leave one of them out")
        if self.patch and self.models:
            raise UsageError("--patch and --models are two choices", next_step="leave one of them out")
        if self.markdown is not None and not self.matrix:
            raise UsageError("--markdown writes the table of --matrix", next_step="give both, or neither")
        if self.jobs < 0:
            raise UsageError(f"--jobs {self.jobs} makes no sense", next_step="--jobs 0 is one per core")


@dataclass(frozen=True)
class Bench:
    """Where everything is: the programs under test, the files made for them, upstream's tree.

    told: what is to be done once the findings are written down.
    """

    bin_dir: Path
    work: Path
    tree: Path
    told: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def program(self, name: str) -> Path:
        """A program in bin_dir. Raises VerifyError when it is not there."""
        for file in (self.bin_dir / name, self.bin_dir / f"{name}.exe"):
            if file.is_file():
                return file
        raise VerifyError(f"{name} is not in {self.bin_dir}", next_step="kvtool build, without --target")


def prepare(project: Project, console: Console, options: Options, kinds: frozenset[str] | None) -> Bench:
    """Build what is verified, or take --bin's programs as they are."""
    if options.bin_dir is not None:
        bin_dir = options.bin_dir.absolute()
    else:
        programs = TARGETS if kinds is None else named.targets(kinds, project.cpp)
        targets = (*programs, *cmake.BACKENDS[options.backend].targets)
        wanted = build.Options(backend=options.backend, preset=options.preset, targets=targets)
        bin_dir = build.run(project, console, wanted).bin_dir
    return Bench(bin_dir, project.tree / "build" / "verify", project.tree)


def _make_toys(bench: Bench, console: Console, options: Options) -> tuple[Path, ...]:
    generator = bench.program("test-llama-archs")
    with console.progress("making upstream's toy models", None) as bar:
        toys = models.toys(generator, bench.work, lambda made: bar.update(made, f"{made} models"))
    globs = options.models.split(",") if options.models else ["*"]
    chosen = tuple(t for t in toys if any(fnmatch.fnmatch(t.stem, glob) for glob in globs))
    if not chosen:
        raise UsageError(f"no toy model is called {options.models}", next_step="kvtool verify --models 'llama*'")
    return chosen


def _kv_checks(
    bench: Bench, console: Console, toys: Sequence[Path], options: Options, on: devices.Device
) -> list[Finding]:
    program = bench.program("kv-check")
    if options.matrix:
        return _matrix(bench, console, toys, on)
    wanted = plan.kv_checks(toys, quick=options.quick, chosen=bool(options.models))
    if not options.quick and not options.models:
        wanted += _drafts(bench, toys)
    planned = plan.on_device(on.label, (), wanted)
    with _kv_check_progress(console, planned) as bar:
        return runner.kv_checks(planned, program, on.lanes, bar.update)


def _drafts(bench: Bench, toys: Sequence[Path]) -> list[Check]:
    """The drafts that upstream's tree knows: one that shares the cells of its target, and an MTP layer."""
    planned: list[Check] = []
    if (bench.tree / "src" / "models" / "gemma4-assistant.cpp").is_file():
        pair = drafts.pair(bench.work)
        planned.append(plan.draft("gemma4", pair.target, "-md", str(pair.draft)))
    for toy in checks.named_toys(toys, (drafts.MTP_TOY,)):
        planned.append(plan.draft(f"{toy.stem}-mtp", drafts.mtp(toy, bench.work), "--mtp"))
    return planned


def _kv_check_progress(console: Console, planned: Sequence[Check]) -> contextlib.AbstractContextManager[Progress]:
    return console.progress(f"kv-check on {len({c.model for c in planned})} models", float(len(planned)))


def _matrix(bench: Bench, console: Console, toys: Sequence[Path], on: devices.Device) -> list[Finding]:
    """All of --matrix, in host memory and on the device; takes over what an interrupted one found out."""
    program = bench.program("kv-check")
    planned = [(matrix.in_memory(toys), (devices.IN_MEMORY,) * len(on.lanes))]
    planned += [(matrix.on_device(toys, on.label), on.lanes)] if on.label else []
    checks = [check for some, _ in planned for check in some]
    journal = _journal(bench, toys, on)
    known = journal.known(checks)
    if known:
        console.step(f"{len(known)} of {len(checks)} runs are known from a run of these programs that did not end")
    for some, lanes in planned:
        todo = [check for check in some if check.id not in known]
        with _kv_check_progress(console, todo) as bar:
            found = runner.kv_checks(todo, program, lanes, bar.update, journal.add)
        known |= {finding.id: finding for finding in found}
    every = [known[check.id] for check in checks]
    bench.told.callback(journal.forget, checks)
    return [*every, matrix.judge_grown(every)]


def _journal(bench: Bench, toys: Sequence[Path], on: devices.Device) -> Journal:
    switches = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_SWITCHES))
    of = (toys[0].parent.name, on.label, platform.node(), *switches)
    return Journal(bench.work, models.fingerprint(models.programs(bench.program("kv-check")), *of))


def _speakers(bench: Bench, console: Console, toys: Sequence[Path], quick: bool) -> dict[str, Path]:
    """Models that read and write text: of every memory class, or two for --quick."""
    wanted = checks.named_toys(toys, checks.CLASS_TOYS[:2] if quick else checks.CLASS_TOYS)
    vocabulary = bench.tree / "models" / models.VOCABULARY
    speakers: dict[str, Path] = {}
    if not wanted:
        return speakers
    if not vocabulary.is_file():
        raise VerifyError("upstream's vocabulary file is missing", why=f"{vocabulary} does not exist")
    with console.progress("making models that speak", float(len(wanted))) as bar:
        for number, toy in enumerate(wanted):
            bar.update(number, toy.stem)
            speakers[toy.stem] = models.spoken(toy, vocabulary, bench.work)
    return speakers


def _texts(
    bench: Bench,
    console: Console,
    toys: Sequence[Path],
    options: Options,
    on: devices.Device,
    kinds: frozenset[str] | None,
) -> list[Finding]:
    wanted = plan.only(kinds, plan.texts(_speakers(bench, console, toys, options.quick), quick=options.quick))
    planned = plan.on_device(on.label, on.tools, wanted)
    script = conversation.QUICK_SCRIPT if options.quick else conversation.FULL_SCRIPT
    work = bench.work / "runs"
    work.mkdir(parents=True, exist_ok=True)
    found: list[Finding] = []

    with console.progress("texts with and without the flag", float(len(planned))) as bar:
        for check in planned:
            bar.update(len(found), check.id)

            def note(run: str, check: Check = check) -> None:
                bar.update(len(found), f"{check.id} {run}")

            if check.kind == "completion":
                found.append(texts.completion(check, bench.program("llama-completion"), work))
            elif check.kind == "bench":
                found.append(texts.bench(check, bench.program("llama-bench")))
            else:
                found.append(conversation.serve(check, bench.program("llama-server"), work, script, note))
    return found


def _memory(bench: Bench, console: Console) -> list[Finding]:
    model = models.cache_model(models.QWEN35_27B, bench.work)
    check = Check(f"memory/{models.QWEN35_27B.name}/131072", "memory", model, timeout=300)
    with console.progress("resident memory of a 131072-token context", None):
        return [runner.memory(check, bench.program("kv-check"), available_memory())]


def compare(
    bench: Bench, console: Console, options: Options, on: devices.Device, tag: str, kinds: frozenset[str] | None
) -> list[Finding]:
    """Every comparison of a static with a dynamic cache that was asked for; kinds None: all of them."""
    found: list[Finding] = []
    if kinds is None or kinds & {"kv-check", "completion", "bench", "server"}:
        toys = _make_toys(bench, console, options)
        if kinds is None or "kv-check" in kinds:
            found += _kv_checks(bench, console, toys, options, on)
            if not options.quick and not options.models and not options.matrix:
                found.append(checks.judge_grown(found, tag, on.label))
        if not options.only_kv_check and (kinds is None or kinds - {"kv-check"}):
            found += _texts(bench, console, toys, options, on, kinds)
    if not options.only_kv_check and (kinds is None or "memory" in kinds):
        found += _memory(bench, console)
    return found


def run_named(bench: Bench, project: Project, console: Console, kinds: frozenset[str]) -> list[Finding]:
    """What a patch can name beside the comparisons."""
    units = [name for name in named.unit_tests(project.cpp) if name in kinds]
    found: list[Finding] = []
    with console.progress("C++ unit tests", float(len(units))) as bar:
        for name in units:
            bar.update(len(found), name)
            found.append(named.unit(name, bench.program(name)))
    if "preset" in kinds:
        found.append(named.preset(bench.tree, toolchain.find_cmake().path))
    return found
