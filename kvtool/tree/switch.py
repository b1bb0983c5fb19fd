"""Move a patched tree's checkout from one commit to another, safe under a kill.

One `git checkout` writes only files that differ, so nothing else is recompiled. Before it moves to another series, a
journal (pending.json) is written; after a kill the next run finds it, puts the old state back and begins anew.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import DiskError, TreeError
from kvtool.gitcmd import Git
from kvtool.tree.worktree import Applied, branch_of, dirty_paths, kvtool_dir, write_applied, write_json


def move(tree: Path, git: Git, console: Console, head: str, applied: Applied) -> None:
    """Move branch and checkout from `head` to the new series; on any failure the tree is put back."""
    journal = kvtool_dir(tree) / "pending.json"
    write_json(journal, {"from": head, "applied": asdict(applied)})
    try:
        switch(git, console, "-B", branch_of(applied.tag), applied.head)
    except BaseException:
        finish_interrupted(tree, git)
        raise
    write_applied(tree, applied)
    journal.unlink()


_PERCENT = re.compile(r"Updating files:\s+(\d+)%")


def switch(git: Git, console: Console, *where: str) -> None:
    """`git checkout WHERE`: writes the files that differ; TreeError rather than overwrite untracked or ignored ones."""
    with console.progress(f"checking out {where[1] if where[0].startswith('-') else where[0]}", 100) as bar:

        def on_line(line: str) -> None:
            if found := _PERCENT.search(line):
                bar.update(int(found[1]))

        done = git.watch("checkout", "--progress", "--no-overwrite-ignore", *where, "--", on_line=on_line)
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
    """After a kill during move(): take note of a move that was complete, else put the old state back.

    Only what move() itself may have written is put back: a file that is neither the old nor (the beginning of) the new
    one was edited since, and stops this with a TreeError.
    """
    journal = kvtool_dir(tree) / "pending.json"
    if not journal.exists():
        return
    data = json.loads(journal.read_text(encoding="utf-8"))
    applied, old = Applied.from_json(data["applied"]), str(data["from"])
    await_git(tree)
    dirty = dirty_paths(git)
    head = git.resolve("HEAD")
    if head == applied.head and not dirty:
        write_applied(tree, applied)
    elif head in (old, applied.head):
        put_back(tree, git, old, applied.head, dirty, "apply")
    # else: the user has moved on by hand; the ordinary checks decide
    journal.unlink()


def await_git(tree: Path) -> None:
    """Let a git whose kvtool was killed finish, then remove the locks it could not."""
    locks = [tree / ".git" / "index.lock", tree / ".git" / "HEAD.lock", *(tree / ".git" / "refs").rglob("*.lock")]
    deadline = time.monotonic() + 3
    while any(lock.exists() for lock in locks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for lock in locks:
        lock.unlink(missing_ok=True)


def put_back(tree: Path, git: Git, old: str, new: str, dirty: tuple[str, ...], verb: str) -> None:
    """The checkout back to `old`, from wherever a killed move to `new` left it. TreeError when files were edited."""
    moved = set(git.run("diff", "--name-only", "--no-renames", "-z", old, new).stdout.split("\0"))
    edited = [path for path in dirty if path not in moved or not _ours(tree / path, git, path, old, new)]
    if edited:
        raise TreeError(
            f"{tree}: a kvtool {verb} was interrupted, and files were edited since",
            why=", ".join(edited),
            next_step=f"keep them elsewhere, then: git -C {tree} reset --hard {old[:10]} && kvtool {verb}",
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
