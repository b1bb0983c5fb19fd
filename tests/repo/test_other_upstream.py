"""Test a project for another repository than llama.cpp, from init to rebase. Nothing in it may be about llama.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git
from tests.repo.test_init import copy_pages


@pytest.fixture
def other(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make an empty project for the tiny upstream, with the name zlib."""
    monkeypatch.delenv("KVTOOL_UPSTREAM")
    copy_pages(project.root)
    root = tmp_path / "mine"
    ran = kvtool("init", root, "--empty", "--remote", project.upstream, "--name", "zlib")
    assert ran.code == 0, ran
    assert "rebase TAG" in ran.out
    monkeypatch.chdir(root)
    return root


def test_project_names_only_own_upstream(other: Path) -> None:
    text = (other / "patches/upstream.lock").read_text()
    assert "[[upstream]]" not in text and 'name = "zlib"' in text
    for file in other.rglob("*"):
        if file.is_file():
            assert "llama" not in file.read_text(), file
    assert "zlib" in (other / "patches/README.md").read_text()
    assert "kvtool import ~/src/my-fork" in (other / "docs/guides/carry-your-own-fork.md").read_text()
    assert (other / ".gitignore").read_text().count("/zlib\n")


def test_commands_before_first_tag(other: Path, kvtool: Any) -> None:
    for command in (("apply",), ("fetch",), ("rebase", "v2", "--dry-run")):
        error = kvtool(*command, "--json").json["error"]
        assert "no state of zlib" in error["what"] and "kvtool rebase TAG" in error["next"], command
    assert kvtool("status", "--json").json["state"] == "not-applied"
    assert kvtool("lint").code == 0


def test_series_starts_at_tag_and_moves(other: Path, project: Tiny, kvtool: Any) -> None:
    said = []
    ran = kvtool("rebase", "v1")
    assert ran.code == 0, ran
    said.append(ran)
    tree = other / "zlib"
    assert git(tree, "rev-parse", "HEAD^{tree}") == git(project.upstream, "rev-parse", "v1^{tree}")
    (tree / "src/a.cpp").write_text((tree / "src/a.cpp").read_text().replace("x + 5", "x + 55"))
    git(tree, "commit", "-qam", "add fifty")
    for command in (
        ("export",),
        ("export", "--check"),
        ("rebase", "v2"),
        ("status",),
        ("apply",),
        ("fetch",),
        ("diff", "v1", "v2"),
    ):
        ran = kvtool(*command)
        assert ran.code == 0, (command, ran)
        said.append(ran)
    ran = kvtool("canary", "v1", "--to", "rebase")
    assert ran.code == 0, ran
    said.append(ran)
    (tree / "src/a.cpp").write_text("mine")
    said.append(kvtool("rebase", "v1"))
    text = "".join(ran.out + ran.err for ran in said)
    assert "zlib v2" in text and "llama" not in text, text


def test_conflict_names_the_upstream(other: Path, kvtool: Any) -> None:
    assert kvtool("rebase", "v1").code == 0
    tree = other / "zlib"
    (tree / "src/a.cpp").write_text((tree / "src/a.cpp").read_text().replace("x + 8", "x + 8 + 1"))
    git(tree, "commit", "-qam", "eight")
    assert kvtool("export").code == 0
    ran = kvtool("rebase", "v2")
    assert ran.code == 3 and "zlib v2" in ran.err and "llama" not in ran.out + ran.err


@pytest.mark.parametrize("command", ["build", "verify", "bench", "package", "canary"])
def test_command_without_support_is_refused(other: Path, kvtool: Any, command: str) -> None:
    assert kvtool("rebase", "v1").code == 0
    error = kvtool(command, "--json").json["error"]
    assert "only llama.cpp" in error["what"] and "zlib" in error["why"], error


def test_fork_is_imported(other: Path, project: Tiny, kvtool: Any, tmp_path: Path) -> None:
    fork = tmp_path / "zlib-fork"
    git(tmp_path, "clone", "-q", "-o", "upstream", str(project.upstream), str(fork))
    (fork / "src/b.h").write_text("struct other {};\n")
    git(fork, "commit", "-qam", "other")
    ran = kvtool("import", fork, "--base", "v2")
    assert ran.code == 0 and "llama" not in ran.out + ran.err, ran
    assert kvtool("apply").code == 0
    assert git(other / "zlib", "rev-parse", "HEAD^{tree}") == git(fork, "rev-parse", "HEAD^{tree}")


def test_failed_first_rebase_leaves_the_lock(other: Path, kvtool: Any) -> None:
    before = (other / "patches/upstream.lock").read_bytes()
    (other / "zlib").mkdir()
    (other / "zlib/mine").touch()
    assert kvtool("rebase", "v1").code == 4
    assert (other / "patches/upstream.lock").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--remote", "x"), "--remote needs --empty"),
        (("--empty", "--name", "x"), "--name needs --remote"),
        (("--empty", "--remote", "x", "--name", "a b"), "cannot be the name"),
        (("--empty", "--remote", "x", "--name", "patches"), "cannot be the name"),
    ],
)
def test_wrong_options_are_explained(
    project: Tiny, kvtool: Any, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    ran = kvtool("init", tmp_path / "new", *options, "--json")
    assert ran.code == 2 and words in ran.json["error"]["what"]
    assert not (tmp_path / "new").exists()


def test_name_is_last_part_of_url(project: Tiny, kvtool: Any, tmp_path: Path) -> None:
    ran = kvtool("init", tmp_path / "new", "--empty", "--remote", "https://example.invalid/me/whisper.cpp.git")
    assert ran.code == 0, ran
    lock = (tmp_path / "new/patches/upstream.lock").read_text()
    assert 'name = "whisper.cpp"' in lock and 'remote = "https://example.invalid/me/whisper.cpp.git"' in lock
    made = subprocess.run(["make"], cwd=tmp_path / "new", capture_output=True, text=True).stdout
    assert "whisper.cpp" in made and "build" not in made
