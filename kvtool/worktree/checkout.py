"""Create and update the checkout of a patched tree. If kvtool is killed at any moment, nothing is lost.

The commits are first made in a temporary repository and fetched into the tree. Then one `git checkout` writes only the
files that differ, so the next build compiles only what changed. Before the checkout moves, a journal (pending.json) is
written. If kvtool is killed, the next run reads the journal, restores the old state and starts again. A new tree is
made in a temporary folder next to its place, and renamed at the end.
"""

import glob
import json
import shutil
import tempfile
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import DiskError, TreeError, writing
from kvtool.gitcmd import IDENTITY, Git, Scratch, folders, scratch_repository
from kvtool.locks import hold_tree
from kvtool.replay.apply import Applied, PatchReport, Replayed, applied_of
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import from_plain
from kvtool.series.series import Series
from kvtool.upstream.cache import Cache, ref_of
from kvtool.upstream.lock import Upstream, load_lock
from kvtool.worktree.status import dirty_tree_error, kvtool_dir, read_applied, tree_state, write_applied, write_json


@dataclass(frozen=True)
class TreeUpdate:
    """Report an update of the tree.

    outcome: "created", "moved" (the tree was updated), "unchanged" or "conflict"
    applied: the record of what the tree contains now, None after a conflict
    patches: one report for each patch
    changed: the number of files that were written
    """

    outcome: str
    applied: Applied | None
    patches: tuple[PatchReport, ...]
    changed: int = 0


def ensure_tree(context: SeriesContext, upstream: Upstream, *, pinned: bool) -> TreeUpdate:
    """Create or update the tree of the project on an upstream. Raise TreeError (exit code 4) if work would be lost."""
    tree = context.project.tree
    with hold_tree(context.project, context.console):
        if (current := load_lock(context.project.lock).current) != context.lock.current:
            raise TreeError(
                f"another kvtool moved the project to {context.lock.name} {current} meanwhile",
                next_step="run the command again",
            )
        series = context.series(upstream)
        remove_leftovers(tree)
        if read_applied(tree) is not None:
            return _update(context, series, pinned)
        if (state := tree_state(context.project)).foreign:
            raise dirty_tree_error(state)
        with writing(str(tree)):
            return _create(context, series, pinned)


