"""Implement `kvtool verify`: compare the dynamic cache with the static cache, bit for bit and text for text."""

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

from typer import Option

from kvtool import process
from kvtool.commands import build, verify_model
from kvtool.compile import cmake, toolchain
from kvtool.console import Console
from kvtool.errors import DiskError, UsageError, VerifyError, must_be_writable, writing
from kvtool.locks import try_lock_dir
from kvtool.machine import available_memory, cores
from kvtool.options import (
    BinDir,
    Context,
    Cpu,
    Cuda,
    Env,
    Jobs,
    Metal,
    Preset,
    Vulkan,
    choose_backend,
    env_of,
    reject,
)
from kvtool.project import PROOF, Project
from kvtool.series.series import load_patches
from kvtool.upstream.lock import load_lock
from kvtool.verify import checks, conversation, devices, drafts, matrix, models, named, parts, plan, runner, texts
from kvtool.verify.checks import Check, Finding
from kvtool.verify.journal import Journal
from kvtool.verify.report import Verified, as_junit, class_rows
from kvtool.worktree.status import carried_files, read_applied

# prefixes of the environment variables that change how the tested programs run
_SWITCHES = ("LLAMA_", "GGML_", "CUDA_VISIBLE")
_RPC = "Use the build for the CPU, with the cache in a ggml-rpc-server on this machine."
_TEXTS = named.PROGRAMS.keys() - {"kv-check", "retype"}
_COMPARISONS = (*named.PROGRAMS, "memory")  # the checks that run unless the user chooses some


@dataclass(frozen=True)
class Options:
    quick: bool = False
    matrix: bool = False
    markdown: Path | None = None
    models: str = ""
    patch: str = ""
    jobs: int = 0
    junit: Path | None = None
    backend: str = "cpu"
    preset: str = "release"
    bin_dir: Path | None = None
    own: tuple[str, ...] = ()  # models of the user: paths of files, or names of kvtool fetch --model
    settings: verify_model.Settings = field(default_factory=verify_model.Settings)  # settings for these models

    @property
    def mode(self) -> str:
        """Return the name of the chosen set of checks, for the report."""
        how = "quick" if self.quick else "matrix" if self.matrix else "full"
        return f"{how}, patch {self.patch}" if self.patch else how


def _check(options: Options) -> None:
    """Reject bad combinations of options before the checks, which can run for hours."""
    reject(
        "verify",
        (options.quick and options.matrix, "--quick and --matrix are opposites"),
        (options.patch and options.matrix, "--patch and --matrix are two choices"),
        (options.patch and options.models, "--patch and --models are two choices"),
        (options.markdown and not options.matrix, "--markdown writes the table of --matrix, so it needs --matrix"),
        (
            options.own and (options.matrix or options.models or options.patch),
            "--model checks only models of yours; --matrix, --models and --patch check kvtool's own",
        ),
        (options.settings.is_given and not options.own, "-c, -ngl, --draft and --mmproj are for --model FILE"),
        (options.jobs < 0, f"--jobs {options.jobs} is negative; 0 means one job per core"),
    )
    for file in filter(None, (options.junit, options.markdown)):
        must_be_writable(file)


def kinds_of(project: Project, options: Options) -> frozenset[str]:
    """Return the checks to run, by their names in series.toml."""
    if options.patch:
        return named.tests_of(load_patches(project), options.patch, project.cpp)
    applied = read_applied(project.tree)
    groups = applied.groups if applied else ()
    kinds = named.kinds_for(("kv-check",) if options.matrix or options.models else _COMPARISONS, groups)
    if not kinds:
        why = f"verify compares static and dynamic caches, and the tree has only {', '.join(groups)}"
        raise UsageError("there is nothing to verify in this tree", why=why, next_step="kvtool apply")
    return frozenset(kinds)


@contextlib.contextmanager
def programs(env: Env, options: Options, kinds: frozenset[str]) -> Iterator[Path]:
    """Yield the folder of the programs.

    Programs that kvtool builds are locked, so that no other build replaces them during the checks. With --bin, the
    named folder is used without building and without locking.
    """
    if options.bin_dir is not None:
        yield options.bin_dir.absolute()
        return
    backend, more = ("cpu", (cmake.RPC_SERVER,)) if options.backend == "rpc" else (options.backend, ())
    if "kv-check" in kinds and not any(PROOF in PurePosixPath(file).parents for file in carried_files(env.project)):
        why = f"verify tests the dynamic cache, and its test program cpp/{PROOF} is missing"
        raise UsageError("this series has nothing to verify", why=why, next_step="kvtool build builds it")
    more = (*more, *(verify_model.TARGETS if options.own else ()))
    targets = (*named.targets(kinds, env.project.cpp), *more)
    wanted = build.Options(backend=backend, preset=options.preset, targets=targets)
    built = build.build_project(env, wanted)
    with try_lock_dir(built.build_dir, VerifyError, "is building"):
        yield built.bin_dir


