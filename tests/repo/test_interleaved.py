"""Test that every commit of a user stays on a branch if the user works while kvtool runs, or after it was killed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtool import locks
from kvtool.replay.export import plan_export
from kvtool.worktree import checkout, transaction
from tests.conftest import Tiny, git
from tests.repo.edits import edit
from tests.repo.rebases import current, release


class Killed(BaseException):
    """Simulate a kill, after which kvtool undoes nothing."""


def commit(project: Tiny) -> str:
    """Make a commit of the user on top of the tree's HEAD."""
    edit(project, "src/a.cpp", "x + 6;", "x + 66;", "mine")
    return git(project.tree, "rev-parse", "HEAD")


def is_on_a_branch(project: Tiny, mine: str) -> bool:
    return mine in git(project.tree, "rev-list", "--branches").split()


@pytest.fixture
def writing(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Kill a rebase to v2 after it has written the tree and the files of the project."""
    assert kvtool("apply").code == 0
    real = transaction.Stage.restore

    def put(*args: Any) -> None:
        real(*args)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(transaction.Stage, "restore", put)
        patched.setattr(transaction, "roll_back", lambda *_: None)
        with pytest.raises(Killed):
            kvtool("rebase", "v2")
    assert json.loads((project.state / "rebase.json").read_text())["phase"] == "writing"
    assert git(project.tree, "rev-parse", "--abbrev-ref", "HEAD") == "kvtool/v2"
    return project


def test_continued_killed_rebase_keeps_commits(writing: Tiny, kvtool: Any) -> None:
    made, mine = git(writing.tree, "rev-parse", "HEAD"), commit(writing)
    ran = kvtool("rebase", "--continue", "--json")
    assert is_on_a_branch(writing, mine), ran
    assert ran.code == 4 and mine[:10] in ran.json["error"]["why"], ran
    # run the suggested commands
    git(writing.tree, "branch", "mine")
    git(writing.tree, "checkout", "-q", "--detach", made)
    assert kvtool("rebase", "--continue").code == 0
    assert is_on_a_branch(writing, mine) and current(writing) == "v2"


def test_aborted_killed_rebase_keeps_commits(writing: Tiny, kvtool: Any) -> None:
    mine = commit(writing)
    git(writing.tree, "checkout", "-q", "kvtool/v1")
    ran = kvtool("rebase", "--abort")
    assert is_on_a_branch(writing, mine), ran
    assert ran.code == 0 and current(writing) == "v1"


def test_commit_during_apply_is_kept(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvtool("apply").code == 0
    (project.root / "cpp/src/new.cpp").write_text("int newer;\n")
    real, made = checkout.reject_untracked, []

    def meanwhile(*args: Any) -> None:
        real(*args)
        made.append(commit(project))

    monkeypatch.setattr(checkout, "reject_untracked", meanwhile)
    ran = kvtool("apply", "--json")
    assert is_on_a_branch(project, made[0]), ran
    assert ran.code == 4 and ran.json["error"]["next"], ran


def test_apply_after_waiting_keeps_rebase(applied: Tiny, kvtool: Any, monkeypatch: Any) -> None:
    """Let apply read the lock before the rebase changes it."""
    real = locks.hold_tree

    def waiting(*args: Any) -> Any:
        monkeypatch.setattr(checkout, "hold_tree", real)
        assert kvtool("rebase", "v2").code == 0
        return real(*args)

    monkeypatch.setattr(checkout, "hold_tree", waiting)
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and "v2" in ran.json["error"]["what"]
    assert kvtool("status", "--json").json["state"] == "clean" and current(applied) == "v2"


def test_branch_during_stopped_rebase_is_kept(project: Tiny, kvtool: Any) -> None:
    project.add_patch("block", ("src/a.cpp", "x + 4;\n", "x + 4;\n    one();\n"))
    release(project, "v3", ("src/a.cpp", "x + 4;\n", "x + 44;\n"))
    assert kvtool("apply").code == 0
    assert kvtool("rebase", "v3").code == 3
    text = git(project.tree, "show", "HEAD:src/a.cpp", strip=False)
    mine = git(project.tree, "commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "mine")
    git(project.tree, "branch", "kvtool/v3", mine)
    (project.tree / "src/a.cpp").write_text(text.replace("x + 44;\n", "x + 44;\n    one();\n"))
    ran = kvtool("rebase", "--continue", "--json")
    assert is_on_a_branch(project, mine), ran
    assert ran.code == 4 and "kvtool/v3" in ran.json["error"]["what"], ran
    git(project.tree, "branch", "-m", "kvtool/v3", "mine")
    assert kvtool("rebase", "--continue").code == 0
    assert is_on_a_branch(project, mine) and current(project) == "v3"


@pytest.mark.parametrize("path", ["patches/use.patch", "patches/series.toml", "cpp/src/new.cpp"])
def test_edit_during_export_is_kept(applied: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for name in ("src/a.cpp", "src/new.cpp"):
        file = applied.tree / name
        file.write_text(file.read_text().replace("x + 2", "x + 22") + "// more\n")
    git(applied.tree, "commit", "-qam", "fixup! use")
    (applied.tree / "src/b.h").write_text((applied.tree / "src/b.h").read_text() + "// a patch of its own\n")
    git(applied.tree, "commit", "-qam", "another")
    file = applied.root / path

    def meanwhile(*args: Any) -> Any:
        found = plan_export(*args)
        file.write_text(file.read_text() + "\n# mine\n")
        return found

    monkeypatch.setattr("kvtool.commands.export.plan_export", meanwhile)
    ran = kvtool("export", "--json")
    assert ran.code == 4 and path in ran.json["error"]["what"], ran
    assert file.read_text().endswith("# mine\n")
    assert not (applied.root / "patches/another.patch").exists()
