"""Test what kvtool rebase refuses, and that it changes all files or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git
from tests.repo.rebases import BLOCK, current, everything, finished, outcomes, release, resolve

# --- refusals -----------------------------------------------------------------------------------------------------


def dirty(project: Tiny) -> None:
    (project.tree / "src/b.h").write_text("mine")


def untracked(project: Tiny) -> None:
    (project.tree / "mine.txt").write_text("mine")


def commit(project: Tiny) -> None:
    dirty(project)
    git(project.tree, "commit", "-qam", "mine")


def killed_export(project: Tiny) -> None:
    (project.state / "export-stage.json").touch()


def users_rebase(project: Tiny) -> None:
    (project.tree / ".git/rebase-merge").mkdir()


@pytest.mark.parametrize("trouble", [dirty, untracked, commit, killed_export, users_rebase])
def test_work_in_tree_is_refused(applied: Tiny, kvtool: Any, trouble: Any) -> None:
    trouble(applied)
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 4 and ran.json["error"]["next"], ran
    assert current(applied) == "v1" and not (applied.state / "rebase.json").exists()


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--all",),
        ("--all", "--dry-run", "v2"),
        ("v2", "--keep-going"),
        ("v2", "--abort"),
        ("v2", "--continue"),
        ("--continue", "--abort"),
        ("--abort", "--skip", "use"),
        ("--dry-run",),
        ("v2", "--markdown", "x.md"),
        ("v2", "--skip", "nonsense"),
        ("--continue",),
        ("--abort",),
        ("--skip", "use"),
    ],
)
def test_invalid_combinations_are_refused(applied: Tiny, kvtool: Any, args: tuple[str, ...]) -> None:
    ran = kvtool("rebase", *args, "--json")
    assert ran.code == 2 and ran.json["error"]["next"], ran


# --- all or nothing ------------------------------------------------------------------------------------------------


def test_dry_run_writes_nothing(stopped: Tiny, kvtool: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache/upstream.git"
    for tag in ("v2", "v3"):
        kvtool("fetch", tag)
    objects = sorted(str(p) for p in (*cache.rglob("*"), *(stopped.tree / ".git").rglob("*")))
    before = everything(stopped)
    ran = kvtool("rebase", "v3", "--dry-run", "--json")
    assert ran.code == 3 and list(outcomes(ran)) == ["flag", "use", "block"]  # without --keep-going, it stops there
    assert kvtool("rebase", "v2", "--dry-run", "--keep-going").code == 0
    assert everything(stopped) == before
    assert sorted(str(p) for p in (*cache.rglob("*"), *(stopped.tree / ".git").rglob("*"))) == objects


def test_ignored_file_stops_rebase(applied: Tiny, kvtool: Any) -> None:
    (applied.upstream / "build-x").mkdir()
    (applied.upstream / "build-x/file").write_text("theirs")
    git(applied.upstream, "add", "-f", "build-x/file")
    release(applied, "v3")
    (applied.tree / "build-x").mkdir()
    (applied.tree / "build-x/file").write_text("mine")
    before = everything(applied)
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 4 and "build-x/file" in ran.json["error"]["output"], ran
    assert everything(applied) == before and kvtool("status", "--json").json["state"] == "clean"
    (applied.tree / "build-x/file").unlink()
    assert kvtool("rebase", "v3").code == 0
    finished(applied, kvtool)


def test_unwritable_project_changes_nothing(applied: Tiny, kvtool: Any, monkeypatch: Any) -> None:
    from kvtool.errors import DiskError
    from kvtool.series.changes import put_file

    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool two;\n    bool dynamic;\n"))
    before = everything(applied)

    def full(path: Path, change: Any) -> None:
        if change.path.endswith(".lock") and change.action == "new":
            raise OSError(28, "No space left on device")
        put_file(path, change)

    monkeypatch.setattr("kvtool.worktree.transaction.put_file", full)
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, DiskError.code)
    assert everything(applied) == before and not (applied.state / "rebase.json").exists()


def test_changed_patches_during_rebase(stopped: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v3")
    resolve(stopped, *BLOCK)
    later = stopped.root / "patches/tail.patch"
    later.write_text(later.read_text().replace("x + 6 + 1", "x + 6 + 2"))
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 4 and "changed since the rebase began" in ran.json["error"]["what"], ran
    later.write_text(later.read_text().replace("x + 6 + 2", "x + 6 + 1"))
    assert kvtool("rebase", "--continue").code == 0


def test_user_settings_do_not_matter(stopped: Tiny, kvtool: Any) -> None:
    settings = {
        "diff.noprefix": "true",
        "diff.context": "9",
        "diff.external": "false",
        "core.autocrlf": "true",
        "commit.gpgsign": "true",
        "merge.conflictStyle": "merge",
        "merge.ff": "only",
        "rerere.enabled": "false",
        "rerere.autoUpdate": "true",
        "merge.default": "mine",
        "merge.mine.driver": "false",
        "core.hooksPath": str(stopped.root / "hooks"),
        "advice.detachedHead": "true",
        "checkout.defaultRemote": "x",
        "format.attach": "true",
    }
    for file in (Path(os.environ["HOME"]) / ".gitconfig", stopped.tree / ".git/config"):
        for key, value in settings.items():
            git(stopped.root, "config", "--file", str(file), key, value)
    (stopped.root / "hooks").mkdir()
    for hook in ("post-checkout", "pre-commit", "reference-transaction"):
        (stopped.root / "hooks" / hook).write_text("#!/bin/sh\nexit 1\n")
        (stopped.root / "hooks" / hook).chmod(0o755)
    assert kvtool("rebase", "v3").code == 3
    text = (stopped.tree / "src/a.cpp").read_text()
    assert "||||||| " in text and "\r" not in text
    resolve(stopped, *BLOCK)
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 0, ran
    assert "--- a/src/a.cpp" in (stopped.root / "patches/block.patch").read_text()
    finished(stopped, kvtool)
