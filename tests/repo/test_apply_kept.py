"""Test that kvtool apply keeps the user's edits, files, commits and folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.edits import change_series


def test_uncommitted_edit_is_kept(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.tree / "src/b.h").write_text("mine")
    change_series(project)
    ran = kvtool("apply", "--json")
    assert ran.code == 4
    assert "src/b.h" in ran.json["error"]["why"] and "kvtool export" in ran.json["error"]["next"]
    assert (project.tree / "src/b.h").read_text() == "mine"
    assert (project.tree / "src/new.cpp").read_text() == "int brand_new;\n"


def test_untracked_file_in_way_is_kept(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.tree / "src/other.cpp").write_text("mine")
    write = project.root / "cpp/src/other.cpp"
    write.write_text("theirs")
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and (project.tree / "src/other.cpp").read_text() == "mine"


def test_ignored_file_in_way_is_kept(project: Tiny, kvtool) -> None:
    kvtool("apply")
    before = git(project.tree, "rev-parse", "HEAD")
    write_files(project.tree, {"build-mine/x.cpp": "mine"})
    write_files(project.root, {"cpp/build-mine/x.cpp": "theirs", "cpp/src/new.cpp": "int newer;\n"})
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and "build-mine/x.cpp" in ran.json["error"]["output"]
    assert (project.tree / "build-mine/x.cpp").read_text() == "mine"
    assert (project.tree / "src/new.cpp").read_text() == "int brand_new;\n"
    assert git(project.tree, "rev-parse", "HEAD") == before
    (project.tree / "build-mine/x.cpp").unlink()
    assert kvtool("apply").code == 0


def test_ignored_file_leaves_tree_clean(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.tree / "build").mkdir()
    (project.tree / "build/x").write_text("object")
    change_series(project)
    assert kvtool("apply").code == 0
    assert (project.tree / "build/x").read_text() == "object"


@pytest.fixture(params=["core.excludesFile", "the usual place"])
def ignored_everywhere(request: pytest.FixtureRequest) -> None:
    """Let the user's configuration of git ignore notes* in every repository."""
    if request.param == "core.excludesFile":
        write_files(Path.home(), {"my-ignore": "notes*\n"})
        git(Path.home(), "config", "--global", "core.excludesFile", "~/my-ignore")
    else:
        write_files(Path.home(), {".config/git/ignore": "notes*\n"})


@pytest.mark.usefixtures("ignored_everywhere")
def test_globally_ignored_file_leaves_tree_clean(project: Tiny, kvtool) -> None:
    kvtool("apply")
    write_files(project.tree, {"notes.txt": "mine", "src/notes/x": "mine"})
    assert kvtool("status", "--json").json["state"] == "clean"
    change_series(project)
    assert kvtool("apply").code == 0
    assert kvtool("export", "--check").code == 0
    assert (project.tree / "notes.txt").read_text() == (project.tree / "src/notes/x").read_text() == "mine"


@pytest.mark.usefixtures("ignored_everywhere")
@pytest.mark.parametrize("path", ["src/notes.cpp", "src/notes.cpp/mine"])
def test_globally_ignored_file_in_way_is_kept(project: Tiny, kvtool, path: str) -> None:
    kvtool("apply")
    before = git(project.tree, "rev-parse", "HEAD")
    write_files(project.tree, {path: "mine"})
    write_files(project.root, {"cpp/src/notes.cpp": "theirs", "cpp/src/new.cpp": "int newer;\n"})
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and path in ran.json["error"]["output"], ran
    assert (project.tree / path).read_text() == "mine"
    assert git(project.tree, "rev-parse", "HEAD") == before
    shutil.rmtree(project.tree / "src/notes.cpp", ignore_errors=True)
    (project.tree / "src/notes.cpp").unlink(missing_ok=True)
    assert kvtool("apply").code == 0


def test_own_commit_is_kept(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.tree / "src/b.h").write_text("mine\n")
    git(project.tree, "commit", "-qam", "my work")
    change_series(project)
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and "my work" in ran.json["error"]["why"] and "kvtool export" in ran.json["error"]["next"]
    assert git(project.tree, "log", "-1", "--format=%s") == "my work"


def test_branch_commit_with_detached_head(project: Tiny, kvtool) -> None:
    kvtool("apply")
    git(project.tree, "commit", "-q", "--allow-empty", "-m", "x")
    (project.tree / "src/b.h").write_text("mine\n")
    git(project.tree, "commit", "-qam", "my work")
    git(project.tree, "checkout", "-q", "--detach", "HEAD~2")
    change_series(project)
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and "kvtool/v1" in ran.json["error"]["what"]
    assert git(project.tree, "log", "-1", "--format=%s", "kvtool/v1") == "my work"


def test_branch_of_other_worktree_is_kept(applied: Tiny, kvtool, tmp_path) -> None:
    assert kvtool("apply", "v2").code == kvtool("apply", "v1").code == 0
    git(applied.tree, "worktree", "add", "-q", str(tmp_path / "two"), "kvtool/v2")
    change_series(applied)
    for command in ("apply", "rebase"):
        ran = kvtool(command, "v2", "--json")
        assert ran.code == 4 and str(tmp_path / "two") in ran.json["error"]["what"]
    assert git(tmp_path / "two", "status", "--porcelain") == ""
    git(tmp_path / "two", "checkout", "-q", "--detach")
    assert kvtool("apply", "v2").code == 0


def test_running_git_operation_is_refused(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.tree / ".git/rebase-merge").mkdir()
    change_series(project)
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and "rebase" in ran.json["error"]["what"]


@pytest.mark.parametrize("content", ["file", "dir", "git"])
def test_foreign_place_is_not_touched(project: Tiny, kvtool, content: str) -> None:
    if content == "file":
        project.tree.write_text("mine")
    else:
        project.tree.mkdir()
        (project.tree / "mine").write_text("x")
        if content == "git":
            git(project.tree, "init", "-q")
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and "not a tree that kvtool made" in ran.json["error"]["what"]
    assert project.tree.is_file() or (project.tree / "mine").read_text() == "x"


def test_empty_directory_is_used(project: Tiny, kvtool) -> None:
    project.tree.mkdir()
    assert kvtool("apply").code == 0


def test_unreadable_state_is_error(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.state / "state.json").write_text("{ not json")
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and "state.json" in ran.json["error"]["what"]
