"""Test unusual file names, long lines, environments and owners of files. kvtool must work, or print git's error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.edits import edit, files
from tests.repo.rebases import outcomes, release

NAMES = [
    'src/say "hi".txt',
    "src/back\\slash.txt",
    "src/tab\there.txt",
    'src/"',
    "src/line\nbreak.txt",
    "src/a b/c d.h",
]


def follow(project: Tiny, kvtool: Any, path: str) -> None:
    """Add a file with the given path to upstream, and rebase the series."""
    write_files(project.upstream, {path: "one\ntwo\nthree\nfour\nfive\n"})
    git(project.upstream, "add", "-A")
    release(project, "v3")
    assert kvtool("rebase", "v3").code == 0


@pytest.mark.parametrize("path", NAMES)
def test_special_file_name_is_exported(applied: Tiny, kvtool: Any, path: str) -> None:
    follow(applied, kvtool, path)
    edit(applied, path, "two", "TWO", "names: change")
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (0, {"patches/names-change.patch": "add", "patches/series.toml": "change"})
    assert kvtool("export", "--check").code == 0
    git(applied.upstream, "mv", path, "src/renamed " + Path(path).name)
    release(applied, "v4")
    assert kvtool("rebase", "v4").code == 0
    assert "TWO" in (applied.tree / ("src/renamed " + Path(path).name)).read_text()
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0


@pytest.mark.parametrize("path", NAMES)
def test_special_file_name_in_conflict(applied: Tiny, kvtool: Any, path: str) -> None:
    follow(applied, kvtool, path)
    edit(applied, path, "two", "TWO", "names: change")
    assert kvtool("export").code == 0
    release(applied, "v4", (path, "two", "2"))
    ran = kvtool("rebase", "v4", "--json")
    assert ran.code == 3 and outcomes(ran)["names-change"] == "conflict"
    assert ran.json["patches"][-1]["failed"][0]["path"] == path
    (applied.tree / path).write_text("one\nTWO 2\nthree\nfour\nfive\n")
    assert kvtool("rebase", "--continue").code == 0
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0


def test_very_long_line_is_reported(applied: Tiny, kvtool: Any) -> None:
    write_files(applied.upstream, {"src/long.txt": "x" * 140_000 + "\nend\n"})
    git(applied.upstream, "add", "-A")
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    edit(applied, "src/long.txt", "x" * 140_000, "y" * 140_000, "long: change")
    assert kvtool("export").code == 0
    release(applied, "v4", ("src/long.txt", "end", "END"))
    ran = kvtool("rebase", "v4")
    assert ran.code == 3, ran


@pytest.mark.parametrize(
    "name", ["GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"]
)
def test_git_variables_are_ignored(
    applied: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("rebase", "v2").code == 0
    assert os.environ[name] == str(tmp_path / "nowhere")


@pytest.mark.skipif(not hasattr(os, "chown") or os.geteuid() != 0, reason="only root can change the owner of a file")
@pytest.mark.parametrize(("command", "part"), [("status", "llama.cpp"), ("apply", "llama.cpp"), ("diff", ".git")])
def test_tree_of_other_user(applied: Tiny, kvtool: Any, command: str, part: str) -> None:
    git(applied.root, "init", "-q")
    git(applied.root, "add", "patches")
    git(applied.root, "commit", "-qm", "series")
    for path in (applied.root / part, *(applied.root / part).rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    if part == ".git":
        os.chown(applied.root, 65534, 65534)
    ran = kvtool(command, "--json")
    assert ran.code == 4, ran
    assert "safe.directory" in ran.json["error"]["next"] and "dubious ownership" in ran.json["error"]["output"]


def test_hunk_label_names_function(applied: Tiny, kvtool: Any) -> None:
    applied.add_patch("below", ("src/a.cpp", "int y = x + 4;", "int y = x + 44;"))
    release(applied, "v3", ("src/a.cpp", "int y = x + 4;", "int y = x + 45;"))
    (hunk,) = kvtool("rebase", "v3", "--dry-run", "--keep-going", "--json").json["patches"][2]["failed"]
    assert hunk["header"].endswith("@@ int function_4(int x) {")
