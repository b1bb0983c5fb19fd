"""`kvtool apply`: make the patched tree what patches/ and cpp/ say."""

from dataclasses import dataclass
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import KvtoolError
from kvtool.options import Env, Mirror, Tag
from kvtool.replay.apply import PatchReport, conflict_error, upstream_lines
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import PatchOutcome, Result
from kvtool.worktree import checkout


@dataclass(frozen=True)
class ApplyResult(Result, command="apply"):
    """outcome: created | moved | unchanged | conflict.

    head: the last commit, "" after a conflict; changed_files: files written in the tree; upstream_lines: changed lines
    in upstream's own files; patches: a report each, in order.
    """

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
        if error and any(hunk.expected for report in self.patches for hunk in report.failed):  # it was to be moved
            error.next_step = (
                f"kvtool rebase {self.tag} stops there with the conflict in the files; the tree is as it was"
            )
        return error

    def render(self, console: Console) -> None:
        render_patches(console, self.patches)
        for report in self.patches:
            for moved in report.moved:
                advice = "" if "look at it" in moved else " (look at it; kvtool export records the new place)"
                console.line(f"  {report.id}: {moved}{advice}", "yellow")
        if self.outcome == "conflict":
            return
        note = "nothing to do" if self.outcome == "unchanged" else f"{self.changed_files} files written"
        there = sum(report.outcome is not PatchOutcome.SKIPPED for report in self.patches)
        console.line(
            f"llama.cpp {self.tag} with {there} patches ({self.upstream_lines} changed lines in upstream's "
            f"files) at {self.tree}: {note}"
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


def command(env: Env, tag: Tag = None, mirror: Mirror = None) -> ApplyResult:
    """Make the patched tree: upstream, the files of cpp/, one commit per patch.

    Fetches upstream if it is not in the cache. Files that do not change keep their time stamps, so nothing else is
    rebuilt; a second call changes nothing. Commit ids are the same on every machine. Uncommitted work and commits that
    are not of the series are never overwritten. If a patch does not apply, the tree stays as it was and every patch's
    outcome is shown.

        kvtool apply
        kvtool apply b11063 --tree ~/older

    Exit codes: 3 a patch does not apply, 4 the tree holds work of yours, 5 and 9 as in kvtool fetch.
    """
    project, console = env.project, env.console
    context = SeriesContext(project, console, mirror)
    upstream = context.lock.upstream(tag)
    base = context.base(upstream)  # what takes long comes before the tree is locked
    done = checkout.ensure_tree(context, upstream, pinned=tag is not None)
    head, lines = done.applied.head if done.applied else "", upstream_lines(done.patches)
    return ApplyResult(upstream.tag, project.tree, done.outcome, base, head, done.changed, lines, done.patches)
