"""Implement `kvtool apply`: update the patched tree to patches/ and cpp/."""

from dataclasses import dataclass
from pathlib import Path

from kvtool.commands.conflicts import render_reports
from kvtool.console import Console
from kvtool.errors import KvtoolError
from kvtool.options import Context, Groups, Mirror, Tag, env_of
from kvtool.project import Project
from kvtool.replay.apply import PatchReport, conflict_error, upstream_lines
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import PatchOutcome, Result
from kvtool.series.groups import close_groups
from kvtool.series.series import load_groups
from kvtool.worktree import checkout


@dataclass(frozen=True)
class ApplyResult(Result, command="apply"):
    """Report what `kvtool apply` did.

    outcome: "created", "moved" (the tree was updated), "unchanged" or "conflict" (a patch does not apply)
    base: the id of the commit of unpatched upstream below the patches
    head: the id of the last commit of the tree, "" after a conflict
    changed_files: the number of files that kvtool wrote in the tree
    upstream_lines: the number of lines that the patches change in upstream's own files
    patches: one report for each patch, in the order of the series
    groups: the groups of the series that the tree contains; empty if it contains the whole series
    """

    tag: str
    tree: Path
    outcome: str
    base: str
    head: str
    changed_files: int
    upstream_lines: int
    patches: tuple[PatchReport, ...]
    groups: tuple[str, ...] = ()
    upstream: str = "llama.cpp"  # name of the upstream project

    @property
    def failure(self) -> KvtoolError | None:
        error = conflict_error(self.patches, f"{self.upstream} {self.tag}")
        # a hunk with expected lines conflicts with upstream's lines, so rebase can write both versions into the file
        if error and any(hunk.expected for report in self.patches for hunk in report.failed):
            error.next_step = (
                f"kvtool rebase {self.tag} stops there with the conflict in the files; the tree is unchanged"
            )
        return error

    def render(self, console: Console) -> None:
        if self.outcome == "conflict":
            if console.verbose:
                render_patches(console, self.patches)
            render_reports(console, self.patches)
            return
        render_patches(console, self.patches)
        for report in self.patches:
            for moved in report.moved:
                advice = "" if "look at it" in moved else " (look at it; kvtool export records the new place)"
                console.line(f"  {report.id}: {moved}{advice}", "yellow")
        note = "nothing to do" if self.outcome == "unchanged" else f"{self.changed_files} files written"
        there = sum(report.outcome is not PatchOutcome.SKIPPED for report in self.patches)
        of_groups = f" of {', '.join(self.groups)}" if self.groups else ""
        console.line(
            f"{console.upstream} {self.tag} with {there} patches{of_groups} "
            f"({self.upstream_lines} changed lines in upstream's files) at {self.tree}: {note}"
        )


def render_patches(console: Console, patches: tuple[PatchReport, ...]) -> None:
    """Print one line for each patch, with its outcome and its size."""
    if not patches:
        return
    rows: list[tuple[object, ...]] = []
    for report in patches:
        size = f"+{report.added} -{report.removed}" if report.hunks else ""
        outcome = f"{report.outcome} by {report.blocked_by}" if report.blocked_by else str(report.outcome)
        rows.append((report.id, outcome, report.hunks or "", size, report.commit[:10]))
    console.table(("patch", "outcome", ">hunks", ">lines", "commit"), rows)


def choose_groups(project: Project, console: Console, named: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named groups and the groups that they depend on.

    Prints which groups were added. An empty result means the whole series.
    """
    chosen = close_groups(load_groups(project), named)
    if added := [group for group in chosen if group not in named]:
        console.step(f"adding {', '.join(added)}: {', '.join(named)} depends on it")
    return chosen


def command(ctx: Context, tag: Tag = None, mirror: Mirror = None, groups: Groups = None) -> ApplyResult:
    """Make the patched tree: upstream, plus the files of cpp/, plus one commit per patch.

    If upstream is not in the cache, kvtool downloads it first. Files that do not change keep their time stamps, so the
    next build compiles only what changed. A second call changes nothing. Commit ids are the same on every machine.

    kvtool never overwrites uncommitted changes, nor commits that you added to the tree. If a patch does not apply,
    the tree stays as it was, and kvtool prints the outcome of every patch.

    With --group, the tree contains only the patches and the files of cpp/ that belong to the named groups. The
    commands build, verify, status and export then work on these groups. The next kvtool apply without --group adds
    the rest of the series again.

        kvtool apply
        kvtool apply b11063 --tree ~/older
        kvtool apply --group core --tree ~/core-only

    Exit codes: 3 a patch does not apply, 4 the tree contains work that would be lost, 5 and 9 as in kvtool fetch.
    """
    env = env_of(ctx)
    project, console = env.project, env.console
    context = SeriesContext(project, console, mirror, choose_groups(project, console, tuple(groups or ())))
    upstream = context.lock.upstream(tag)
    base = context.base(upstream)  # reading or downloading upstream is slow, so do it before the tree is locked
    done = checkout.ensure_tree(context, upstream, pinned=tag is not None)
    head, lines = done.applied.head if done.applied else "", upstream_lines(done.patches)
    result = (upstream.tag, project.tree, done.outcome, base, head, done.changed, lines, done.patches)
    return ApplyResult(*result, groups=context.groups, upstream=project.name)
