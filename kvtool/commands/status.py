"""Implement `kvtool status`: compare the patched tree with patches/, cpp/ and the lock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.commands.apply import render_patches
from kvtool.console import Console
from kvtool.options import Context, env_of
from kvtool.project import read_text
from kvtool.replay.apply import PatchReport, upstream_lines
from kvtool.result import Result
from kvtool.series.series import Patch, files_of_groups, goal_lines, load_patches
from kvtool.upstream.lock import load_lock
from kvtool.worktree.status import PatchReason, dirty_tree_error, explain_patches, tree_state


@dataclass(frozen=True)
class StatusResult(Result, command="status"):
    """Report the state of the patched tree.

    state: "clean", "stale", "commits", "dirty", "in-progress", "interrupted" or "not-applied"; --help explains them
    tag: the upstream tag under the patches in the tree, "" if there is no tree
    locked: the current tag of upstream.lock
    why: the reason why the tree is not clean
    next: what the user can do about it
    upstream_lines: the number of lines that the patches change in upstream's own files
    groups: the name of each group, and the number of upstream lines that its patches change; the name "" means patches
        without a group
    goal_lines: the limit in series.toml for the changed lines of each group, 0 if there is no limit
    new_files: the number of files of cpp/ that belong into the tree
    unlisted: the patch files that series.toml does not name
    patches: the report of each patch from the last apply
    reasons: the reason for the state of each patch; patches and reasons are empty while a rebase is stopped
    only: the groups of the series that the tree contains; empty if it contains the whole series
    """

    state: str
    tag: str
    locked: str
    tree: Path
    head: str
    branch: str
    why: str
    next: str
    dirty: tuple[str, ...]
    commits: tuple[str, ...]
    upstream_lines: int
    groups: tuple[tuple[str, int], ...]
    goal_lines: int
    new_files: int
    unlisted: tuple[str, ...]
    patches: tuple[PatchReport, ...]
    reasons: tuple[PatchReason, ...] = ()
    only: tuple[str, ...] = ()

    def render(self, console: Console) -> None:
        style = {"clean": "green", "not-applied": "yellow"}.get(self.state, "red")
        console.line(f"{self.state}: {self.tree}" + (f" ({console.upstream} {self.tag})" if self.tag else ""), style)
        if self.state != "clean":
            console.line(f"  why:  {self.why}")
            console.line(f"  next: {self.next}")
        render_patches(console, self.patches)
        for reason in self.reasons:
            if reason.state != "applied" or "; " in reason.why:
                console.line(f"  {reason.id}: {reason.state}: {reason.why}", "yellow")
        if self.tag:
            if self.only:
                console.line(f"only the groups {', '.join(self.only)}; kvtool apply adds the others")
            counted = ", ".join(f"{name or 'without a group'} {lines}" for name, lines in self.groups)
            if self.goal_lines:
                counted = f"goal < {self.goal_lines} a group: {counted}"
            counted = f" ({counted})" if self.goal_lines or len(self.groups) > 1 else ""
            changed = f"{self.upstream_lines} changed lines in upstream's files{counted}"
            console.line(f"{changed}, {self.new_files} files in cpp/")
        for name in self.unlisted:
            console.line(f"  patches/{name} is not in series.toml", "yellow")


def _groups(listed: Sequence[Patch], reports: Sequence[PatchReport]) -> tuple[tuple[str, int], ...]:
    group_of = {patch.id: patch.group for patch in listed}
    lines = Counter[str]()
    for report in reports:
        lines[group_of.get(report.id, "")] += report.added + report.removed
    return tuple(sorted(lines.items()))


def command(ctx: Context) -> StatusResult:
    """Show whether the patched tree is clean, and the state of each patch.

    The tree is in one of these states:

        clean        it is equal to the series
        stale        patches/, cpp/ or upstream.lock changed after kvtool apply
        dirty        it has uncommitted changes
        commits      it has commits that are not part of the series yet
        in-progress  a rebase stopped at a patch and waits for you
        interrupted  kvtool was killed; run the same command again
        not-applied  there is no tree yet

    Below the table, status explains every patch that was not applied as usual. The exit code is 0 in each state. A
    script can read `state` and `reasons` in the output of --json.

        kvtool status --json
    """
    env = env_of(ctx)
    project = env.project
    lock, listed = load_lock(project.lock), load_patches(project)
    unlisted = {path.name for path in project.patches.glob("*.patch")} - {patch.file for patch in listed}
    state = tree_state(project)
    error = None if state.name == "clean" else dirty_tree_error(state)
    # while a rebase is stopped, the tree does not contain the applied patches
    applied = None if state.rebasing or state.interrupted == "rebase" else state.applied
    patches, only = (applied.patches, applied.groups) if applied else ((), ())
    return StatusResult(
        state=state.name,
        tag=applied.tag if applied else "",
        locked=lock.current,
        tree=state.path,
        head=state.head,
        branch=state.branch,
        why=(error.why or error.what) if error else "",
        next=env.console.again(error.next_step) if error else "",
        dirty=state.dirty,
        commits=state.extra,
        upstream_lines=upstream_lines(patches),
        groups=_groups(listed, patches),
        goal_lines=goal_lines(read_text(project.series), str(project.series)),
        new_files=len(files_of_groups(project, only)),
        unlisted=tuple(sorted(unlisted)),
        patches=patches,
        reasons=explain_patches(project, lock, applied) if applied else (),
        only=only,
    )
