"""Read the state of a patched tree and of each patch. Also read and write kvtool's files in the tree's .git."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from kvtool.errors import TreeError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.replay.apply import Applied, PatchReport, commits_of
from kvtool.result import PatchOutcome, from_plain
from kvtool.series.patchfile import changed_rows
from kvtool.series.series import LoadedPatch, files_of_groups, load_groups, load_series
from kvtool.upstream.lock import Lock, load_lock

_T = TypeVar("_T")
_OPERATIONS = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or am",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisect",
}
_REBASING = "a kvtool rebase"
_APPLY = "kvtool apply"  # the next step if the tree differs from the project
_REBASE = "continue: kvtool rebase --continue; or cancel the rebase: kvtool rebase --abort"
# journals that a killed command leaves, and the command; a rebase has all three while it finishes
_JOURNALS = (("rebase.json", "rebase"), ("pending.json", "apply"), ("export-stage.json", "export"))


@dataclass(frozen=True)
class TreeState:
    """Hold the state of a patched tree."""

    path: Path
    applied: Applied | None
    head: str = ""
    branch: str = ""
    dirty: tuple[str, ...] = ()  # paths with uncommitted changes, including untracked files
    extra: tuple[str, ...] = ()  # commits after the last one of the series, as "1234abc subject"
    stale: str = ""  # the difference between the tree and patches/, cpp/ or upstream.lock; "" if there is none
    operation: str = ""  # an unfinished operation of git, or a stopped kvtool rebase; "" for none
    interrupted: str = ""  # the kvtool command that was killed and must be run again; "" for none
    foreign: bool = False  # the folder has files that kvtool did not make

    @property
    def rebasing(self) -> bool:
        """Return True if a kvtool rebase waits for the user. The tree then does not contain the applied series."""
        return _REBASING in self.operation

    @property
    def name(self) -> str:
        """Return the name of the state: not-applied, interrupted, in-progress, dirty, commits, stale or clean.

        If several apply, the first one is returned.
        """
        return next((word for word, holds, *_ in _obstacles(self) if holds), "clean")


def _obstacles(state: TreeState) -> Iterator[tuple[str, object, str, str, str]]:
    """Yield everything that can keep the tree from being clean, in the order of importance.

    Each item has the name of the state, whether the tree is in this state, and the parts of an error: what, why and
    next step.
    """
    if state.applied is None:
        why = "it is not empty, and kvtool does not overwrite unknown files"
        move = "move it away, or name another place: --tree DIR"
        yield "not-applied", state.foreign, "it is not a tree that kvtool made", why, move
        yield "not-applied", True, "nothing is applied there", "the patched tree was not made yet", _APPLY
        return
    again = f"kvtool {state.interrupted}" if state.interrupted != "rebase" else _REBASE
    yield "interrupted", state.interrupted, f"a kvtool {state.interrupted} was interrupted", "", again
    finish = _REBASE if state.rebasing else "finish it, or abort it with git"
    yield "in-progress", state.operation, f"{state.operation} is under way", "", finish
    git = f"git -C {state.path}"
    keep = f"keep them: {git} add -A && {git} commit, then kvtool export; or put them aside: {git} stash -u"
    yield "dirty", state.dirty, "there are uncommitted changes", _listing(state.dirty), keep
    end = state.applied.head[:10]
    why = _listing(state.extra) or f"HEAD is {state.head[:10]}, the series ends at {end}"
    take = "write them to patches/ and cpp/: kvtool export; or keep them on a branch: "
    take += f"{git} branch mine && {git} reset --hard {end}"
    yield "commits", state.head != state.applied.head, "there are commits that are not in the series", why, take
    yield "stale", state.stale, "it differs from the project", state.stale, apply_command(state.applied.groups)


def apply_command(groups: Sequence[str]) -> str:
    """Return the command that updates a tree with these groups of the series."""
    return " ".join((_APPLY, *(f"--group {group}" for group in groups)))


def kvtool_dir(tree: Path) -> Path:
    """Return the folder of kvtool's files in a tree's .git."""
    return tree / ".git" / "kvtool"


def write_json(path: Path, data: object, *, private: bool = False) -> None:
    """Replace a JSON file atomically, so that it is complete even after a power failure.

    private: only the owner may read the file
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    if private:
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)
    with fresh.open("w", encoding="utf-8") as out:
        out.write(json.dumps(data, indent=2) + "\n")
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(path)


