"""Implement `kvtool canary`: test the series on the newest upstream tag, and write one report for CI."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvtool.canary import SCHEMA, Breakage, CanaryStep, StepName, newest, of_error, of_patches, of_verified
from kvtool.commands import build, init, rebase, verify
from kvtool.compile import toolchain
from kvtool.console import Console
from kvtool.errors import ConflictError, KvtoolError, UsageError, must_be_writable
from kvtool.options import BACKENDS, Context, Env, Mirror, env_of, reject
from kvtool.project import LLAMA_CPP, Project, read_text
from kvtool.replay.apply import PatchReport
from kvtool.result import CheckOutcome, Result
from kvtool.upstream import sources
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock, load_lock, pin
from kvtool.worktree.status import write_json


@dataclass(frozen=True)
class CanaryResult(Result, command="canary"):
    """Report a trial of the series on an upstream tag.

    schema: the version of the format of this document
    tag_from: "given" if the user named the tag; else where the newest tag is from: the remote's URL, or "upstream.lock"
    tag_why: the reason why the remote was not used, "" if it was used
    tree: the id of upstream's git tree, "" if the tag could not be fetched
    locked: the current tag of upstream.lock
    key: a hash of the first breakage, which is equal in every run with this breakage; "" if nothing is broken
    patches: the report of each patch, as in kvtool rebase --dry-run
    error: the error of the step that failed
    """

    schema: int
    tag: str
    tag_from: str
    tag_why: str
    tree: str
    locked: str
    key: str
    steps: tuple[CanaryStep, ...]
    breakages: tuple[Breakage, ...]
    patches: tuple[PatchReport, ...]

    def render(self, console: Console) -> None:
        origin = {"given": ""}.get(self.tag_from, f", the newest tag according to {self.tag_from}")
        console.line(f"{console.upstream} {self.tag}{origin}")
        if self.tag_why:
            console.line(f"  the remote could not be reached: {self.tag_why}", "yellow")
        rows = [(step.name, step.outcome, f"{step.seconds:.1f}", step.summary) for step in self.steps]
        console.table(("step", "outcome", ">s", ""), rows)
        for breakage in self.breakages:
            console.line(f"  {breakage.step}: {breakage.what}", "red")
        if self.key:
            console.line(f"key of this breakage: {self.key}")
        else:
            done = [step.name for step in self.steps if step.outcome is CheckOutcome.PASSED]
            console.line(f"the series holds on {self.tag}: {', '.join(done)}", "green")


_STEPS = ", ".join(StepName)


@dataclass(frozen=True)
class Options:
    tag: str = "latest"
    mirror: str | None = None
    last: StepName = StepName.VERIFY
    full: bool = False
    backend: str = "cpu"
    report: Path | None = None
    work: Path | None = None


@dataclass
class _Run:
    """Run the steps on one upstream tag, and collect their results.

    inside: the environment of a temporary copy of the project, made on first use; all steps work in this copy
    """

    project: Project
    console: Console
    options: Options
    lock: Lock
    tag: str
    inside: Env
    steps: list[CanaryStep] = field(default_factory=list)
    breakages: tuple[Breakage, ...] = ()
    patches: tuple[PatchReport, ...] = ()
    error: KvtoolError | None = None
    tree: str = ""

    def go(self) -> None:
        """Run the steps in order, until a step fails or the last requested step is done.

        Record the steps that did not run as skipped.
        """
        actions = (self._fetch, self._rebase, self._build, self._verify)
        wanted = True
        for name, action in zip(StepName, actions, strict=True):
            self.steps.append(self._step(name, action) if wanted else CanaryStep(name, CheckOutcome.SKIPPED))
            wanted = wanted and self.error is None and name is not self.options.last

    def _step(self, name: StepName, action: Callable[[], str]) -> CanaryStep:
        """Run one step, and return its record.

        `action` returns a summary on success. If it fails, it raises a KvtoolError or sets self.error.
        """
        started, summary, log = time.monotonic(), "", ""
        try:
            summary = action()
        except KvtoolError as err:
            self.error, self.breakages = err, (of_error(name, err),)
        if self.error is not None:
            summary = summary or self.error.what
            log = "\n".join(self.error.output.strip().splitlines()[-40:])
        outcome = CheckOutcome.FAILED if self.error else CheckOutcome.PASSED
        return CanaryStep(name, outcome, round(time.monotonic() - started, 1), summary, log)

    def _fetch(self) -> str:
        cache = Cache(self.project.cache)
        grown, fetched = sources.ensure_tag(cache, self.lock, self.tag, self.console, self.options.mirror)
        self.tree, lock = grown.upstream(self.tag).tree, self.inside.project.lock
        # add the tag to the copy's lock, so that rebase does not fetch it again; the old tag stays the current one
        lock.write_text(pin(pin(read_text(lock), grown, self.tag), grown, self.lock.current), encoding="utf-8")
        return f"tree {self.tree[:12]} from {fetched.source}"

    def _rebase(self) -> str:
        moved = rebase.begin(self.inside.project, self.console, rebase.Options(self.tag, self.options.mirror))
        self.patches, self.breakages = moved.patches, of_patches(moved.patches)
        if broken := moved.failure:
            self.error = ConflictError(broken.what, why=broken.why, next_step=f"kvtool rebase {self.tag}")
            return ""
        return f"{len(moved.patches)} patches, {sum(report.hunks for report in moved.patches)} hunks"

    def _build(self) -> str:
        return f"{build.build_project(self.inside, build.Options(self.options.backend)).compiled} files compiled"

    def _verify(self) -> str:
        done = verify.verify_programs(
            self.inside, verify.Options(quick=not self.options.full, backend=self.options.backend)
        )
        self.error, self.breakages = done.failure, of_verified(done)
        return f"{len(done.findings) - len(done.failed)} of {len(done.findings)} checks passed ({done.mode})"


def run_canary(env: Env, options: Options) -> CanaryResult:
    """Run the steps in a copy of the project, and write the report."""
    project, console = env.project, env.console
    names = ", ".join(BACKENDS)
    reject("canary", (options.backend not in BACKENDS, f"no backend is called {options.backend}: there are {names}"))
    if options.last not in (StepName.FETCH, StepName.REBASE) and project.name != LLAMA_CPP:
        what, why = (
            "kvtool canary builds and verifies only llama.cpp",
            f"the upstream of this project is {project.name}",
        )
        raise UsageError(what, why=why, next_step="kvtool canary --to rebase")
    toolchain.require_git()  # check for git first: if a program is missing on this machine, the series is not broken
    if options.report is not None:
        must_be_writable(options.report.absolute())
    lock = load_lock(project.lock)
    asked = options.tag, "given", ""
    if options.tag == "latest":
        asked = newest(lock, options.mirror or os.environ.get("KVTOOL_UPSTREAM") or lock.remote)
    with tempfile.TemporaryDirectory(prefix="kvtool-canary-") as name:
        work = options.work.absolute() if options.work else Path(name)
        inside = Env(console, lambda: init.create(project, work)[0])
        done = _Run(project, console, options, lock, asked[0], inside)
        done.go()
    key = done.breakages[0].key if done.breakages else ""
    known = *asked, done.tree, lock.current, key
    result = CanaryResult(SCHEMA, *known, tuple(done.steps), done.breakages, done.patches, error=done.error)
    if options.report is not None:
        write_json(options.report.absolute(), result.to_json())
    return result


def command(
    ctx: Context,
    tag: Annotated[
        str, Argument(metavar="TAG", help="Upstream tag to try. It need not be in upstream.lock.")
    ] = "latest",
    mirror: Mirror = None,
    last: Annotated[StepName, Option("--to", metavar="STEP", help=f"Last step to run: {_STEPS}.")] = StepName.VERIFY,
    full: Annotated[bool, Option("--full", help="Run all checks of verify, not only those of verify --quick.")] = False,
    backend: Annotated[str, Option("--backend", metavar="NAME", help="Backend to build.")] = "cpu",
    report: Annotated[Path | None, Option("--report", metavar="FILE", help="Also write the JSON document.")] = None,
    work: Annotated[
        Path | None,
        Option(
            "--work", metavar="DIR", help="New directory for the copy of the project; it is kept [a temporary one]."
        ),
    ] = None,
) -> CanaryResult:
    """Check that the series still works on an upstream tag.

    Runs fetch, rebase, build and verify --quick in a copy of the project, with a tree of its own. Your project and
    your tree do not change. `latest` is the newest tag of upstream's remote repository. If the remote cannot be
    reached, it is the newest tag of upstream.lock. The report says where the tag is from.

    The report has a `key`: a hash of what is broken (step, patch, file, function or check), without tag and date. As
    long as the same thing is broken, the key stays the same, so CI opens only one issue for it.

        kvtool canary     # does the series work on the newest llama.cpp?
        kvtool canary b11600 --to rebase --mirror ~/src/llama.cpp
        kvtool canary --report report/canary.json --json

    The exit code is that of the failed step: 3 a patch does not apply, 7 the build failed, 8 verify failed, 9 no
    network.
    """
    options = Options(
        tag=tag,
        mirror=mirror,
        last=last,
        full=full,
        backend=backend,
        report=report,
        work=work,
    )
    return run_canary(env_of(ctx), options)
