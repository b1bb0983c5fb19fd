"""Test kvtool apply with real git and a tiny upstream: the contents of the tree, and the report of a conflict."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from kvtool.project import find_project
from tests.conftest import Tiny, git
from tests.repo.edits import edit
from tests.repo.fetches import fake, needs_posix
from tests.repo.rebases import release


def mtimes(tree: Path) -> dict[str, int]:
    return {
        str(p.relative_to(tree)): p.stat().st_mtime_ns
        for p in sorted(tree.rglob("*"))
        if p.is_file() and ".git" not in p.relative_to(tree).parts
    }


def test_tree_has_one_commit_per_patch(project: Tiny, kvtool) -> None:
    ran = kvtool("apply", "--json")
    assert ran.code == 0, ran
    assert ran.json["outcome"] == "created"
    assert git(project.tree, "log", "--format=%s", "--reverse").splitlines() == [
        "llama.cpp v1",
        "kvtool: add the files of cpp/",
        "flag: a patch",
        "use: a patch",
    ]
    root = git(project.tree, "rev-list", "--max-parents=0", "HEAD")
    assert git(project.tree, "rev-parse", f"{root}^{{tree}}") == git(project.upstream, "rev-parse", "v1^{tree}")
    assert git(project.tree, "branch", "--show-current") == "kvtool/v1"
    assert (project.tree / "src/new.cpp").read_text() == "int brand_new;\n"
    assert os.access(project.tree / "tools/check/run.sh", os.X_OK)
    assert os.access(project.tree / "scripts/run.sh", os.X_OK)
    assert "bool dynamic;" in (project.tree / "src/b.h").read_text()
    assert not (project.tree / "README.md").exists()
    assert git(project.tree, "status", "--porcelain") == ""
    assert not (project.tree / ".git/objects/info/alternates").exists()
    assert git(project.tree, "config", "--local", "core.autocrlf") == "false"


def test_commit_metadata_from_mail(project: Tiny, kvtool) -> None:
    project.add_patch(
        "late", ("src/b.h", "bool one;", "bool one; // 1"), message="Sübject ünï\n\nWhy it is so.\n\nMore."
    )
    kvtool("apply")
    log = git(project.tree, "log", "-1", "--format=%an|%ae|%aI|%cn|%ct|%B")
    assert log == (
        "Tester|tester@example.invalid|2026-01-02T03:04:05+01:00|kvtool|1767225600|"
        "Sübject ünï\n\nWhy it is so.\n\nMore."
    )


def test_invalid_date_is_error(project: Tiny, kvtool) -> None:
    patch = project.root / "patches/flag.patch"
    patch.write_text(re.sub(r"(?m)^Date: .*", "Date: soon", patch.read_text()))
    ran = kvtool("apply", "--json")
    assert ran.code == 2 and "'soon'" in ran.json["error"]["what"], ran


def test_commit_ids_are_reproducible(project: Tiny, kvtool, tmp_path, monkeypatch) -> None:
    first = kvtool("apply", "--json").json["head"]
    copy = tmp_path / "elsewhere"
    shutil.copytree(project.root, copy, ignore=shutil.ignore_patterns("llama.cpp"))
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache-2"))
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2020-02-02T02:02:02")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    second = kvtool("apply", "--project", copy, "--json").json["head"]
    assert first == second


@needs_posix
def test_safe_directory_setting_is_used(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    real = shutil.which("git")
    fake(tmp_path, monkeypatch, "git", f'GIT_TEST_ASSUME_DIFFERENT_OWNER=1 exec {real} "$@"\n')
    assert "dubious ownership" in str(kvtool("apply", "--json").json["error"])
    (tmp_path / "config").write_text('[safe]\ndirectory = "/odd\x01"\ndirectory = "*"\n[core]\nworktree = /nowhere\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    assert [kvtool(command).code for command in ("apply", "apply", "status", "export")] == [0, 0, 0, 0]


@pytest.mark.parametrize("there", [False, True], ids=["dangling", "empty"])
def test_tree_may_be_symlink(project: Tiny, kvtool, tmp_path, there: bool) -> None:
    """Let the tree be a link to a folder on a larger disk. Both paths mean the same tree."""
    place = tmp_path / "large disk" / "llama"
    if there:
        place.mkdir(parents=True)
    project.tree.symlink_to(place)
    assert kvtool("apply").code == 0
    assert project.tree.is_symlink() and (place / "src/new.cpp").is_file()
    assert find_project(tree=place) == find_project()


def test_second_apply_changes_nothing(project: Tiny, kvtool) -> None:
    kvtool("apply")
    before, state = mtimes(project.tree), (project.state / "state.json").stat().st_mtime_ns
    ran = kvtool("apply", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["changed_files"]) == (0, "unchanged", 0)
    assert mtimes(project.tree) == before
    assert (project.state / "state.json").stat().st_mtime_ns == state


def test_only_files_that_change_are_written(project: Tiny, kvtool) -> None:
    kvtool("apply")
    for path in project.tree.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            os.utime(path, ns=(10**18, 10**18))
    (project.root / "cpp/src/new.cpp").write_text("int newer;\n")
    ran = kvtool("apply", "--json")
    assert (ran.json["outcome"], ran.json["changed_files"]) == ("moved", 1)
    assert [name for name, when in mtimes(project.tree).items() if when != 10**18] == ["src/new.cpp"]


def test_removed_file_and_patch_disappear(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.root / "cpp/src/new.cpp").unlink()
    text = (project.root / "patches/series.toml").read_text()
    (project.root / "patches/series.toml").write_text(text.partition('\n[[patch]]\nid = "use"')[0])
    assert kvtool("apply").code == 0
    assert not (project.tree / "src/new.cpp").exists()
    assert "grown" not in (project.tree / "src/a.cpp").read_text()


def test_other_tag_reuses_tree_directory(project: Tiny, kvtool) -> None:
    kvtool("apply")
    ran = kvtool("apply", "v2", "--json")
    assert (ran.code, ran.json["tag"]) == (0, "v2")
    assert "x + 88" in (project.tree / "src/a.cpp").read_text()
    # the user asked for v2, so the tree stays valid although the lock has v1
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("apply", "--json").json["tag"] == "v1"
    assert kvtool("status", "--json").json["state"] == "clean"


def test_from_and_until_skip_a_patch(project: Tiny, kvtool) -> None:
    project.add_patch("new", ("src/b.h", "bool one;", "bool one; // new"), extra='from = "v2"\n')
    project.add_patch("old", ("src/b.h", "bool three;", "bool three; // old"), extra='until = "v2"\n')
    outcomes = {p["id"]: p["outcome"] for p in kvtool("apply", "--json").json["patches"]}
    assert (outcomes["new"], outcomes["old"]) == ("skipped", "applied")
    outcomes = {p["id"]: p["outcome"] for p in kvtool("apply", "v2", "--json").json["patches"]}
    assert (outcomes["new"], outcomes["old"]) == ("applied", "skipped")


def test_other_upstream_gets_moved_patches(project: Tiny, kvtool) -> None:
    """Use an upstream that changed only white space in a line near one patch.

    Then change and export the other patch there.
    """
    release(project, "v3", ("src/b.h", "    bool one;\n", "    bool   one;\n"))
    before = project.snapshot()
    ran = kvtool("apply", "v3", "--json")
    assert ran.code == 0, ran
    assert "bool   one;\n    bool two;\n    bool dynamic;\n" in (project.tree / "src/b.h").read_text()
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0
    edit(project, "src/a.cpp", "x + 2 + grown();", "x + 2 + shrunk();", "fixup! use")
    assert [file["path"] for file in kvtool("export", "--json").json["files"]] == ["patches/use.patch"]
    assert project.snapshot()["patches/flag.patch"] == before["patches/flag.patch"]
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("apply").code == 0
    assert "shrunk" in (project.tree / "src/a.cpp").read_text()
    assert kvtool("diff", "v1", "v3", "--json").json["same"], "upstream's line is not next to the patch"


# --- conflicts ----------------------------------------------------------------------------------------------------


def break_patch(project: Tiny, name: str, old: str, new: str) -> None:
    path = project.root / f"patches/{name}.patch"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_conflict_leaves_tree_and_names_hunk(project: Tiny, kvtool) -> None:
    project.add_patch("more", ("src/b.h", "bool dynamic;", "bool dynamic; // default off"))
    project.add_patch("aside", ("src/a.cpp", "x + 7;", "x + 7 + 1;"))
    kvtool("apply")
    before, head = mtimes(project.tree), git(project.tree, "rev-parse", "HEAD")
    break_patch(project, "flag", "     bool two;", "     bool twenty;")
    ran = kvtool("apply", "--json")
    assert ran.code == 3
    outcomes = {p["id"]: p["outcome"] for p in ran.json["patches"]}
    assert outcomes == {"flag": "conflict", "use": "applied", "more": "blocked", "aside": "applied"}
    report = {p["id"]: p for p in ran.json["patches"]}
    assert report["more"]["blocked_by"] == "flag"
    (failed,) = report["flag"]["failed"]
    assert (failed["path"], failed["number"], failed["total"]) == ("src/b.h", 1, 1)
    error = ran.json["error"]
    assert error["code"] == "conflict" and "'flag'" in error["what"] and "src/b.h hunk 1 of 1" in error["why"]
    assert (mtimes(project.tree), git(project.tree, "rev-parse", "HEAD")) == (before, head)
    human = kvtool("apply")
    assert "needs flag first" in human.out and "src/b.h hunk 1 of 1" in human.out + human.err


def test_failed_hunks_are_named(project: Tiny, kvtool) -> None:
    edits = [("src/a.cpp", f"x + {n};", f"x + {n} + 100;") for n in (1, 4, 7)]
    project.add_patch("three", *edits)
    break_patch(project, "three", "-    int y = x + 1;", "-    int y = x + 111;")
    break_patch(project, "three", "-    int y = x + 7;", "-    int y = x + 777;")
    failed = kvtool("apply", "--json").json["patches"][2]["failed"]
    assert [(hunk["number"], hunk["total"]) for hunk in failed] == [(1, 3), (3, 3)]


@needs_posix
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("echo 'unable to write: No space left on device' >&2; exit 1", "disk"),
        ('echo "fatal: sha1 file index.lock write error. Out of diskspace" >&2; exit 128', "disk"),
        ("echo 'error: Unable to write new index file' >&2; exit 128", "disk"),
        ("kill -9 $$", "internal"),
    ],
)
def test_git_failure_is_not_conflict(applied: Tiny, kvtool, tmp_path, monkeypatch, how: str, code: str) -> None:
    """Let the disk be full, or let the system kill git because memory is low."""
    (applied.root / "cpp/src/new.cpp").write_text("int newer;\n")
    fake(tmp_path, monkeypatch, "git", f'case " $* " in *" apply "*) {how};; esac\nexec {shutil.which("git")} "$@"\n')
    ran = kvtool("apply", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, code) and "conflict" not in ran.out


def test_conflict_on_first_apply_leaves_nothing(project: Tiny, kvtool) -> None:
    break_patch(project, "flag", "     bool two;", "     bool twenty;")
    assert kvtool("apply").code == 3
    assert not project.tree.exists()
    assert sorted(p.name for p in project.root.iterdir()) == ["cpp", "patches"]


def test_patch_in_upstream_is_merged(project: Tiny, kvtool) -> None:
    project.add_patch("up", ("src/a.cpp", "x + 8;", "x + 88;"))
    ran = kvtool("apply", "v2", "--json")
    assert ran.code == 0
    assert ran.json["patches"][2]["outcome"] == "merged"


def test_patch_to_missing_file(project: Tiny, kvtool) -> None:
    break_patch(project, "flag", "src/b.h", "src/gone.h")
    ran = kvtool("apply", "--json")
    assert ran.code == 3
    assert ran.json["patches"][0]["failed"][0]["reason"] == "upstream has no such file"


def test_hunk_in_other_function_is_shown(project: Tiny, kvtool) -> None:
    project.add_patch("drift", ("src/a.cpp", "x + 5;\n    return y;", "x + 5;\n    y++;\n    return y;"))
    path = project.root / "patches/drift.patch"
    text = path.read_text()
    assert "function_5" in text
    # the ids are those of another file and another result
    text = re.sub(r"^index .{40}\.\..{40}", f"index {'1' * 40}..{'2' * 40}", text, flags=re.MULTILINE)
    path.write_text(text.replace("int function_5(int x) {", "int function_6(int x) {"))
    ran = kvtool("apply", "--json")
    assert ran.code == 0
    assert "function_6" in ran.json["patches"][2]["moved"][0] and "function_5" in ran.json["patches"][2]["moved"][0]
    assert "drift: src/a.cpp" in kvtool("apply", "--tree", project.root / "again").out


@pytest.mark.parametrize("path", ["src/a.cpp", "src/a.cpp/inner.h", "docs"])
def test_cpp_file_at_upstream_path(project: Tiny, kvtool, path: str) -> None:
    target = project.root / "cpp" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("x")
    ran = kvtool("apply", "--json")
    assert ran.code == 2 and path in ran.json["error"]["what"], ran
    assert not project.tree.exists()


def test_quilt_patch_suggests_import(project: Tiny, kvtool) -> None:
    path = project.root / "patches/use.patch"
    diff = path.read_text().partition("\ndiff --git")[2]
    path.write_text(f"Description: a quilt patch\nAuthor: Ann <ann@x>\n\ndiff --git{diff}")
    error = kvtool("apply", "--json").json["error"]
    assert "use.patch" in error["what"] and "kvtool import --patches" in error["next"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" int function_2(int x) {\n", "", "3 lines before the change (there are 2)"),
        ("+    int y", "+ one more\n+    int y", "3 lines after the change (there are 4)"),
    ],
)
def test_wrong_count_names_line(project: Tiny, kvtool, old: str, new: str, words: str) -> None:
    path = project.root / "patches/use.patch"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    lines = path.read_text().split("\n")
    line = next(n for n, line in enumerate(lines, 1) if line.startswith("@@") and "function_1" in line)
    error = kvtool("apply", "--json").json["error"]
    assert f"use.patch:{line}: " in error["what"] and words in error["what"], error