@dataclass(frozen=True)
class Verification:
    """Run all checks of one call of `kvtool verify`.

    told: actions that run after the findings are written
    """

    project: Project
    console: Console
    options: Options
    kinds: frozenset[str]
    bin_dir: Path
    work: Path
    on: devices.Device
    told: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def run(self, tag: str) -> list[Finding]:
        """Run all chosen checks, one kind after the other.

        tag: the upstream tag
        """
        found = self._units()
        if self.kinds & named.PROGRAMS.keys():
            toys = self._toys()
            if "kv-check" in self.kinds:
                found += self._matrix(toys, tag) if self.options.matrix else self._kv_checks(toys, tag)
            if "retype" in self.kinds:
                # compare with cells of the CPU, because a device may round differently
                retypes = plan.retypes(toys, quick=self.options.quick)
                found += self._all(retypes, (devices.IN_MEMORY,) * len(self.on.lanes))
            if self.kinds & _TEXTS:
                found += self._texts(toys)
        return found + self._memory() if "memory" in self.kinds else found

    def program(self, name: str) -> Path:
        """Return the path of a program of the build."""
        return process.require_program(self.bin_dir, name, VerifyError, "kvtool build, without --target")

    def _units(self) -> list[Finding]:
        """Run the chosen C++ unit tests and the check of llama-server's presets.

        The presets are checked only if a patch names this check in series.toml.
        """
        units = [
            Check(f"unit/{name}", "unit", self.program(name), "unit tests", timeout=named.UNIT_SECONDS)
            for name in named.unit_tests(self.project.cpp)
            if name in self.kinds
        ]
        found = self.console.each("C++ unit tests", units, named.unit, lambda check: check.model.name)
        if "preset" in self.kinds:
            presets = Check("preset", "preset", self.project.tree, "presets")
            found.append(named.preset(presets, toolchain.find("cmake").path))
        return found

    def _toys(self) -> tuple[Path, ...]:
        generator, wanted = self.program("test-llama-archs"), self.options.models
        with self.console.progress("making upstream's toy models") as bar:
            toys = models.toys(generator, self.work, lambda made: bar.update(made, f"{made} models"))
        chosen = tuple(checks.toys_like(toys, wanted))
        if not chosen:
            raise UsageError(f"no toy model is called {wanted}", next_step="kvtool verify --models 'llama*'")
        return chosen

    def _kv_checks(self, toys: Sequence[Path], tag: str) -> list[Finding]:
        chosen, quick, label = bool(self.options.models), self.options.quick, self.on.label
        every = not (quick or chosen)
        wanted = plan.kv_checks(toys, quick=quick, chosen=chosen, by_copy=bool(label))
        wanted += self._drafts(toys) if every else []
        found = self._all(plan.on_device(label, (), wanted), self.on.lanes)
        if every:
            return [*found, checks.judge_grown(found, tag, label)]
        return found if chosen else [*found, *checks.judge_quick_grown(found, tag, label)]

    def _all(
        self, planned: Sequence[Check], lanes: Sequence[devices.Lane], on_finding: runner.OnFinding = lambda *_: None
    ) -> list[Finding]:
        title = f"kv-check on {len({check.model for check in planned})} models"
        with self.console.progress(title, len(planned)) as bar:
            return runner.kv_checks(planned, self.program("kv-check"), lanes, bar.update, on_finding)

    def _drafts(self, toys: Sequence[Path]) -> list[Check]:
        """Return the checks of two draft models.

        One draft model shares the cells of its target model. The other is the MTP layer of its target model.
        """
        planned: list[Check] = []
        if (self.project.tree / "src" / "models" / "gemma4-assistant.cpp").is_file():
            target, draft = drafts.draft_pair(self.work)
            planned.append(plan.draft("gemma4", target, "-md", str(draft)))
        for toy in checks.named_toys(toys, (drafts.MTP_TOY,)):
            planned.append(plan.draft(f"{toy.stem}-mtp", drafts.mtp_model(toy, self.work), "--mtp"))
        return planned

    def _matrix(self, toys: Sequence[Path], tag: str) -> list[Finding]:
        """Run the checks of --matrix with the cache in host memory, then with the cache on the device, if there is one.

        Skip the checks that an earlier, interrupted run has finished.
        """
        label, lanes = self.on.label, self.on.lanes
        planned = [(matrix.in_memory(toys), (devices.IN_MEMORY,) * len(lanes))]
        planned += [(matrix.on_device(toys, label), lanes)] if label else []
        wanted = [check for some, _ in planned for check in some]
        journal = self._journal(toys, wanted)
        if known := journal.known:
            said = f"{len(known)} of {len(wanted)} checks were done by an earlier run that was interrupted"
            self.console.step(said)
        for some, free in planned:
            found = self._all([check for check in some if check.id not in known], free, journal.add)
            known |= {finding.id: finding for finding in found}
        every = [known[check.id] for check in wanted]
        self.told.callback(journal.forget)
        least = 0 if self.options.models else checks.expected_grown(tag, len(toys))
        return [*every, matrix.judge_grown(every, least)]

    def _journal(self, toys: Sequence[Path], checks: Sequence[Check]) -> Journal:
        switches = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_SWITCHES))
        of = (toys[0].parent.name, platform.node(), *switches, *map(str, checks))
        return Journal(self.work, models.fingerprint(models.programs(self.program("kv-check")), *of))

    def _speakers(self, toys: Sequence[Path]) -> dict[str, Path]:
        """Make models that read and write text.

        There is one model for each memory class (kind of llama.cpp's cache). With --quick, there are only two models.
        """
        wanted = checks.named_toys(toys, checks.CLASS_TOYS[:2] if self.options.quick else checks.CLASS_TOYS)
        vocabulary = self.project.tree / "models" / models.VOCABULARY
        if wanted and not vocabulary.is_file():
            raise VerifyError("upstream's vocabulary file is missing", why=f"{vocabulary} does not exist")
        title, spoken = "making models that speak", lambda toy: models.text_model(toy, vocabulary, self.work)
        made = self.console.each(title, wanted, spoken, lambda toy: toy.stem)
        return {toy.stem: model for toy, model in zip(wanted, made, strict=True)}

    def _texts(self, toys: Sequence[Path]) -> list[Finding]:
        texts = plan.texts(self._speakers(toys), quick=self.options.quick)
        planned = plan.on_device(self.on.label, self.on.tools, [check for check in texts if check.kind in self.kinds])
        return self.console.each("texts with and without the flag", planned, self._text, lambda check: check.id)

    def _text(self, check: Check) -> Finding:
        work, program = self.work / "runs", self.program(named.PROGRAMS[check.kind])
        work.mkdir(parents=True, exist_ok=True)
        if check.kind == "bench":
            return texts.bench(check, program)
        if check.kind == "server":
            script = conversation.QUICK_SCRIPT if self.options.quick else conversation.FULL_SCRIPT
            return conversation.serve(check, program, work, script)
        if check.kind == "parts":
            return parts.check_load_unload(check, program, work)
        return texts.completion(check, program, work)

    def _memory(self) -> list[Finding]:
        model = models.cache_model(models.QWEN35_27B, self.work)
        check = Check(f"memory/{models.QWEN35_27B.name}/131072", "memory", model, timeout=300)
        with self.console.progress("resident memory of a 131072-token context"):
            return [runner.memory(check, self.program("kv-check"), available_memory())]


