"""`kvtool export`: take the commits of the patched tree back into patches/ and cpp/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from kvtool.console import Console
from kvtool.env import Env
from kvtool.errors import DriftError, KvtoolError, TreeError, UsageError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.result import Result
from kvtool.tree import flowback
from kvtool.tree.borrow import borrowing
from kvtool.tree.checkout import scratch_below
from kvtool.tree.fold import Folded, fold
from kvtool.tree.replay import replay
from kvtool.tree.series import Series, load_series
from kvtool.tree.switch import finish_interrupted
from kvtool.tree.worktree import Applied, TreeState, not_clean, tree_state, write_applied
from kvtool.upstream.cache import guard, tree_lock
from kvtool.upstream.lock import Lock, load_lock


@dataclass(frozen=True)
class ExportedFile:
    """path: in the project; action: add | change | remove."""

    path: str
    action: str


@dataclass(frozen=True)
class ExportResult(Result):
    """files: what was written (or, with check, would be); head: the tree's last commit, fixups folded in; mailbox: the
    mails that were written, in order."""

    command: ClassVar[str] = "export"
    tag: str
    tree: Path
    head: str
    check: bool
    files: tuple[ExportedFile, ...]
    mailbox: tuple[Path, ...]

    @property
    def failure(self) -> KvtoolError | None:
        if not self.check or not self.files:
            return None
        listed = ", ".join(f"{file.path} ({file.action})" for file in self.files)
        return DriftError(
            "the patched tree and the project say different things",
            why=f"export would write {listed}",
            next_step="kvtool export, then commit what it wrote",
        )

    def render(self, console: Console) -> None:
        if self.mailbox:
            console.line(
                f"{len(self.mailbox)} mails in {self.mailbox[0].parent}: git am {self.mailbox[0].parent}/*.patch"
            )
        elif not self.files:
            console.line(f"patches/ and cpp/ say what the tree says (llama.cpp {self.tag})")
        elif not self.check:
            for file in self.files:
                console.line(f"  {file.action:<7} {file.path}")
            console.line(f"{len(self.files)} files written; look at them with git diff, then commit")


@dataclass(frozen=True)
class _Source:
    """What export works from, once it is sure that nothing is in the way."""

    git: Git
    state: TreeState
    applied: Applied
    lock: Lock
    series: Series


def _open(project: Project, scratch: Path) -> _Source:
    """Refuse a tree that is not ready, or whose project moved on without it."""
    git = Git(project.tree)
    finish_interrupted(project.tree, git)
    state = tree_state(project)
    applied = state.applied
    if state.interrupted == "rebase":
        raise not_clean(state)
    if applied is None or state.operation or state.dirty:
        # what stands in the way is told in the usual words, an interrupted export aside: running again finishes it
        raise not_clean(TreeState(state.path, applied, state.head, dirty=state.dirty, operation=state.operation))
    lock = load_lock(project.lock)
    series = load_series(project, lock, lock.upstream(applied.tag))
    if series.digest != applied.digest and not flowback.explained(project):
        replayed = replay(git, applied.base, series, scratch)
        if not replayed.complete or replayed.tree != git.resolve(f"{state.head}^{{tree}}"):
            raise _both_changed(state, applied)
    return _Source(git, state, applied, lock, series)


def _both_changed(state: TreeState, applied: Applied) -> TreeError:
    git = f"git -C {state.path}"
    redo = (
        "kvtool apply"
        if state.head == applied.head
        else f"{git} branch mine && {git} reset --hard {applied.head[:10]} && kvtool apply && "
        f"{git} cherry-pick {applied.head[:10]}..mine, then kvtool export"
    )
    return TreeError(
        "patches/ or cpp/ changed since the tree was made",
        why="an export would undo that",
        next_step=redo,
    )


def run(project: Project, console: Console, *, check: bool = False, mailbox: Path | None = None) -> ExportResult:
    """check: write nothing. mailbox: write mails there and leave the project alone."""
    if check and mailbox:
        raise UsageError("--check and --mailbox exclude each other", next_step="kvtool export --help")
    if not (check or mailbox):
        project.refuse_packaged()
    if not (project.tree / ".git").is_dir():
        raise not_clean(TreeState(project.tree, None))
    with (
        guard(tree_lock(project.cache, project.tree), console, str(project.tree)),
        scratch_below(project.tree) as scratch,
        borrowing(
            project.tree
        ) as clean,  # what .git/config and .git/info/attributes of the tree say stays out of patches
    ):
        for name in ("open", "fold", "check", "stage"):
            (scratch / name).mkdir()
        source = _open(project, scratch / "open")
        folded = fold(source.git, source.applied, source.state.head, source.series, scratch / "fold")
        if mailbox:
            mails = flowback.write_mailbox(clean.git, source.applied.base, folded.head, mailbox)
            return ExportResult(source.applied.tag, project.tree, folded.head, False, (), mails)
        todo = flowback.changes(project, clean.git, folded, source.series, scratch / "check")
        files = tuple(ExportedFile(change.path, change.action) for change in todo)
        head = source.state.head if check else _write(project, source, folded, todo, scratch / "stage")
        return ExportResult(source.applied.tag, project.tree, head, check, files, ())


def _write(project: Project, source: _Source, folded: Folded, todo: tuple[flowback.Change, ...], scratch: Path) -> str:
    """Rehearse, write, then let the branch and the state follow (the tree's files are the same, none is touched)."""
    git, state, applied = source.git, source.state, source.applied
    series, replayed = flowback.rehearse(project, git, source.lock, source.series, applied.base, todo, scratch)
    if not replayed.complete or replayed.tree != folded.tree:
        raise KvtoolError("the exported series does not give the tree back", why="this is a bug; nothing was written")
    if todo:
        flowback.write(project, todo)
    if replayed.head != state.head:
        git.run("update-ref", "-m", "kvtool export", "HEAD", replayed.head, state.head)
    write_applied(
        project.tree,
        Applied(
            applied.tag, applied.tree, series.digest, applied.base, replayed.head, applied.pinned, replayed.reports
        ),
    )
    flowback.journal_of(project.tree).unlink(missing_ok=True)
    return replayed.head


def command(
    env: Env,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 6 when something would be written.")
    ] = False,
    mailbox: Annotated[
        Path | None,
        typer.Option(
            "--mailbox", metavar="DIR", help="Write a plain series for git am instead, for those without kvtool."
        ),
    ] = None,
) -> ExportResult:
    """Take the commits of the patched tree back into patches/ and cpp/.

    Paths decide: an edit of a file that upstream has goes into a patch, any other file into cpp/. To change a patch,
    commit in the tree with `git commit --fixup=<its commit>`; a commit with a subject of its own becomes a new patch.
    Afterwards the tree's branch has the fixups folded in (its files are not touched). A patch that gives the same tree
    as before keeps its bytes, and the bytes are the same under any git configuration.

        kvtool export
        kvtool export --check
        kvtool export --mailbox ~/series

    Exit codes: 3 a fixup does not go into its patch, 4 uncommitted changes or a stale tree, 6 drift (with --check).
    """
    return run(env.project, env.console, check=check, mailbox=mailbox)