def remove_leftovers(tree: Path) -> None:
    """Remove the temporary folders that a killed kvtool left.

    A git process of the killed kvtool may still be writing into them, so try for ten seconds. The caller holds the lock
    of the tree, so no other kvtool uses these folders.
    """
    deadline = time.monotonic() + 10
    while left := [*tree.parent.glob(f".{glob.escape(tree.name)}.kvtool-*"), *kvtool_dir(tree).glob("kvtool-*")]:
        for place in left:
            shutil.rmtree(place, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _build_in_tree(context: SeriesContext, upstream: Upstream, git: Git) -> Replayed:
    """Apply the series in a temporary repository. If all patches apply, fetch the commits into the tree."""
    with scratch_below(git.repo, context.cache.repo) as scratch:
        replayed = context.build(scratch, upstream)
        if replayed.complete:
            fetch_base(git, context.cache, upstream.tag)
            git.fetch(scratch.repo, replayed.head)
        return replayed


def _create(context: SeriesContext, series: Series, pinned: bool) -> TreeUpdate:
    tree = context.project.tree
    tree.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{tree.name}.kvtool-", dir=tree.parent))
    try:
        git = Git.create(fresh, bare=False)
        git.run("config", "core.autocrlf", "false")  # the user's own git commands must not change line ends either
        replayed = _build_in_tree(context, series.upstream, git)
        if not replayed.complete:
            return TreeUpdate("conflict", None, replayed.reports)
        run_checkout(git, context.console, "-B", branch_of(series.upstream.tag), replayed.head)
        applied = applied_of(series, replayed, pinned=pinned)
        write_applied(fresh, applied)
        fresh.chmod(0o755)  # mkdtemp makes folders with mode 0700, but a normal checkout has 0755
        if tree.exists():
            tree.rmdir()
        fresh.rename(tree)
        return TreeUpdate("created", applied, applied.patches, len(Git(tree).entries("ls-files", "-z")))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def scratch_below(tree: Path, *repositories: Path) -> AbstractContextManager[Scratch]:
    """Make a temporary repository inside the tree's .git, where remove_leftovers() finds it if kvtool is killed."""
    kvtool_dir(tree).mkdir(parents=True, exist_ok=True)
    return scratch_repository(*repositories, below=kvtool_dir(tree))


def fetch_base(git: Git, cache: Cache, tag: str) -> None:
    """Copy the commit of unpatched upstream into the repository of the tree, with a ref.

    The commit is copied and not shared through git's alternates, because the user may remove the cache. The caller
    holds the lock of the tree, so any lock file of kvtool's own refs was left by a killed git.
    """
    for left in (*(git.repo / ".git/refs/kvtool").rglob("*.lock"), *(git.repo / ".git/objects/pack").glob("tmp_*")):
        left.unlink(missing_ok=True)
    git.fetch(cache.repo, f"+{ref_of(tag)}:{base_ref(tag)}")


def branch_of(tag: str) -> str:
    """Return the name of the branch of a patched tree that has the series."""
    return f"kvtool/{tag}"


def base_ref(tag: str) -> str:
    """Return the ref in a patched tree that keeps the commit of an unpatched upstream."""
    return f"refs/kvtool/base/{tag}"


def _update(context: SeriesContext, series: Series, pinned: bool) -> TreeUpdate:
    git = Git(context.project.tree)
    finish_interrupted(git)
    state = tree_state(context.project)
    before = state.applied
    assert before is not None
    if state.operation or state.interrupted:
        raise dirty_tree_error(state)
    if before.digest == series.digest and before.tag == series.upstream.tag and state.head == before.head:
        if (pinned, series.groups) != (before.pinned, before.groups):
            before = replace(before, pinned=pinned, groups=series.groups)
            write_applied(git.repo, before)
        return TreeUpdate("unchanged", before, before.patches)
    if state.dirty:
        raise dirty_tree_error(state)
    replayed = _build_in_tree(context, series.upstream, git)
    if not replayed.complete:
        return TreeUpdate("conflict", None, replayed.reports)
    # keep commits of the user on the branch, unless the new series has the same tree
    if state.head not in (before.head, replayed.head) and git.resolve(f"{state.head}^{{tree}}") != replayed.tree:
        raise dirty_tree_error(state)
    check_branch_replaceable(
        git, branch_of(series.upstream.tag), (state.head, before.head, replayed.head), replayed.tree
    )
    applied = applied_of(series, replayed, pinned=pinned)
    changed = len(git.changed(state.head, replayed.head))
    move_checkout(git, context.console, state.head, applied)
    return TreeUpdate("moved", applied, applied.patches, changed)


def check_branch_replaceable(git: Git, branch: str, known: tuple[str, ...], tree: str = "") -> None:
    """Raise TreeError if a branch has commits of the user, or if another worktree has it checked out.

    known: commits that may be replaced
    tree: the id of a git tree; a branch with this tree may be replaced, too
    """
    tip = git.resolve(f"refs/heads/{branch}")
    place = Path(git.line("for-each-ref", "--format=%(worktreepath)", f"refs/heads/{branch}") or git.repo)
    if place.exists() and not place.samefile(git.repo):  # git before 2.43 does not check this
        raise TreeError(
            f"{git.repo}: branch {branch} is checked out in {place}",
            why="moving the branch would leave the files of that worktree out of date",
            next_step=f"git -C {place} checkout --detach",
        )
    if tip is None or tip in known or git.resolve(f"{tip}^{{tree}}") == tree:
        return
    committers = set(git.run("log", "--format=%ce", tip).stdout.split())
    if committers != {IDENTITY["EMAIL"]}:  # a branch that has only commits made by kvtool may be replaced
        raise TreeError(
            f"{git.repo}: branch {branch} has commits that are not in the series",
            why=f"it is at {tip[:10]}, and is not checked out",
            next_step=f"git -C {git.repo} checkout {branch} && kvtool export, or rename it: git branch -m",
        )


# --- from one commit to another ----------------------------------------------------------------------------------


def move_checkout(git: Git, console: Console, head: str, applied: Applied) -> None:
    """Move the branch and the checkout from `head` to the new series. If anything fails, restore the tree."""
    reject_untracked(git, head, applied.head)
    if (now := git.line("rev-parse", "HEAD")) != head:
        raise TreeError(
            f"{git.repo}: a commit was made there meanwhile",
            why=f"HEAD is at {now[:10]}, and was at {head[:10]} when kvtool began",
            next_step="kvtool export adds it to the series; then run the command again",
        )
    journal = kvtool_dir(git.repo) / "pending.json"
    write_json(journal, {"from": head, "applied": asdict(applied)})
    try:
        run_checkout(git, console, "-B", branch_of(applied.tag), applied.head)
    except BaseException:
        finish_interrupted(git)
        raise
    write_applied(git.repo, applied)
    journal.unlink()


def run_checkout(git: Git, console: Console, *where: str) -> None:
    """Run `git checkout WHERE`. Raise TreeError if it would overwrite untracked or ignored files."""
    with console.progress(f"checking out {where[1] if where[0].startswith('-') else where[0]}", 100) as bar:
        options = ("--progress", "--no-overwrite-ignore")
        done = git.watch("checkout", *options, *where, "--", bar=bar, phases=("Updating files",))
    if done.returncode != 0:
        if "No space left" in done.stdout:
            raise DiskError("the disk is full", why="git checkout could not write", output=done.stdout)
        in_the_way = "overwritten" in done.stdout or "would lose" in done.stdout
        files = f"move the files it names away, or commit them: git -C {git.repo} add -A && git commit"
        raise TreeError(
            f"{git.repo}: the checkout cannot move",
            why="git refused; nothing was changed",
            next_step=files if in_the_way else "correct the problem that git reports, then run the command again",
            output=done.stdout.strip(),
        )


def finish_interrupted(git: Git) -> None:
    """Complete or undo a move_checkout() that was killed.

    Only files that move_checkout() may have written are restored. Raises TreeError if the content of a file is neither
    the old version, nor the new version, nor a beginning of one of them. Then the user has edited the file.
    """
    journal = kvtool_dir(git.repo) / "pending.json"
    if not journal.exists():
        return
    await_git(git.repo)
    try:
        data = json.loads(journal.read_text(encoding="utf-8"))
        applied, old = from_plain(Applied, data["applied"]), str(data["from"])
    except (ValueError, TypeError, KeyError, AttributeError):
        journal.unlink()  # the machine crashed before the journal was on the disk; the caller checks the tree as usual
        return
    head, dirty = git.resolve("HEAD"), git.dirty()
    if head == applied.head and not dirty:
        write_applied(git.repo, applied)
    elif head in (old, applied.head):
        put_back(git, old, applied.head, dirty, "apply")
    # otherwise the user has moved HEAD by hand; the caller checks the tree as usual
    journal.unlink()


def await_git(tree: Path) -> None:
    """Wait up to three seconds for the git process of a killed kvtool, then remove the lock files that it left."""
    locks = [tree / ".git" / "index.lock", tree / ".git" / "HEAD.lock", *(tree / ".git" / "refs").rglob("*.lock")]
    deadline = time.monotonic() + 3
    while any(lock.exists() for lock in locks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for lock in locks:
        lock.unlink(missing_ok=True)


def reject_untracked(git: Git, old: str, new: str) -> None:
    """Raise TreeError if the checkout from `old` to `new` would write to the path of an untracked or ignored file.

    After this check, no untracked file is at a path that the checkout writes. So if kvtool is killed during the
    checkout, kvtool itself wrote every untracked file at these paths. The user can only have edited such a file later.
    """
    if found := _untracked(git, git.changed(old, new)):
        raise TreeError(
            f"{git.repo}: the checkout cannot move",
            why="it would overwrite files that git does not track; nothing was changed",
            next_step="move them away, or commit them (with git add --force if they are ignored)",
            output="\n".join(sorted(found)),
        )


def _untracked(git: Git, paths: Collection[str]) -> set[str]:
    """Return the untracked and ignored files that are at, above or below some paths."""
    wanted = set(paths)
    above = folders(wanted)
    others = git.entries("ls-files", "--others", "-z")
    return {path for path in others if path in above or wanted & {path, *folders([path])}}


def put_back(git: Git, old: str, new: str, dirty: tuple[str, ...], verb: str) -> None:
    """Restore the checkout to `old` after a move to `new` was killed.

    Raises TreeError if the user edited files after kvtool was killed.
    """
    moved = set(git.changed(old, new))
    changed = sorted({*dirty, *_untracked(git, moved)})
    if edited := [path for path in changed if path not in moved or not _is_ours(git, path, old, new)]:
        raise TreeError(
            f"{git.repo}: a kvtool {verb} was interrupted, and files were edited since",
            why=", ".join(edited),
            next_step=f"keep them elsewhere, then: git -C {git.repo} reset --hard {old[:10]} && kvtool {verb}",
        )
    git.run("reset", "--quiet", "--hard", old)
    for path in _untracked(git, moved) & moved:  # files that exist only in the new series
        (git.repo / path).unlink(missing_ok=True)


def _is_ours(git: Git, path: str, old: str, new: str) -> bool:
    """Return True if a file is missing, or if its content is the old or the new version or a beginning of one."""
    file = git.repo / path
    if not file.is_file():
        return not file.exists()
    content, versions = file.read_bytes(), git.blobs(f"{old}:{path}", f"{new}:{path}")
    return any(blob and version.startswith(content) for blob, version in versions)