class _Prepared(NamedTuple):
    """Hold everything that a run needs."""

    tag: str  # upstream tag
    work: Path  # folder for models and logs
    bin_dir: Path
    on: devices.Device


@contextlib.contextmanager
def _prepared(env: Env, options: Options, kinds: frozenset[str], folder: str) -> Iterator[_Prepared]:
    """Build the programs, and lock the folder of the models and logs."""
    project = env.project
    applied = read_applied(project.tree)
    tag = applied.tag if applied else load_lock(project.lock).current
    work = models.workplace(project, folder, applied=applied is not None)
    with (
        # lock this folder first: a second verify then reports a running verify instead of a running build
        try_lock_dir(work, VerifyError, "verify is running"),
        programs(env, options, kinds) as bin_dir,
        devices.device(options.backend, bin_dir, work, options.jobs or cores()) as on,
    ):
        yield _Prepared(tag, work, bin_dir, on)


def verify_models(env: Env, options: Options) -> verify_model.ModelsVerified:
    """Compare a static and a dynamic cache on the models that the user named."""
    env.project.require_llama_cpp("verify")
    _check(options)
    # read the models before the build, so that an unusable file is reported at once
    wanted = verify_model.subjects(env, options.own, options.settings, quick=options.quick)
    with _prepared(env, options, verify_model.KINDS, "verify-model") as ready:
        found = verify_model.compare(env, wanted, ready.bin_dir, ready.work, ready.on, ready.tag)
    try:
        with writing("the report", "name another file"):
            if options.junit is not None:
                options.junit.write_text(as_junit(found.findings), "utf-8")
    except DiskError as err:
        return replace(found, error=err)
    return found


