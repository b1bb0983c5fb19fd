"""`kvtool apply`: make the patched tree what patches/ and cpp/ say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from kvtool.console import Console
from kvtool.env import Env
from kvtool.errors import KvtoolError
from kvtool.project import Project
from kvtool.result import Result
from kvtool.tree import checkout
from kvtool.tree.apart import placed_wrong
from kvtool.tree.replay import PatchReport, conflict_error
from kvtool.tree.series import GOAL_LINES, Series, load_series
from kvtool.tree.worktree import read_applied
from kvtool.upstream import sources
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock, load_lock
from kvtool.upstream.sources import Fetched


@dataclass(frozen=True)
class ApplyResult(Result):
    """outcome: created | moved | unchanged | conflict.

    head: the last commit, "" after a conflict; changed_files: files written in the tree; upstream_lines: changed lines
    in upstream's own files; patches: a report each, in order.
    """

    command: ClassVar[str] = "apply"
    tag: str
    tree: Path
    outcome: str
    base: str
    head: str
    changed_files: int
    upstream_lines: int
    patches: tuple[PatchReport, ...]

    @property
    def failure(self) -> KvtoolError | None:
        error = conflict_error(self.patches, self.tag)
        if error and any("it belongs" in hunk.reason for report in self.patches for hunk in report.failed):
            error.next_step = f"kvtool rebase {self.tag} merges it into its place; the tree is as it was"
        return error

    def render(self, console: Console) -> None:
        render_patches(console, self.patches)
        for report in self.patches:
            for moved in report.moved:
                console.line(f"  {report.id}: {moved} (look at it; kvtool export records the new place)", "yellow")
        if self.outcome == "conflict":
            return
        note = "nothing to do" if self.outcome == "unchanged" else f"{self.changed_files} files written"
        console.line(
            f"llama.cpp {self.tag} with {len(self.patches)} patches ({self.upstream_lines} changed lines in upstream's "
            f"files, goal < {GOAL_LINES}) at {self.tree}: {note}"
        )


def render_patches(console: Console, patches: tuple[PatchReport, ...]) -> None:
    """A line per patch, and under it what stands in its way."""
    if not patches:
        return
    rows: list[tuple[object, ...]] = []
    for report in patches:
        size = f"+{report.added} -{report.removed}" if report.hunks else ""
        outcome = f"{report.outcome} by {report.blocked_by}" if report.blocked_by else str(report.outcome)
        rows.append((report.id, outcome, report.hunks or "", size, report.commit[:10]))
    console.table(("patch", "outcome", ">hunks", ">lines", "commit"), rows)
    for report in patches:
        for hunk in report.failed:
            console.line(f"  {report.id}: {hunk}", "red")


def run(project: Project, console: Console, tag: str | None = None, mirror: str | None = None) -> ApplyResult:
    """Fetches the upstream when the cache does not have it."""
    lock = load_lock(project.lock)
    upstream = lock.upstream(tag)
    series = load_series(project, lock, upstream)
    cache = Cache(project.cache)
    fetched = sources.ensure(cache, lock, upstream, console, mirror)
    if wrong := _placed_wrong(project, cache, lock, series, fetched):
        lines = sum(report.added + report.removed for report in wrong)
        return ApplyResult(upstream.tag, project.tree, "conflict", fetched.commit, "", 0, lines, wrong)
    base = fetched.commit
    outcome = checkout.bring(project, console, cache, base, series, pinned=tag is not None)
    applied, replayed = outcome.applied, outcome.replayed
    if applied is None:
        assert replayed is not None
        lines = replayed.upstream_lines
        return ApplyResult(upstream.tag, project.tree, "conflict", base, "", 0, lines, replayed.reports)
    word = "created" if outcome.created else "unchanged" if replayed is None else "moved"
    return ApplyResult(
        upstream.tag, project.tree, word, base, applied.head, outcome.changed, applied.upstream_lines, applied.patches
    )


def _placed_wrong(
    project: Project, cache: Cache, lock: Lock, series: Series, fetched: Fetched
) -> tuple[PatchReport, ...]:
    """On another upstream than the locked one, one line of context may find a wrong place: hold each hunk against what
    became of the lines around it. Needs the locked upstream in the cache; without it, the new heading is shown only."""
    before = read_applied(project.tree)
    unchanged = before is not None and before.digest == series.digest
    if fetched.upstream.tree == lock.upstream().tree or unchanged:
        return ()
    base = cache.base(lock.upstream())
    return placed_wrong(project, cache, lock, base, fetched) if base else ()


def command(
    env: Env,
    tag: Annotated[str | None, typer.Argument(help="An upstream of patches/upstream.lock [the current one].")] = None,
    mirror: Annotated[
        str | None,
        typer.Option("--mirror", metavar="PATH|URL", help="Where to take upstream from, as in kvtool fetch."),
    ] = None,
) -> ApplyResult:
    """Make the patched tree: upstream, the files of cpp/, one commit per patch.

    Fetches upstream if it is not in the cache. Files that do not change keep their time stamps, so nothing else is
    rebuilt; a second call changes nothing. Commit ids are the same on every machine. Uncommitted work and commits that
    are not of the series are never overwritten. If a patch does not apply, the tree stays as it was and every patch's
    outcome is shown.

        kvtool apply
        kvtool apply b11063 --tree ~/older

    Exit codes: 3 a patch does not apply, 4 the tree holds work of yours, 5 and 9 as in kvtool fetch.
    """
    return run(env.project, env.console, tag, mirror)
