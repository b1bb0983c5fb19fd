"""Bring a patched tree to what the series says: create it, or move it, or leave it as it was.

The commits are built first (replay.py), in the tree's own repository but without touching its checkout. Then the
checkout moves (switch.py). A tree that does not exist yet is made beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import DiskError, TreeError
from kvtool.gitcmd import IDENTITY_EMAIL, Git
from kvtool.project import Project
from kvtool.tree.replay import Replayed, replay
from kvtool.tree.series import Series
from kvtool.tree.switch import finish_interrupted, move, switch
from kvtool.tree.worktree import (
    Applied,
    TreeState,
    branch_of,
    kvtool_dir,
    not_clean,
    read_applied,
    tree_state,
    write_applied,
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


def applied_of(series: Series, replayed: Replayed, *, pinned: bool) -> Applied:
    up = series.upstream
    return Applied(up.tag, up.tree, series.digest, replayed.base, replayed.head, pinned, replayed.reports)


def _create(tree: Path, console: Console, cache: Cache, base: str, series: Series, pinned: bool) -> Outcome:
    tree.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{tree.name}.kvtool-", dir=tree.parent))
    try:
        git = Git(fresh)
        git.run("init", "--quiet", ".")
        git.run("config", "core.autocrlf", "false")  # for the user's own git calls there: upstream's bytes as they are
        take_base(git, cache, series.upstream.tag)
        with scratch_below(fresh) as scratch:
            replayed = replay(git, base, series, scratch)
        if not replayed.complete:
            return Outcome(None, replayed, 0)
        branch = branch_of(series.upstream.tag)
        switch(git, console, "-B", branch, replayed.head)
        applied = applied_of(series, replayed, pinned=pinned)
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


def take_base(git: Git, cache: Cache, tag: str) -> None:
    """Copy the base commit into the tree's own repository (no alternates: the cache may go), with a ref to keep it.

    Under the lock of the tree: what a killed git left below our own refs is nobody else's.
    """
    for left in (*(git.repo / ".git/refs/kvtool").rglob("*.lock"), *(git.repo / ".git/objects/pack").glob("tmp_*")):
        left.unlink(missing_ok=True)
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
        take_base(git, cache, series.upstream.tag)
    with scratch_below(tree) as scratch:
        replayed = replay(git, base, series, scratch)
    if not replayed.complete:
        return Outcome(None, replayed, 0)
    refuse_loss(git, state, replayed, branch_of(series.upstream.tag))
    applied = applied_of(series, replayed, pinned=pinned)
    changed = git.run("diff", "--name-only", "--no-renames", "-z", state.head, replayed.head).stdout.count("\0")
    move(tree, git, console, state.head, applied)
    return Outcome(applied, replayed, changed)


def refuse_loss(git: Git, state: TreeState, replayed: Replayed, branch: str) -> None:
    """No commit of the user's may fall off the branch, unless the new series has all that it holds."""
    assert state.applied is not None
    if state.head not in (state.applied.head, replayed.head) and git.resolve(f"{state.head}^{{tree}}") != replayed.tree:
        raise not_clean(state)
    keep_branch(git, branch, (state.head, state.applied.head, replayed.head), replayed.tree)


def keep_branch(git: Git, branch: str, known: tuple[str, ...], tree: str = "") -> None:
    """TreeError when a branch that is to be replaced has commits of the user's. tree: nothing is lost if it is that."""
    tip = git.resolve(f"refs/heads/{branch}")
    if tip is None or tip in known or git.resolve(f"{tip}^{{tree}}") == tree:
        return
    committers = set(git.run("log", "--format=%ce", tip).stdout.split())
    if committers != {IDENTITY_EMAIL}:  # what kvtool made from an earlier series, it may replace
        raise TreeError(
            f"{git.repo}: branch {branch} has commits that are not of the series",
            why=f"it is at {tip[:10]}, and is not checked out",
            next_step=f"git -C {git.repo} checkout {branch} && kvtool export, or rename it: git branch -m",
        )
