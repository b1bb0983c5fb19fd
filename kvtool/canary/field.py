"""A project and a patched tree to throw away: the series as it is, on an upstream that the real lock need not know."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.tree.borrow import Borrowed
from kvtool.tree.checkout import base_ref
from kvtool.tree.rehearse import Rehearsal
from kvtool.tree.series import Series, read_text
from kvtool.tree.worktree import Applied, branch_of, write_applied
from kvtool.upstream.lock import Lock
from kvtool.upstream.pin import pin


def copy_project(project: Project, lock: Lock, tag: str, place: Path) -> Project:
    """patches/ and cpp/ in `place`, with `tag` as the current upstream; the cache stays the user's."""
    copy = replace(project, root=place, patches=place / "patches", cpp=place / "cpp", tree=place / "llama.cpp")
    shutil.rmtree(copy.patches, ignore_errors=True)
    shutil.rmtree(copy.cpp, ignore_errors=True)
    shutil.copytree(project.patches, copy.patches)
    if project.cpp.is_dir():
        shutil.copytree(project.cpp, copy.cpp)
    copy.lock.write_text(pin(read_text(project.lock), lock, tag), encoding="utf-8")
    return copy


def plant(project: Project, borrowed: Borrowed, rehearsal: Rehearsal, series: Series) -> None:
    """Make the tree of what was rehearsed, as `kvtool apply` would leave it after a rebase."""
    tree, tag = project.tree, series.upstream.tag
    branch = branch_of(tag)
    borrowed.git.run("update-ref", f"refs/heads/{branch}", rehearsal.head)
    borrowed.git.run("update-ref", base_ref(tag), rehearsal.base)
    fresh = not (tree / ".git").exists()
    tree.mkdir(parents=True, exist_ok=True)
    git = Git(tree)
    if fresh:
        git.run("init", "--quiet", ".")
    refs = (f"+refs/heads/{branch}:refs/kvtool/planted", f"+{base_ref(tag)}:{base_ref(tag)}")
    git.run("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", borrowed.git.repo, *refs)
    git.run("checkout", "--quiet", "--force", "-B", branch, "refs/kvtool/planted")
    write_applied(
        tree,
        Applied(tag, series.upstream.tree, series.digest, rehearsal.base, rehearsal.head, True, rehearsal.reports),
    )