def verify_programs(env: Env, options: Options) -> Verified:
    """Build the programs, run the checks, and write the reports."""
    project, console = env.project, env.console
    project.require_llama_cpp("verify")
    started = time.monotonic()
    _check(options)
    kinds = kinds_of(project, options)
    with _prepared(env, options, kinds, "verify") as ready:
        tag, bin_dir = ready.tag, ready.bin_dir
        under_way = Verification(project, console, options, kinds, bin_dir, ready.work, ready.on)
        everything = under_way.run(tag)
    took, rows = time.monotonic() - started, class_rows(everything)
    result = Verified(tag, options.mode, bin_dir, rows, tuple(everything), options.junit, took)
    try:
        with writing("the report", "name another file"):
            if options.junit is not None:
                options.junit.write_text(as_junit(everything), "utf-8")
            if options.markdown is not None:
                table = matrix.table(everything)
                options.markdown.write_text(f"{table}\n{matrix.pairs(everything)}", "utf-8")
    except DiskError as err:  # report the findings even if the report cannot be written
        return replace(result, error=err)
    under_way.told.close()
    return result


def command(
    ctx: Context,
    quick: Annotated[
        bool,
        Option("--quick", help="Check only one or two models for each kind of llama.cpp's cache. This needs minutes."),
    ] = False,
    matrix: Annotated[
        bool,
        Option("--matrix", help="Run only kv-check, with all cell types, numbers of sequences and kinds of growth."),
    ] = False,
    markdown: Annotated[
        Path | None, Option("--markdown", metavar="FILE", help="With --matrix: also write its table.")
    ] = None,
    models: Annotated[
        str,
        Option(
            "--models",
            metavar="GLOB,...",
            help="Run only kv-check, and only on the test models with these names, such as 'qwen*'.",
        ),
    ] = "",
    patch: Annotated[
        str, Option("--patch", metavar="ID", help="Run only the tests that series.toml names for this patch.")
    ] = "",
    model: Annotated[
        list[str] | None,
        Option("--model", metavar="FILE", help="Check this model instead: a GGUF file, smollm2 or gemma3."),
    ] = None,
    context: Annotated[
        int,
        Option("--ctx-size", "-c", metavar="N", help="With --model: the size of the context in tokens [up to 8192]."),
    ] = 0,
    gpu_layers: Annotated[
        int | None,
        Option("--n-gpu-layers", "-ngl", metavar="N", help="With --model: number of layers on the GPU [all]."),
    ] = None,
    draft: Annotated[
        str, Option("--draft", metavar="FILE", help="With --model: also check this draft model in llama-server.")
    ] = "",
    mmproj: Annotated[
        str, Option("--mmproj", metavar="FILE", help="With --model: also check this image projector in llama-server.")
    ] = "",
    jobs: Jobs = 0,
    junit: Annotated[Path | None, Option("--junit", metavar="FILE", help="Also write a JUnit report.")] = None,
    cpu: Cpu = False,
    metal: Metal = False,
    cuda: Cuda = False,
    vulkan: Vulkan = False,
    rpc: Annotated[bool, Option("--rpc", help=_RPC)] = False,
    preset: Preset = "release",
    bin_dir: BinDir = None,
) -> Verified | verify_model.ModelsVerified:
    """Prove that the dynamic cache produces the same results as the static cache.

    Builds the programs. Then kv-check compares every logit of every decode, bit for bit, with flash attention on and
    off. It uses llama.cpp's own test models, which are tiny and have random weights. Other checks cover changes of the
    cells' types, draft models, the loading and unloading of a projector and a draft model, and the resident memory of
    a context as large as Qwen3.5-27B's. The texts of llama-completion, llama-bench and llama-server are compared
    with and without --kv-dynamic.

    The cache is in host memory. With --metal, --cuda or --vulkan it is in the memory of that GPU, and with --rpc in a
    ggml-rpc-server on this machine. --matrix needs one or two hours. After an interruption, the same command continues.

    With --model, a model of yours is checked instead: the logits of real text, chats with llama-server, saved states,
    changes of the cells' types, memory and speed.

        kvtool verify --quick             # the main checks, in minutes
        kvtool verify --models 'gemma*'   # kv-check on some models only
        kvtool verify --patch state       # the tests that series.toml names for the patch `state`
        kvtool verify --metal             # the same with the cache on a Mac's GPU
        kvtool verify --matrix --rpc --markdown table.md
        kvtool verify --model ~/models/qwen.gguf -c 32768

    Exit codes: 4 the tree does not match patches/ and cpp/, 7 the build failed, 8 a result differs, a program crashes
    or a cache does not grow.
    """
    options = Options(
        quick=quick,
        matrix=matrix,
        markdown=markdown,
        models=models,
        patch=patch,
        jobs=jobs,
        junit=junit,
        backend=choose_backend(cpu=cpu, metal=metal, cuda=cuda, vulkan=vulkan, rpc=rpc),
        preset=preset,
        bin_dir=bin_dir,
        own=tuple(model or ()),
        settings=verify_model.Settings(context, gpu_layers, draft, mmproj),
    )
    env = env_of(ctx)
    return verify_models(env, options) if options.own else verify_programs(env, options)
