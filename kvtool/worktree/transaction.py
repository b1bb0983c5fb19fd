"""Change several files of the project and the tree together: either all of them or none.

First, the old and the new contents are saved (a Stage, in .git/kvtool of the tree). Then the checkout of the tree
moves, and then the files are written. If kvtool is killed partway, the next run finishes the change or undoes it.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvtool.console import Console
from kvtool.errors import DiskError, TreeError, writing
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.replay.apply import Applied
from kvtool.result import FileChange, from_plain
from kvtool.series.changes import Change, put_file
from kvtool.worktree.checkout import await_git, branch_of, finish_interrupted, move_checkout, run_checkout
from kvtool.worktree.rebase_state import RebaseState, state_path, write_state
from kvtool.worktree.status import kvtool_dir, read_applied, read_journal, write_applied, write_json

_ADVICE = {"export": "nothing was changed", "rebase": "kvtool rebase --continue, or kvtool rebase --abort"}


class Stage:
    """Hold the saved changes of one command: each file before and after, and more data.

    The caller must create the Stage before the caller reads the project. Then save() can find every file that was
    edited after the project was read.
    """

    def __init__(self, project: Project, verb: str) -> None:
        self.project, self.verb = project, verb
        self.path = kvtool_dir(project.tree) / f"{verb}-stage.json"
        files = (project.series, project.lock, *project.patches.glob("*.patch"), *project.cpp.rglob("*"))
        names = (file.relative_to(project.root).as_posix() for file in files)
        self._read = {name: self._now(name) for name in names}

    def save(self, changes: Sequence[Change], **more: object) -> None:
        """Write the changes to disk, where they survive if kvtool is killed.

        Raises TreeError if a file was edited after the Stage was created.
        """
        if edited := [change.path for change in changes if self._now(change.path) != self._read.get(change.path)]:
            raise TreeError(
                f"{', '.join(edited)}: edited while kvtool {self.verb} worked",
                next_step="nothing was changed; run the command again",
            )
        files = []
        for change in changes:
            new = None if change.content is None else [change.content.decode("latin-1"), change.executable]
            files.append({"path": change.path, "action": change.action, "old": self._now(change.path), "new": new})
        write_json(self.path, {"files": files, **more})

    @property
    def plan(self) -> dict[str, Any]:
        """Return the content of the saved file, {} if it does not exist."""
        advice = "look at git status of the project and of the tree, then remove the file"
        return read_journal(self.path, dict, advice) or {}

    def _now(self, name: str) -> list[Any] | None:
        """Return a file of the project in the form in which it is saved: its bytes as text, and its executable bit."""
        path = self.project.root / name
        if not path.is_file():
            return None
        return [path.read_bytes().decode("latin-1"), os.name != "nt" and bool(path.stat().st_mode & 0o100)]

    def refuse_edited(self) -> None:
        """Raise TreeError if a file has neither the old nor the new content.

        Then the user edited it after kvtool was killed.
        """
        for file in self.plan.get("files", ()):
            now, old, new = (state and state[0] for state in (self._now(file["path"]), file["old"], file["new"]))
            if now not in (old, new):
                back = f"put it back with git (git checkout {file['path']}) or move it away"
                again = "kvtool export" if self.verb == "export" else _ADVICE["rebase"]
                raise TreeError(
                    f"a kvtool {self.verb} was interrupted, and {file['path']} was edited since",
                    why="the rest of the change would undo that",
                    next_step=f"keep a copy of it, {back}, then: {again}",
                )

    def restore(self, side: str) -> None:
        """Write the files of the project.

        side: "new" for the new contents, in order; "old" for the old contents, in reverse order
        """
        files = self.plan["files"]
        with writing("the project", _ADVICE[self.verb]):
            for left in (*self.project.patches.glob(".*.kvtool-new"), *self.project.cpp.rglob(".*.kvtool-new")):
                left.unlink()
            for file in files if side == "new" else reversed(files):
                if (wanted := file[side]) != self._now(file["path"]):
                    content, executable = (wanted[0].encode("latin-1"), wanted[1]) if wanted else (None, False)
                    put_file(self.project.root / file["path"], Change(file["path"], side, content, executable))

    def clear(self) -> None:
        """Remove the saved changes. Call this after the command was finished or undone."""
        self.path.unlink()


# --- the end of a rebase -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommittedRebase:
    """Report the changes of a finished rebase."""

    applied: Applied
    previous: str  # tag before the rebase
    files: tuple[FileChange, ...]


def commit_rebase(
    stage: Stage, git: Git, console: Console, state: RebaseState, changes: Sequence[Change], applied: Applied
) -> CommittedRebase:
    """Write a finished rebase to the tree and the project.

    If a write fails, the tree and the files are restored. But if the user has resolved a conflict, nothing is restored,
    so that the resolution is not lost: the rebase waits for `--continue`.
    """
    project = stage.project
    before = read_applied(project.tree)
    assert before is not None
    tip = git.resolve(f"refs/heads/{branch_of(applied.tag)}") or ""
    stage.save(changes, applied=asdict(applied), before=asdict(before), branch=tip)
    state = write_state(project.tree, replace(state, phase="writing", to=applied.head))
    try:
        return finish_rebase(project, git, console, state)
    except BaseException as err:
        if not state.choices.resolved:
            roll_back(project, git, console, state)
            if isinstance(err, DiskError):
                err.next_step = "nothing was changed"
        raise


def finish_rebase(project: Project, git: Git, console: Console, state: RebaseState) -> CommittedRebase:
    """Finish a rebase whose changes are saved. An earlier, killed kvtool may have written a part of them already.

    First the tree is changed, then the files of the project, and upstream.lock last. Raises TreeError if the user made
    a commit in the tree after kvtool was killed, because the commit would be dropped from the branch.
    """
    tree, stage = project.tree, Stage(project, "rebase")
    stage.refuse_edited()
    plan = stage.plan
    applied = from_plain(Applied, plan["applied"])
    finish_interrupted(git)
    head = git.line("rev-parse", "HEAD")
    if head not in (state.at, applied.head):
        raise TreeError(
            f"{tree}: a kvtool rebase was interrupted, and HEAD was moved since",
            why=f"it is at {head[:10]}, neither at {state.at[:10]} nor at {applied.head[:10]}",
            next_step=f"keep its commits on a branch: git -C {tree} branch mine && git -C {tree} checkout --detach "
            f"{applied.head[:10]}; then kvtool rebase --continue, or cancel the rebase: kvtool rebase --abort",
        )
    if head != applied.head or git.line("rev-parse", "--abbrev-ref", "HEAD") == "HEAD":
        move_checkout(git, console, head, applied)
    else:
        write_applied(tree, applied)
    stage.restore("new")
    state_path(tree).unlink()
    stage.clear()
    files = tuple(FileChange(file["path"], file["action"]) for file in plan["files"])
    return CommittedRebase(applied, str(plan["before"]["tag"]), files)


def roll_back(project: Project, git: Git, console: Console, state: RebaseState) -> None:
    """Undo a saved rebase: restore the files of the project and the tree."""
    tree, stage = project.tree, Stage(project, "rebase")
    stage.refuse_edited()
    plan = stage.plan
    await_git(tree)  # an earlier roll_back() may have been killed
    finish_interrupted(git)
    stage.restore("old")
    run_checkout(git, console, *state.checkout_args)
    branch = f"refs/heads/{branch_of(state.tag)}"
    if branch != f"refs/heads/{state.branch}":  # restore the branch of the new tag, unless the user moved it
        back = (branch, plan["branch"]) if plan["branch"] else ("-d", branch)
        git.run("update-ref", *back, state.to, check=False)
    write_applied(tree, from_plain(Applied, plan["before"]))
    state_path(tree).unlink()
    stage.clear()
