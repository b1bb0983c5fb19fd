"""The fast way to build a series gives what the ordinary way gives, to the commit id, or stands back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvtool.tree import exact
from tests.conftest import Tiny, git, write_files


@pytest.fixture
def ways(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """ways() applies the project twice: as it comes, and without the fast way; (was it fast?, both results equal?)."""
    real = exact.build

    def run() -> tuple[bool, bool]:
        fast: list[bool] = []

        def watched(*args: Any) -> Any:
            built = real(*args)
            fast.append(built is not None)
            return built

        results = []
        for name, build in (("fast", watched), ("slow", lambda *_: None)):
            monkeypatch.setattr(exact, "build", build)
            ran = kvtool("apply", "--json", "--tree", tmp_path / name)
            results.append((ran.code, {**ran.json, "tree": "", "error": ""}))
            if ran.code == 0:
                assert git(tmp_path / name, "fsck", "--no-dangling") == ""
                assert "exact" not in git(tmp_path / name, "for-each-ref")
        without_seconds = [re.sub(r"'seconds': [\d.e-]+", "", str(result)) for result in results]
        return fast[0], without_seconds[0] == without_seconds[1]

    return run


def change(project: Tiny, old: str, new: str, name: str = "use") -> None:
    path = project.root / f"patches/{name}.patch"
    text = path.read_bytes()
    assert old.encode() in text
    path.write_bytes(text.replace(old.encode(), new.encode(), 1))


def test_the_plain_case_is_fast(ways: Any) -> None:
    assert ways() == (True, True)


def test_several_hunks_files_and_patches_on_each_other(project: Tiny, ways: Any) -> None:
    project.add_patch(
        "more", ("src/a.cpp", "x + 2 + grown();", "x + 2 + grown() + 1;"), ("src/a.cpp", "x + 8;", "x + 88;")
    )
    project.add_patch("again", ("src/b.h", "    bool dynamic;\n", ""), ("src/a.cpp", "x + 88;", "x + 8;\n    y++;"))
    project.add_patch("first", ("src/a.cpp", "int function_1(int x) {\n", "// top\n\nint function_1(int x) {\n"))
    project.add_patch("last", ("CMakeLists.txt", "src/new.cpp)\n", "src/new.cpp)\n# the end\n"))
    project.add_patch("late", ("src/a.cpp", "x + 7;", "x + 77;"), extra='from = "v2"\n')
    assert ways() == (True, True)


@pytest.mark.parametrize(
    ("old", "new", "fast"),
    [
        ("From: Tester <tester@example.invalid>", "From: Jane Doe <j.doe+x@example.invalid>", True),
        ("From: Tester <tester@example.invalid>", "From: =?UTF-8?q?J=C3=BCrgen?= <j@example.invalid>", True),
        ("From: Tester <tester@example.invalid>", 'From: "J. Doe, Jr." <j@example.invalid>', False),
        ("From: Tester <tester@example.invalid>", 'From: ".dots." <j@example.invalid>', False),
        ("From: Tester <tester@example.invalid>", "From: <only@example.invalid>", False),
        ("Date: Fri, 2 Jan 2026 03:04:05 +0100", "Date: Sat, 3 Jan 1998 23:04:05 -0330", True),
        ("Date: Fri, 2 Jan 2026 03:04:05 +0100", "Date: 1767225600 +0000", False),
        ("Subject: use: a patch", "Subject: use: 100 %s \\n data 7", True),
        ("Subject: use: a patch\n\n", "Subject: use: a patch\n\nA body\n\n  with %d\n\n\n", True),
    ],
)
def test_authors_dates_and_messages(project: Tiny, ways: Any, old: str, new: str, fast: bool) -> None:
    change(project, old, new)
    assert ways() == (fast, True)


def test_files_of_all_kinds(project: Tiny, ways: Any) -> None:
    write_files(
        project.root, {"cpp/a/b/c/deep.cpp": "x", "cpp/tools/run.sh": "#!/bin/sh\n", "cpp/src/crlf.cpp": "a\r\nb\0"}
    )
    assert ways() == (True, True)


def test_an_executable_file_of_upstream(project: Tiny, ways: Any) -> None:
    project.add_patch("script", ("scripts/run.sh", "exit 0\n", "exit 1\n"))
    assert ways() == (True, True)


def test_no_newline_at_the_end_is_left_to_git(project: Tiny, ways: Any) -> None:
    project.add_patch("cut", ("CMakeLists.txt", "src/new.cpp)\n", "src/new.cpp) "))
    assert ways() == (False, True)


def test_a_file_that_is_not_the_one_it_was_written_against(project: Tiny, ways: Any) -> None:
    project.write_lock("v2")
    assert ways() == (False, True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 2 + grown();", "x + 2 + grown() ;"),  # the blob would be another
        ("@@ -6,3", "@@ -7,3"),
        ("diff --git a/src/a.cpp", "diff --git a/src/a.cpp\nold mode 100644\nnew mode 100755\ndiff --git a/src/a.cpp"),
    ],
)
def test_a_patch_that_does_not_say_the_truth(project: Tiny, ways: Any, old: str, new: str) -> None:
    change(project, old, new)
    assert ways()[0] is False


@pytest.mark.parametrize("path", ["src/a.cpp", "src/a.cpp/inner.h", "docs"])
def test_a_path_of_upstream_is_still_refused(project: Tiny, kvtool: Any, path: str) -> None:
    write_files(project.root, {f"cpp/{path}": "x"})
    assert kvtool("apply").code == 2


def test_a_conflict_writes_nothing(project: Tiny, ways: Any) -> None:
    project.add_patch("eight", ("src/a.cpp", "x + 8;", "x + 9;"))
    project.write_lock("v2")
    assert ways() == (False, True)
