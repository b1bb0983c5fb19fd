"""`kvtool canary`: does the series still hold on upstream's newest tag? One report, for CI."""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from kvtool.build import toolchain
from kvtool.canary import latest
from kvtool.canary.report import (
    SCHEMA,
    Breakage,
    Step,
    StepName,
    of_error,
    of_patches,
    of_verified,
    tail,
)
from kvtool.commands import build, init, verify, verify_steps
from kvtool.commands.rebase_tree import RebaseOptions, begin
from kvtool.console import Console
from kvtool.env import Env
from kvtool.errors import ConflictError, KvtoolError, UsageError
from kvtool.options import Mirror
from kvtool.project import Project, read_text
from kvtool.result import CheckOutcome, Result, plain
from kvtool.tree.apply import PatchReport
from kvtool.tree.status import write_json
from kvtool.upstream import discover
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock, load_lock
from kvtool.upstream.pin import pin


@dataclass(frozen=True)
class CanaryResult(Result):
    """schema: of this document; tag_from: "given", the remote that said it is the newest, or "upstream.lock".

    tag_why: why the remote was not asked; tree: git tree id, "" when it cannot be fetched; locked: the lock's current
    tag; key: of the first breakage, "" for none; patches: as in kvtool rebase --dry-run; broken_by: the error of the
    step that failed (in the document it is "error"), whose exit code is the program's.
    """

    command: ClassVar[str] = "canary"
    schema: int
    tag: str
    tag_from: str
    tag_why: str
    tree: str
    locked: str
    key: str
    steps: tuple[Step, ...]
    breakages: tuple[Breakage, ...]
    patches: tuple[PatchReport, ...]
    broken_by: KvtoolError | None

    @property
    def failure(self) -> KvtoolError | None:
        return self.broken_by

    def to_json(self) -> dict[str, Any]:
        doc = super().to_json()
        del doc["broken_by"]  # it is doc["error"]
        return doc

    def render(self, console: Console) -> None:
        origin = {"given": ""}.get(self.tag_from, f", the newest tag according to {self.tag_from}")
        console.line(f"llama.cpp {self.tag}{origin}")
        if self.tag_why:
            console.line(f"  the remote could not be asked: {self.tag_why}", "yellow")
        rows = [(step.name, step.outcome, f"{step.seconds:.1f}", step.summary) for step in self.steps]
        console.table(("step", "outcome", ">s", ""), rows)
        for breakage in self.breakages:
            console.line(f"  {breakage.step}: {breakage.what}", "red")
        if self.key:
            console.line(f"key of this breakage: {self.key}")
        else:
            done = [step.name for step in self.steps if step.outcome is CheckOutcome.PASSED]
            console.line(f"the series holds on {self.tag}: {', '.join(done)}", "green")


@dataclass
class _Run:
    """A canary under way: what is known so far."""

    project: Project
    console: Console
    mirror: str | None
    work: Path
    steps: list[Step] = field(default_factory=list)
    breakages: tuple[Breakage, ...] = ()
    patches: tuple[PatchReport, ...] = ()
    error: KvtoolError | None = None
    tree: str = ""

    def step(self, name: StepName, wanted: bool, action: Callable[[], str]) -> None:
        """Run one step unless an earlier one failed; action returns a summary, or raises, or sets self.error."""
        if self.error is not None or not wanted:
            self.steps.append(Step(name, CheckOutcome.SKIPPED))
            return
        started, summary, log = time.monotonic(), "", ""
        try:
            summary = action()
        except KvtoolError as err:
            self.error = err
            self.breakages = (of_error(name, err),)
        if self.error is not None:
            summary, log = summary or self.error.what, tail(self.error.output)
        outcome = CheckOutcome.FAILED if self.error else CheckOutcome.PASSED
        self.steps.append(Step(name, outcome, round(time.monotonic() - started, 1), summary, log))


