"""Bring a patched tree to what the series says: create it, or move it, or leave it as it was.

The commits are built first (replay.py), in the tree's own repository but without touching its checkout. Then the
checkout moves by one `git checkout`, which writes only files that differ, so nothing else is recompiled. Before it
moves, a journal (pending.json) is written; after a kill the next run finds it, puts the old state back and begins anew.
A tree that does not exist yet is made beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import DiskError, TreeError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.tree.replay import Replayed, replay
from kvtool.tree.series import Series
from kvtool.tree.worktree import (
    Applied,
    TreeState,
    branch_of,
    dirty_paths,
    kvtool_dir,
    not_clean,
    read_applied,
    tree_state,
    write_applied,
    write_json,
)
from kvtool.upstream.cache import Cache, guard, ref_of, tree_lock


@dataclass(frozen=True)
class Outcome:
    """applied: what the tree holds now (None: a conflict, the tree is as it was); changed: files that were written.

    replayed: None when the series had not changed and nothing was built.
    """

    applied: Applied | None
    replayed: Replayed | None
    changed: int
    created: bool = False


def bring(project: Project, console: Console, cache: Cache, base: str, series: Series, *, pinned: bool) -> Outcome:
    """Make project.tree the series on `base` (a commit of the cache). TreeError (exit 4) rather than lose work."""
    tree = project.tree
    with guard(tree_lock(cache.root, tree), console, str(tree)):
        for left in tree.parent.glob(f".{tree.name}.kvtool-*"):
            shutil.rmtree(left, ignore_errors=True)
        if read_applied(tree) is not None:
            return _update(project, console, cache, base, series, pinned)
        if tree.exists() and (not tree.is_dir() or any(tree.iterdir())):
            raise TreeError(
                f"{tree} is not a tree that kvtool made",
                why="it is not empty, and kvtool does not overwrite what it does not know",
                next_step="move it away, or name another place: --tree DIR",
            )
        try:
            return _create(tree, console, cache, base, series, pinned)
        except OSError as err:
            raise DiskError(f"cannot create {tree}", why=str(err)) from err


def _applied(series: Series, replayed: Replayed, *, pinned: bool) -> Applied:
    up = series.upstream
    return Applied(up.tag, up.tree, series.digest, replayed.base, replayed.head, pinned, replayed.reports)


def _create(tree: Path, console: Console, cache: Cache, base: str, series: Series, pinned: bool) -> Outcome:
    tree.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{tree.name}.kvtool-", dir=tree.parent))
    try:
        git = Git(fresh)
        git.run("init", "--quiet", ".")
        git.run("config", "core.autocrlf", "false")  # for the user's own git calls there: upstream's bytes as they are
        _take_base(git, cache, series)
        with scratch_below(fresh) as scratch:
            replayed = replay(git, base, series, scratch)
        if not replayed.complete:
            return Outcome(None, replayed, 0)
        branch = branch_of(series.upstream.tag)
        _checkout(git, console, branch, replayed.head)
        applied = _applied(series, replayed, pinned=pinned)
        write_applied(fresh, applied)
        fresh.chmod(0o755)  # mkdtemp's 0700 is not what a checkout looks like
        if tree.exists():
            tree.rmdir()
        fresh.rename(tree)
        files = git_count(Git(tree))
        return Outcome(applied, replayed, files, created=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def git_count(git: Git) -> int:
    """How many files a tree has."""
    return git.run("ls-files", "-z").stdout.count("\0")


@contextlib.contextmanager
def scratch_below(tree: Path) -> Iterator[Path]:
    """A temporary directory inside the tree's .git; what a killed run left there goes first."""
    place = kvtool_dir(tree)
    place.mkdir(parents=True, exist_ok=True)
    for left in place.glob("tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=place) as name:
        yield Path(name)


def _take_base(git: Git, cache: Cache, series: Series) -> None:
    """Copy the base commit into the tree's own repository (no alternates: the cache may go), with a ref to keep it."""
    tag = series.upstream.tag
    git.run("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", cache.repo, f"+{ref_of(tag)}:{base_ref(tag)}")


def base_ref(tag: str) -> str:
    """The ref in a patched tree that holds a tag's base commit."""
    return f"refs/kvtool/base/{tag}"


def _update(project: Project, console: Console, cache: Cache, base: str, series: Series, pinned: bool) -> Outcome:
    tree, git = project.tree, Git(project.tree)
    finish_interrupted(tree, git)
    state = tree_state(project)
    before = state.applied
    assert before is not None
    if state.operation or state.interrupted:
        raise not_clean(state)
    if before.digest == series.digest and before.tag == series.upstream.tag and state.head == before.head:
        if pinned != before.pinned:
            before = Applied(**{**vars(before), "pinned": pinned})
            write_applied(tree, before)
        return Outcome(before, None, 0)
    if state.dirty:
        raise not_clean(state)
    if git.resolve(f"{base}^{{commit}}") is None:
        _take_base(git, cache, series)
    with scratch_below(tree) as scratch:
        replayed = replay(git, base, series, scratch)
    if not replayed.complete:
        return Outcome(None, replayed, 0)
    _refuse_loss(git, state, replayed, branch_of(series.upstream.tag))
    applied = _applied(series, replayed, pinned=pinned)
    changed = git.run("diff", "--name-only", "--no-renames", "-z", state.head, replayed.head).stdout.count("\0")
    _move(tree, git, console, state.head, applied)
    return Outcome(applied, replayed, changed)


def _refuse_loss(git: Git, state: TreeState, replayed: Replayed, branch: str) -> None:
    """No commit of the user's may fall off the branch, unless the new series has all that it holds."""
    assert state.applied is not None
    tip = git.resolve(f"refs/heads/{branch}")
    for commit in {state.head, tip or state.head}:
        known = commit in (state.applied.head, replayed.head)
        if not known and git.resolve(f"{commit}^{{tree}}") != replayed.tree:
            if commit == state.head:
                raise not_clean(state)
            raise TreeError(
                f"{state.path}: branch {branch} has commits that are not of the series",
                why=f"it is at {commit[:10]}, and is not checked out",
                next_step=f"git -C {state.path} checkout {branch} && kvtool export, or rename it: git branch -m",
            )


def _move(tree: Path, git: Git, console: Console, head: str, applied: Applied) -> None:
    """Move branch and checkout from `head` to the new series; on any failure the tree is put back."""
    journal = kvtool_dir(tree) / "pending.json"
    write_json(journal, {"from": head, "applied": asdict(applied)})
    try:
        _checkout(git, console, branch_of(applied.tag), applied.head)
    except BaseException:
        finish_interrupted(tree, git)
        raise
    write_applied(tree, applied)
    journal.unlink()


_PERCENT = re.compile(r"Updating files:\s+(\d+)%")


def _checkout(git: Git, console: Console, branch: str, head: str) -> None:
    """`git checkout -B`: writes the files that differ, refuses to overwrite untracked or ignored ones (TreeError)."""
    with console.progress(f"checking out {branch}", 100) as bar:

        def on_line(line: str) -> None:
            if found := _PERCENT.search(line):
                bar.update(int(found[1]))

        done = git.watch("checkout", "--progress", "--no-overwrite-ignore", "-B", branch, head, on_line=on_line)
    if done.returncode != 0:
        if "No space left" in done.stdout:
            raise DiskError("the disk is full", why="git checkout could not write", output=done.stdout)
        raise TreeError(
            f"{git.repo}: the checkout cannot move",
            why="git refused; nothing was changed",
            next_step=f"move the files it names away, or commit them: git -C {git.repo} add -A && git commit",
            output=done.stdout.strip(),
        )


def finish_interrupted(tree: Path, git: Git) -> None:
    """After a kill during _move: take note of a move that was complete, else put the old state back.

    Only what _move itself may have written is put back: a file that is neither the old nor (the beginning of) the new
    one was edited since, and stops this with a TreeError.
    """
    journal = kvtool_dir(tree) / "pending.json"
    if not journal.exists():
        return
    data = json.loads(journal.read_text(encoding="utf-8"))
    applied, old = Applied.from_json(data["applied"]), str(data["from"])
    _await_git(tree)
    dirty = dirty_paths(git)
    head = git.resolve("HEAD")
    if head == applied.head and not dirty:
        write_applied(tree, applied)
    elif head in (old, applied.head):
        _put_back(tree, git, old, applied.head, dirty)
    # else: the user has moved on by hand; the ordinary checks decide
    journal.unlink()


def _await_git(tree: Path) -> None:
    """Let a git whose kvtool was killed finish, then remove the locks it could not."""
    locks = [tree / ".git" / "index.lock", tree / ".git" / "HEAD.lock", *(tree / ".git" / "refs").rglob("*.lock")]
    deadline = time.monotonic() + 3
    while any(lock.exists() for lock in locks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for lock in locks:
        lock.unlink(missing_ok=True)


def _put_back(tree: Path, git: Git, old: str, new: str, dirty: tuple[str, ...]) -> None:
    moved = set(git.run("diff", "--name-only", "--no-renames", "-z", old, new).stdout.split("\0"))
    edited = [path for path in dirty if path not in moved or not _ours(tree / path, git, path, old, new)]
    if edited:
        raise TreeError(
            f"{tree}: a kvtool apply was interrupted, and files were edited since",
            why=", ".join(edited),
            next_step=f"keep them elsewhere, then: git -C {tree} reset --hard {old[:10]} && kvtool apply",
        )
    git.run("reset", "--quiet", "--hard", old)
    for path in dirty_paths(git):  # files that only the new series has are untracked now
        if path in moved:
            (tree / path).unlink(missing_ok=True)


def _ours(file: Path, git: Git, path: str, old: str, new: str) -> bool:
    """Whether a file is what the move may have left: absent, the old one, or the new one written in part."""
    if not file.is_file():
        return not file.exists()
    content = file.read_bytes()
    for commit in (old, new):
        done = git.run("cat-file", "blob", f"{commit}:{path}", check=False)
        if done.returncode == 0 and done.stdout.encode("utf-8", "surrogateescape").startswith(content):
            return True
    return False
