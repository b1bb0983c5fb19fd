"""Test what kvtool export refuses, and that an export that fails or is killed writes all files or none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.series.changes import Change, put_file
from tests.conftest import Tiny, git
from tests.repo.edits import edit, files

# --- refusals -----------------------------------------------------------------------------------------------------


def refused(project: Tiny, kvtool, code: int, *words: str) -> None:
    before, head = project.snapshot(), git(project.tree, "rev-parse", "HEAD")
    ran = kvtool("export", "--json")
    assert ran.code == code, ran
    said = " ".join(str(value) for value in ran.json["error"].values())
    assert all(word in said for word in words), said
    assert (project.snapshot(), git(project.tree, "rev-parse", "HEAD")) == (before, head)


def test_export_before_apply_is_refused(project: Tiny, kvtool) -> None:
    ran = kvtool("export", "--json", "--tree", project.root / "other")
    assert ran.code == 4 and ran.json["error"]["next"] == f"kvtool apply --tree {project.root}/other"


def test_uncommitted_edit_is_refused(applied: Tiny, kvtool) -> None:
    (applied.tree / "src/b.h").write_text("mine")
    refused(applied, kvtool, 4, "uncommitted", "src/b.h")


def test_changed_project_is_refused(applied: Tiny, kvtool) -> None:
    (applied.root / "cpp/src/new.cpp").write_text("int newer;\n")
    refused(applied, kvtool, 4, "kvtool apply")
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    refused(applied, kvtool, 4, "branch mine", "cherry-pick")
    # run the suggested commands
    head = git(applied.tree, "rev-parse", "HEAD~1")
    git(applied.tree, "branch", "mine")
    git(applied.tree, "reset", "-q", "--hard", head)
    assert kvtool("apply").code == 0
    git(applied.tree, "cherry-pick", f"{head}..mine")
    assert files(kvtool("export", "--json")) == {"patches/flag.patch": "change"}
    assert (applied.root / "cpp/src/new.cpp").read_text() == "int newer;\n"


def test_same_change_on_both_sides(applied: Tiny, kvtool) -> None:
    (applied.root / "cpp/src/new.cpp").write_text("int newer;\n")
    (applied.tree / "src/new.cpp").write_text("int newer;\n")
    git(applied.tree, "commit", "-qam", "newer")
    assert files(kvtool("export", "--json")) == {}
    assert kvtool("status", "--json").json["state"] == "clean"


def test_patch_with_new_id_is_same(applied: Tiny, kvtool) -> None:
    """Rename a patch in the project as patches/README.md describes, without running kvtool apply."""
    series = applied.root / "patches/series.toml"
    series.write_text(series.read_text().replace('id = "flag"', 'id = "dyn"'))
    (applied.root / "patches/flag.patch").rename(applied.root / "patches/dyn.patch")
    assert files(kvtool("export", "--json")) == {}
    assert kvtool("status", "--json").json["state"] == "clean"


def test_merge_commit_is_refused(applied: Tiny, kvtool) -> None:
    git(applied.tree, "checkout", "-q", "-b", "side", "HEAD~1")
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", "side")
    git(applied.tree, "checkout", "-q", "kvtool/v1")
    git(applied.tree, "merge", "-q", "--no-ff", "-m", "merged", "side")
    refused(applied, kvtool, 4, "is a merge")


def test_fixup_of_unknown_patch(applied: Tiny, kvtool) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! no such patch")
    refused(applied, kvtool, 4, "is a fixup, but its patch was not found", "no such patch")


def test_fixup_that_needs_later_patch(applied: Tiny, kvtool) -> None:
    edit(applied, "src/a.cpp", "x + 2 + grown();", "x + 2 + grown(1);", "fixup! flag")
    refused(applied, kvtool, 3, "does not apply to its patch", "later patch")
    assert git(applied.tree, "status", "--porcelain") == ""


def test_fixup_that_undoes_later_commit(applied: Tiny, kvtool) -> None:
    """Expect that a fixup of an early patch is refused if it undoes a later commit.

    The later commit and the fixup together change nothing, so nothing would remain of the later patch.
    """
    edit(applied, "src/a.cpp", "x + 6;", "x + 66;", "six")
    edit(applied, "src/a.cpp", "x + 66;", "x + 6;", "fixup! flag")
    refused(applied, kvtool, 3, "cannot be folded", "src/a.cpp")


def test_missing_commit_is_refused(applied: Tiny, kvtool) -> None:
    git(applied.tree, "reset", "-q", "--hard", "HEAD~1")
    refused(applied, kvtool, 4, "'use'", "kvtool export --drop use")


def keep_entries(project: Tiny, *names: str) -> None:
    """Keep only these patches in series.toml, in this order. Delete the files of all other patches."""
    series = project.root / "patches/series.toml"
    head, *entries = series.read_text().split("[[patch]]")
    by_name = {entry.split('"')[1]: entry for entry in entries}
    for name in set(by_name) - set(names):
        (project.root / f"patches/{name}.patch").unlink()
    series.write_text("[[patch]]".join([head, *(by_name[name] for name in names)]))


def test_suggested_drop_of_missing_commits(applied: Tiny, kvtool) -> None:
    """Remove the commits of two patches, and add a new commit. Only the new commit stays in the tree."""
    git(applied.tree, "reset", "-q", "--hard", "HEAD~2")
    (applied.tree / "src/new.cpp").write_text("int newer;\n")
    edit(applied, "src/b.h", "bool three;", "bool four;", "four")
    refused(applied, kvtool, 4, "'flag', 'use'", "kvtool export --drop flag --drop use")
    keep_entries(applied)
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (
        0,
        {"cpp/src/new.cpp": "change", "patches/four.patch": "add", "patches/series.toml": "change"},
    )
    assert kvtool("status", "--json").json["state"] == "clean"


def test_dropped_patch_with_dependent(applied: Tiny, kvtool) -> None:
    """Drop a patch that comes before another one. The other one was resolved by hand, and does not apply without it."""
    applied.add_patch("first", ("src/a.cpp", "x + 4;", "x + 4 + 4;"))
    applied.add_patch("second", ("src/a.cpp", "x + 4 + 4;", "x + 4 + 4 + 4;"))
    assert kvtool("apply").code == 0
    git(applied.tree, "reset", "-q", "--hard", "HEAD~2")
    edit(applied, "src/a.cpp", "x + 4;", "x + 444;", "second: a patch")
    keep_entries(applied, "flag", "use", "second")
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (0, {"patches/second.patch": "change"})
    assert kvtool("status", "--json").json["state"] == "clean"


@pytest.mark.parametrize("how", ["entry", "until"])
@pytest.mark.parametrize("again", [False, True], ids=["unchanged", "committed-again"])
def test_patch_dropped_in_project_stays_dropped(applied: Tiny, kvtool, how: str, again: bool) -> None:
    if again:
        git(applied.tree, "commit", "-q", "--amend", "--no-edit", "--reset-author")
    if how == "entry":
        keep_entries(applied, "flag")
    else:
        with (applied.root / "patches/series.toml").open("a") as series:
            series.write('until = "v1"\n')
    refused(applied, kvtool, 4, "would undo that", "kvtool apply")


def test_newly_wanted_patch_is_not_lost(project: Tiny, kvtool) -> None:
    project.add_patch("later", ("src/a.cpp", "x + 6;", "x + 6 + 1;"), extra='from = "v2"\n')
    assert kvtool("apply").code == 0
    series = project.root / "patches/series.toml"
    series.write_text(series.read_text().replace('from = "v2"\n', ""))
    refused(project, kvtool, 4, "would undo that", "kvtool apply")


@pytest.mark.parametrize("also", ["changed", "added", "moved", "cpp"])
def test_dropped_patch_hides_no_change(applied: Tiny, kvtool, also: str) -> None:
    applied.add_patch("tail", ("src/a.cpp", "x + 6;", "x + 6 + 1;"))
    assert kvtool("apply").code == 0
    git(applied.tree, "reset", "-q", "--hard", "HEAD~1")
    edit(applied, "src/b.h", "bool three;", "bool four;", "four")
    keep_entries(applied, *(("use", "flag") if also == "moved" else ("flag", "use")))
    if also == "changed":
        file = applied.root / "patches/use.patch"
        file.write_text(file.read_text().replace("grown()", "grew()"))
    elif also == "added":
        applied.add_patch("more", ("src/a.cpp", "x + 3;", "x + 3 + 2;"))
    elif also == "cpp":
        (applied.root / "cpp/src/new.cpp").write_text("int newer;\n")
    refused(applied, kvtool, 4, "would undo that")


def test_empty_message_is_refused(applied: Tiny, kvtool) -> None:
    (applied.tree / "src/b.h").write_text("struct params {};\n")
    git(applied.tree, "commit", "-qa", "--allow-empty-message", "-m", "")
    refused(applied, kvtool, 4, "is empty", "reword")


def test_unrelated_history_is_refused(applied: Tiny, kvtool) -> None:
    git(applied.tree, "checkout", "-q", "--orphan", "other")
    git(applied.tree, "commit", "-qm", "other")
    refused(applied, kvtool, 4, "is not based on")


# --- all or nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_write_failure_restores_files(applied: Tiny, kvtool, monkeypatch, fail_at: int) -> None:
    (applied.tree / "src/more.cpp").write_text("int more;\n")
    git(applied.tree, "add", "-A")
    edit(applied, "src/a.cpp", "x + 6;", "x + 6 + more;", "six")
    calls: list[Path] = []

    def failing(path: Path, change: Change) -> None:
        if path.is_relative_to(applied.root / "cpp") or path.is_relative_to(applied.root / "patches"):
            calls.append(path)
            if len(calls) == fail_at + 1:
                raise OSError(28, "No space left on device")
        put_file(path, change)

    monkeypatch.setattr("kvtool.worktree.transaction.put_file", failing)
    before, head = applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")
    ran = kvtool("export", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk"
    assert (applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")) == (before, head)
    monkeypatch.undo()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_killed_export_can_be_repeated(applied: Tiny, kvtool, after: int) -> None:
    (applied.tree / "src/more.cpp").write_text("int more;\n")
    git(applied.tree, "add", "-A")
    edit(applied, "src/a.cpp", "x + 6;", "x + 6 + more;", "six")
    code = (
        "import os, sys; from kvtool import cli; from kvtool.worktree import transaction\n"
        "real, calls = transaction.put_file, []\n"
        "def put(path, change):\n"
        f"    if str(path).startswith({str(applied.root)!r} + '/cpp') or '/project/patches' in str(path):\n"
        f"        calls.append(1)\n        if len(calls) > {after}: os._exit(137)\n"
        "    real(path, change)\n"
        "transaction.put_file = put; sys.exit(cli.run(['export']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=applied.root)
    assert done.returncode == (137 if after < 3 else 0)
    if after < 3:
        assert kvtool("status", "--json").json["state"] == "interrupted"
        assert kvtool("apply").code == 4
    assert kvtool("export").code == 0
    assert kvtool("status", "--json").json["state"] == "clean"
    assert (applied.root / "cpp/src/more.cpp").read_text() == "int more;\n"
    assert (applied.root / "patches/six.patch").exists()