def run(
    project: Project,
    console: Console,
    tag: str = "latest",
    *,
    mirror: str | None = None,
    last: StepName = StepName.VERIFY,
    options: verify_steps.Options | None = None,
    work: Path | None = None,
) -> CanaryResult:
    """Fetch, rebase, build, verify, in a copy of the project, which is not changed. last: the step to stop after.

    What breaks is in the result, not an exception. work: where the copy is made and kept; None: a temporary directory.
    """
    toolchain.require_git()  # what this machine lacks is no breakage
    lock = load_lock(project.lock)
    newest = latest.Latest(tag, "given")
    if tag == "latest":
        remote = mirror or os.environ.get("KVTOOL_UPSTREAM") or lock.remote
        newest = latest.find(lock, remote)
    with ExitStack() as stack:
        place = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtool-canary-")))
        current = _Run(project, console, mirror, place)
        _steps(current, lock, newest.tag, last, options or verify_steps.Options(quick=True))
    key = current.breakages[0].key if current.breakages else ""
    return CanaryResult(
        SCHEMA,
        newest.tag,
        newest.source,
        newest.why,
        current.tree,
        lock.current,
        key,
        tuple(current.steps),
        current.breakages,
        current.patches,
        current.error,
    )


def _steps(current: _Run, lock: Lock, tag: str, last: StepName, options: verify_steps.Options) -> None:
    copies: list[Project] = []

    def fetch() -> str:
        grown, fetched = discover.ensure(Cache(current.project.cache), lock, tag, current.console, current.mirror)
        current.tree = fetched.upstream.tree
        copy = init.create(current.project, current.work)
        copies.append(copy)
        # the copy's lock has the tag, so that it is not fetched again; it is not the current one yet
        text = pin(pin(read_text(copy.lock), grown, tag), grown, lock.current)
        copy.lock.write_text(text, encoding="utf-8")
        return f"tree {fetched.upstream.tree[:12]} from {fetched.source}"

    def rebase() -> str:
        moved = begin(copies[0], current.console, RebaseOptions(tag, current.mirror), tag)
        current.patches, current.breakages = moved.patches, of_patches(moved.patches)
        if broken := moved.failure:
            current.error = ConflictError(broken.what, why=broken.why, next_step=f"kvtool rebase {tag}")
            return ""
        return f"{len(moved.patches)} patches, {sum(report.hunks for report in moved.patches)} hunks"

    def compile_it() -> str:
        built = build.run(copies[0], current.console, build.Options(options.backend, options.preset))
        return f"{built.compiled} files compiled"

    def verify_it() -> str:
        done = verify.run(copies[0], current.console, options)
        current.error, current.breakages = done.failure, of_verified(done)
        return f"{len(done.findings) - len(done.failed)} of {len(done.findings)} checks passed ({done.mode})"

    order = list(StepName)
    for name, action in zip(order, (fetch, rebase, compile_it, verify_it), strict=True):
        current.step(name, order.index(name) <= order.index(last), action)


def command(
    env: Env,
    tag: Annotated[str, typer.Argument(help="An upstream tag, also one that the lock does not know.")] = "latest",
    mirror: Mirror = None,
    last: Annotated[
        str, typer.Option("--to", metavar="STEP", help=f"Stop after this step: {', '.join(StepName)}.")
    ] = "verify",
    full: Annotated[bool, typer.Option("--full", help="All of verify, not the quick part of it.")] = False,
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="The build to try.")] = "cpu",
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Also write the JSON document there.", show_default=False),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            "--work", metavar="DIR", help="A new directory to build in and keep [a temporary one].", show_default=False
        ),
    ] = None,
) -> CanaryResult:
    """Say whether the series still holds on an upstream tag, without touching anything.

    fetch, rebase, build, verify --quick, in a project and a tree of their own. `latest` is the
    newest tag of the remote, or of the lock when the remote cannot be reached; the report says which.

    The report has a `key`: a hash of what is broken (step, patch, file, function or check), without tag and date. The
    same breakage has the same key tomorrow, so CI opens one issue for it.

        kvtool canary     does the series hold on the newest llama.cpp?
        kvtool canary b11600 --to rebase --mirror ~/src/llama.cpp
        kvtool canary --report report/canary.json --json

    Exit codes: those of the step that failed: 3 a patch has no place, 7 build, 8 verify, 9 network.
    """
    if last not in list(StepName):
        raise UsageError(f"there is no step {last!r}", next_step=f"--to {'|'.join(StepName)}")
    options = verify_steps.Options(quick=not full, backend=backend)
    result = run(
        env.project,
        env.console,
        tag,
        mirror=mirror,
        last=StepName(last),
        options=options,
        work=work.absolute() if work else None,
    )
    if report is not None:
        write_json(report.absolute(), plain(result.to_json()))
    return result
