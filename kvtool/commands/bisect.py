"""`kvtool bisect`: on which upstream does a patch stop applying?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from kvtool.console import Console
from kvtool.env import Env
from kvtool.errors import BisectAbort, BisectBad, BisectSkip, KvtoolError, UsageError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.result import Result
from kvtool.tree.bisect import Bisection, Trial, Verdict, judge, search
from kvtool.tree.borrow import borrowing
from kvtool.tree.rehearse import Based, Rehearsal, rehearse
from kvtool.tree.series import load_patches, load_series
from kvtool.upstream import sources
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock, Upstream, load_lock
from kvtool.upstream.pin import with_upstream


@dataclass(frozen=True)
class BisectResult(Result):
    """first_bad: the first upstream, on the way from good to bad, where the patch fails; suspects: skipped ones before
    it, which may be the first instead; why: what is in the way there; trials: each upstream tried, in that order."""

    command: ClassVar[str] = "bisect"
    patch: str
    good: str
    bad: str
    last_good: str
    first_bad: str
    suspects: tuple[str, ...]
    why: str
    trials: tuple[Trial, ...]

    def render(self, console: Console) -> None:
        rows = [(t.tag, t.verdict, t.outcome, f"{t.seconds:.1f}") for t in self.trials]
        console.table(("upstream", "verdict", "patch", ">s"), rows)
        for trial in self.trials:
            if trial.verdict is Verdict.SKIP:
                console.line(f"  {trial.tag}: {trial.why}", "yellow")
        console.line(
            f"{self.first_bad} is the first where {self.patch} fails, {self.last_good} the last where it holds"
        )
        console.line(f"  why: {self.why}")
        if self.suspects:
            console.line(f"  or one of these, which could not be tried: {', '.join(self.suspects)}", "yellow")


@dataclass(frozen=True)
class BisectAt(Result):
    """One commit of a repository with history, for git bisect run: the exit code is the verdict."""

    command: ClassVar[str] = "bisect"
    patch: str
    commit: str
    verdict: Verdict
    outcome: str
    why: str
    seconds: float

    @property
    def failure(self) -> KvtoolError | None:
        if self.verdict is Verdict.GOOD:
            return None
        kind = BisectBad if self.verdict is Verdict.BAD else BisectSkip
        what = "fails at" if self.verdict is Verdict.BAD else "cannot be judged at"
        return kind(f"{self.patch} {what} {self.commit[:12]}", why=self.why)

    def render(self, console: Console) -> None:
        console.line(f"{self.commit[:12]}: {self.patch} is {self.outcome}: {self.verdict}")


class _Trier:
    """Rehearses the series on one upstream after the other. extra: repositories whose commits are wanted too."""

    def __init__(self, project: Project, console: Console, patch: str, mirror: str | None, *extra: Path) -> None:
        self.project, self.console, self.patch, self.mirror = project, console, patch, mirror
        self.cache = Cache(project.cache)
        self.lock = load_lock(project.lock)
        self.repositories = (self.cache.repo, *extra)
        known = [entry.id for entry in load_patches(project)]
        if patch not in known:
            raise UsageError(f"there is no patch {patch!r}", next_step=f"known are {', '.join(known)}")

    def have(self, upstream: Upstream) -> str:
        """Its base commit, fetched if need be."""
        return sources.ensure(self.cache, self.lock, upstream, self.console, self.mirror).commit

    def rehearsal(self, lock: Lock, target: Upstream, commit: str) -> Rehearsal:
        """From the upstream that the series is locked to, onto a commit."""
        old = lock.upstream()
        base = self.have(old)
        with borrowing(*self.repositories) as there:
            one, two = (load_series(self.project, lock, upstream) for upstream in (old, target))
            return rehearse(there.git, Based(one, base), Based(two, commit), there.place("rehearsal"))

    def tag(self, tag: str) -> Trial:
        """An upstream of the lock; one that cannot be had, or on which nothing can be built, is skipped."""
        upstream = self.lock.upstream(tag)
        try:
            return judge(self.rehearsal(self.lock, upstream, self.have(upstream)), self.patch)
        except KvtoolError as err:
            if tag == self.lock.current:
                raise
            return Trial(tag, Verdict.SKIP, "", str(err), (), 0.0)


def run(project: Project, console: Console, patch: str, good: str, bad: str, mirror: str | None = None) -> BisectResult:
    """Search the upstreams of the lock between two of them, in either direction."""
    trier = _Trier(project, console, patch, mirror)
    tags = list(trier.lock.upstreams)
    ends = trier.lock.upstream(good).order, trier.lock.upstream(bad).order
    between = tags[min(ends) : max(ends) + 1]
    if ends[0] > ends[1]:
        between.reverse()
    if len(between) < 2:
        raise UsageError("--good and --bad are the same upstream", next_step="kvtool bisect --help")
    with console.progress(f"looking for the upstream where {patch} fails", float(len(between))) as bar:
        tried = 0

        def attempt(tag: str) -> Trial:
            nonlocal tried
            bar.update(tried, tag)
            tried += 1
            return trier.tag(tag)

        first, last = attempt(good), attempt(bad)
        for trial, wanted in ((first, Verdict.GOOD), (last, Verdict.BAD)):
            if trial.verdict is not wanted:
                raise UsageError(
                    f"{patch} is not {wanted} on {trial.tag}",
                    why=f"it is {trial.outcome or 'not known'} there" + (f": {trial.why}" if trial.why else ""),
                    next_step="kvtool rebase --dry-run --all shows every upstream",
                )
        found: Bisection = search(between, attempt, (first, last))
    why = next(trial.why for trial in found.trials if trial.tag == found.first_bad)
    return BisectResult(patch, good, bad, found.last_good, found.first_bad, found.suspects, why, found.trials)


def run_at(project: Project, console: Console, patch: str, revision: str, mirror: str | None) -> BisectAt:
    """One commit of a repository with history. Whatever goes wrong is a BisectAbort: no verdict on the commit."""
    try:
        return _at(project, console, patch, revision, Path(mirror or os.environ.get("KVTOOL_UPSTREAM") or "."))
    except KvtoolError as err:
        raise BisectAbort(err.what, why=err.why, next_step=err.next_step, output=err.output) from err
    except Exception as err:
        raise BisectAbort("internal error", why=f"{type(err).__name__}: {err}", next_step="please report this") from err


def _at(project: Project, console: Console, patch: str, revision: str, mirror: Path) -> BisectAt:
    git = Git(mirror.expanduser())
    if not git.repo.is_dir() or not git.ok("rev-parse", "--git-dir"):
        raise UsageError(
            f"{mirror} is not a git repository on this machine",
            next_step="run it inside a clone of llama.cpp, or name one: --mirror PATH",
        )
    commit = git.resolve(f"{revision}^{{commit}}")
    if commit is None:
        raise UsageError(f"{mirror} has no commit {revision!r}")
    trier = _Trier(project, console, patch, None, git.repo)
    tree, date = git.line("rev-parse", f"{commit}^{{tree}}"), git.line("log", "-1", "--format=%cs", commit)
    # from/until go by the order of the lock: the commit stands where its date puts it
    lock = with_upstream(trier.lock, commit[:12], tree, date)
    trial = judge(trier.rehearsal(lock, lock.upstream(commit[:12]), commit), patch)
    return BisectAt(patch, commit, trial.verdict, trial.outcome, trial.why, trial.seconds)


def command(
    env: Env,
    patch: Annotated[str, typer.Argument(metavar="ID", help="A patch of series.toml.")],
    good: Annotated[str, typer.Option("--good", metavar="TAG", help="Where it applies [the current upstream].")] = "",
    bad: Annotated[str, typer.Option("--bad", metavar="TAG", help="Where it does not.")] = "",
    at: Annotated[
        str, typer.Option("--at", metavar="REV", help="Judge one commit of --mirror, for git bisect run.")
    ] = "",
    mirror: Annotated[
        str | None,
        typer.Option("--mirror", metavar="PATH|URL", help="Where to take upstream from; with --at a clone [here]."),
    ] = None,
) -> BisectResult | BisectAt:
    """Find the upstream where a patch stops applying.

    Over the upstreams of the lock, between --good and --bad (which may be the older one): each is rehearsed as kvtool
    rebase --dry-run does, and nothing is changed. One that cannot be had, or where an earlier patch is in the way, is
    skipped.

        kvtool bisect cache --good v0.5.0 --bad b9842

    With --at, one commit of a clone with history is judged: exit 0 it applies, 1 it does not, 125 that cannot be told,
    128 something else is wrong. So git finds the commit, in a clone of llama.cpp:

        git bisect start b9842 v0.5.0
        git bisect run kvtool bisect cache --at HEAD --project ~/kvtool

    Exit codes: 0, or as above; 2 --good is not good, or --bad not bad.
    """
    if at:
        if good or bad:
            raise UsageError("--at judges one commit, --good and --bad are two ends", next_step="kvtool bisect --help")
        return run_at(env.project, env.console, patch, at, mirror)
    if not bad:
        raise UsageError("--bad is missing", next_step="kvtool bisect ID --good TAG --bad TAG, or --at REV")
    return run(env.project, env.console, patch, good or load_lock(env.project.lock).current, bad, mirror)