def read_journal(path: Path, kind: type[_T], next_step: str) -> _T | None:
    """Read a file that write_json() wrote. Return None if it does not exist. Raise TreeError if it cannot be parsed."""
    try:
        return from_plain(kind, json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as err:
        raise TreeError(f"{path} cannot be understood", why=str(err), next_step=next_step) from err


def read_applied(tree: Path) -> Applied | None:
    """Return the record of what was applied to a tree, from its state.json; None if nothing was."""
    again = f"if {tree} holds nothing of yours, remove it and run kvtool apply"
    return read_journal(kvtool_dir(tree) / "state.json", Applied, again)


def write_applied(tree: Path, applied: Applied) -> None:
    """Write state.json, and set a ref that keeps the commits even if the user's branch changes."""
    (tree / ".git/refs/kvtool/applied.lock").unlink(
        missing_ok=True
    )  # a killed git left this lock; no other program writes this ref
    Git(tree).run("update-ref", "refs/kvtool/applied", applied.head)
    write_json(kvtool_dir(tree) / "state.json", asdict(applied))


def tree_state(project: Project) -> TreeState:
    """Return the state of the patched tree, without changing anything."""
    tree = project.tree
    applied = read_applied(tree)
    if applied is None:
        foreign = tree.exists() and (not tree.is_dir() or any(tree.iterdir()))
        return TreeState(tree, None, foreign=foreign)
    git = Git(tree)
    head = git.resolve("HEAD^{commit}")
    if head is None:
        raise TreeError(f"{tree} has no usable HEAD", next_step=f"look with git -C {tree} status")
    branch = _branch(tree)
    operation = next((words for name, words in _OPERATIONS.items() if (tree / ".git" / name).exists()), "")
    interrupted = next((verb for name, verb in _JOURNALS if (kvtool_dir(tree) / name).exists()), "")
    if interrupted == "rebase" and (stopped := _stopped_rebase(tree)):
        interrupted, operation = "", stopped
    extra: tuple[str, ...] = ()
    if head != applied.head:
        log = ("log", "-z", "--reverse", "--topo-order", "--abbrev=10", "--format=%h %s", f"{applied.head}..{head}")
        extra = tuple(git.entries(*log))
    stale = _stale(project, applied)
    return TreeState(tree, applied, head, branch, git.dirty(), extra, stale, operation, interrupted)


def _branch(tree: Path) -> str:
    """Return the name of the branch that is checked out, "" for none."""
    from git import Repo  # imported here, because importing it takes longer than most of kvtool's work with a tree

    # GitPython reads GIT_COMMON_DIR, GIT_OBJECT_DIRECTORY and others, which kvtool ignores everywhere
    hidden = {name: os.environ.pop(name) for name in tuple(os.environ) if name.startswith("GIT_")}
    try:
        with contextlib.closing(Repo(tree, expand_vars=False)) as repo:
            return "" if repo.head.is_detached else repo.active_branch.name
    finally:
        os.environ.update(hidden)


def _stopped_rebase(tree: Path) -> str:
    """Describe the rebase that waits for the user; "" if it was killed."""
    try:
        journal = json.loads((kvtool_dir(tree) / "rebase.json").read_text(encoding="utf-8"))
        words = f"{_REBASING} onto {journal['tag']}, stopped at patch {journal['stop']['id']!r},"
        return words if journal["phase"] == "stopped" else ""
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _stale(project: Project, applied: Applied) -> str:
    lock = load_lock(project.lock)
    if not applied.pinned and lock.current != applied.tag:
        return f"patches/upstream.lock has {lock.current}, the tree has {applied.tag}"
    if applied.tag not in lock.upstreams:
        return f"patches/upstream.lock does not know {applied.tag} any more"
    known = {group.id for group in load_groups(project)}
    if gone := [group for group in applied.groups if group not in known]:
        return f"patches/series.toml has no group {gone[0]!r} any more"
    if load_series(project, lock, lock.upstream(applied.tag), applied.groups).digest != applied.digest:
        return "patches/ or cpp/ changed since the last apply"
    return ""


def carried_files(project: Project) -> frozenset[str]:
    """Return the paths of the files of cpp/ that an apply copies into the tree.

    If the tree has only some groups of the series (layers in the glossary), the files of these groups are returned. If
    the tree has the whole series, or if nothing is applied, all files of cpp/ are returned.
    """
    applied = read_applied(project.tree)
    known = {group.id for group in load_groups(project)}
    groups = [group for group in applied.groups if group in known] if applied else []
    return frozenset(file.path for file in files_of_groups(project, groups))


def require_applied(project: Project) -> TreeState:
    """Return the state of a clean tree. Raise TreeError if the tree is not exactly the applied series."""
    state = tree_state(project)
    if state.name == "clean":
        return state
    raise dirty_tree_error(state)


def dirty_tree_error(state: TreeState) -> TreeError:
    """Return the error for a tree that is not clean."""
    what, why, next_step = next(said for _, holds, *said in _obstacles(state) if holds)
    return TreeError(f"{state.path}: {what}", why=why, next_step=next_step)


def _listing(items: tuple[str, ...]) -> str:
    more = f", and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


# --- the state of each patch ------------------------------------------------------------------------------------

_DONE = {
    PatchOutcome.MERGED: "upstream has it",
    PatchOutcome.EMPTY: "it changes nothing there",
    PatchOutcome.DROPPED: "it was dropped from the series",
}


@dataclass(frozen=True)
class PatchReason:
    """Hold the state of one patch in the tree."""

    id: str
    state: str  # "applied", "left-out", "changed", "new" or "gone"
    why: str  # reason for the state, in one sentence


def explain_patches(project: Project, lock: Lock, applied: Applied) -> tuple[PatchReason, ...]:
    """Return the state of each patch of the project, then of the patches that only the tree has.

    Returns nothing if the lock does not have the tag of the tree.
    """
    if applied.tag not in lock.upstreams:
        return ()
    known = {group.id for group in load_groups(project)}
    groups = [group for group in applied.groups if group in known]
    git, series = Git(project.tree), load_series(project, lock, lock.upstream(applied.tag), groups)
    reports = {report.id: report for report in applied.patches}
    made = commits_of(git, applied.base, applied.head) if git.resolve(f"{applied.head}^{{commit}}") else ()
    changed = {commit.id: changed_rows(commit.diff) for commit in made}
    found = [_reason(loaded, reports.get(loaded.patch.id), changed, applied.tag) for loaded in series.patches]
    there = {loaded.patch.id for loaded in series.patches}
    gone = "series.toml does not list it any more; kvtool apply removes it from the tree"
    return (*found, *(PatchReason(name, "gone", gone) for name, r in reports.items() if name not in there and r.commit))


def _reason(loaded: LoadedPatch, report: PatchReport | None, changed: Mapping[str, object], tag: str) -> PatchReason:
    name = loaded.patch.id
    if not loaded.wanted:
        limits = [
            f"{key} {limit}" for key, limit in (("from", loaded.patch.since), ("until", loaded.patch.until)) if limit
        ]
        return PatchReason(name, "left-out", f"series.toml includes it {' '.join(limits)}, and the tree is on {tag}")
    if report is None or (report.outcome is PatchOutcome.SKIPPED and not report.commit):
        return PatchReason(name, "new", "it was added after the last apply; kvtool apply adds it to the tree")
    if not report.commit:
        return PatchReason(name, "left-out", _DONE.get(report.outcome, str(report.outcome)))
    if changed.get(report.commit) != changed_rows(loaded.mail.diff):
        other = f"patches/{loaded.patch.file} differs from the commit {report.commit[:10]}"
        return PatchReason(name, "changed", other)
    note = f"; {report.moved[0]}" if report.moved else ""
    return PatchReason(name, "applied", f"commit {report.commit[:10]}{note}")
