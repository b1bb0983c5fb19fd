"""Test kvtool import --patches with mails, quilt patches and plain diffs, in the order of a series file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.test_import import empty as empty


@pytest.fixture
def work(project: Tiny, tmp_path: Path) -> Path:
    """Clone upstream at v1 into a folder in which the tests make patches."""
    place = tmp_path / "work"
    git(tmp_path, "clone", "-q", str(project.upstream), str(place))
    git(place, "checkout", "-q", "v1")
    return place


def edit(work: Path, path: str, old: str, new: str) -> str:
    """Change a file, commit, and return the diff."""
    text = (work / path).read_text()
    assert text.count(old) == 1
    (work / path).write_text(text.replace(old, new))
    git(work, "commit", "-qam", f"change {path}: {new}")
    return git(work, "diff", "HEAD~1", "HEAD", strip=False)


def imported(empty: Tiny, kvtool: Any, work: Path, place: Path, *options: str) -> Any:
    ran = kvtool("import", "--patches", place, *options, "--json")
    assert ran.code == 0, ran
    assert kvtool("apply").code == 0
    assert ran.json["tree"] == git(empty.tree, "rev-parse", "HEAD^{tree}") == git(work, "rev-parse", "HEAD^{tree}")
    assert kvtool("export", "--check").code == 0
    return ran


def message(empty: Tiny, back: int) -> str:
    return git(empty.tree, "log", "-1", "--format=%an <%ae>%n%B", f"HEAD~{back}")


def test_import_folder_of_mails(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    """Use mails as Ollama has them: format-patch with the prefix [PATCH] and a signature."""
    edit(work, "src/a.cpp", "x + 2;", "x + 22;")
    edit(work, "src/a.cpp", "x + 3;", "x + 33;")
    write_files(work, {"src/new.h": "int n;\n", ".hidden": "x\n"})
    git(work, "add", "-A")
    git(work, "commit", "-qm", "[SYCL] new files\n\nWith a body.")
    git(work, "format-patch", "-q", "-3", "-o", str(tmp_path / "queue"))
    ran = imported(empty, kvtool, work, tmp_path / "queue")
    ids = [patch["id"] for patch in ran.json["patches"]]
    assert ids == ["change-src-a-cpp-x-22", "change-src-a-cpp-x-33", "sycl-new-files"]
    assert message(empty, 0) == "Tester <tester@example.invalid>\n[SYCL] new files\n\nWith a body."
    assert (empty.root / "cpp/src/new.h").is_file()


def test_quilt_order_and_headers_are_kept(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    """Use patches as Debian has them: DEP-3 headers, no "diff --git" line, comments, -p0, folders."""
    first = edit(work, "src/a.cpp", "x + 2;", "x + 22;")
    second = edit(work, "src/b.h", "bool two;", "bool two; // !")
    third = edit(work, "src/a.cpp", "x + 22;", "x + 222;")
    (work / "added.txt").write_text("one\ntwo\n")
    git(work, "add", "-A")
    git(work, "commit", "-qm", "add")
    plain = "".join(line for line in first.splitlines(keepends=True) if not line.startswith(("diff ", "index ")))
    no_prefix = second.replace("a/src/", "src/").replace("b/src/", "src/").partition("\n---")[2]
    write_files(
        tmp_path / "patches",
        {
            "series": "# the queue\nz-first.patch\n\nsub/second.diff -p0 # a comment\na-third.patch\nadded\n",
            "z-first.patch": "Description: Make two larger\n It was too small.\n .\n Really.\nAuthor: Ann <ann@x>\n"
            f"Origin: vendor, https://example.org/1\nBug-Debian: https://bugs.debian.org/1\nForwarded: no\n\n{plain}",
            "sub/second.diff": f"--- {no_prefix}".replace("--- \n---", "---"),
            "a-third.patch": f"two is too small still\n\nNote: this needs z-first.\n\n{third}",
            "added": "From: Bob <bob@x>\nSubject: add a file\nApplied-Upstream: no\n---\n"
            "--- /dev/null\n+++ b/added.txt\n@@ -0,0 +1,2 @@\n+one\n+two\n",
        },
    )
    ran = imported(empty, kvtool, work, tmp_path / "patches", "--base", "v1")
    assert [patch["id"] for patch in ran.json["patches"]] == ["z-first", "second", "a-third"]
    assert message(empty, 2) == (
        "Ann <ann@x>\nMake two larger\n\nIt was too small.\n\nReally.\n\nOrigin: vendor, https://example.org/1\n"
        "Bug-Debian: https://bugs.debian.org/1\nForwarded: no"
    )
    assert message(empty, 1) == "kvtool <kvtool@localhost>\nsecond"
    assert message(empty, 0) == "kvtool <kvtool@localhost>\ntwo is too small still\n\nNote: this needs z-first."
    text = (empty.root / "patches/z-first.patch").read_text()
    assert "Bug-Debian: https://bugs.debian.org/1" in text


def test_series_file_and_mailbox(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    for number in (2, 3, 4):
        edit(work, "src/a.cpp", f"x + {number};", f"x + {number * 11};")
    box = git(work, "format-patch", "--stdout", "-3", strip=False)
    write_files(tmp_path, {"queue/all.mbox": box, "queue/order": "all.mbox\n"})
    for place in ("queue/all.mbox", "queue/order"):
        ran = kvtool("import", "--patches", tmp_path / place, "--dry-run", "--json")
        assert ran.code == 0 and len(ran.json["patches"]) == 3, ran
    imported(empty, kvtool, work, tmp_path / "queue/order")


def test_crlf_and_reversed_patch(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    diff = edit(work, "src/a.cpp", "x + 2;", "x + 22;")
    edit(work, "src/b.h", "bool two;", "bool twoo;")
    reverse = git(work, "diff", "HEAD", "HEAD~1", strip=False)
    write_files(tmp_path / "q", {"series": "one.diff\ntwo.diff -R\n", "two.diff": reverse})
    (tmp_path / "q/one.diff").write_bytes(diff.replace("\n", "\r\n").encode())
    imported(empty, kvtool, work, tmp_path / "q")


@pytest.mark.parametrize(
    ("change", "code", "what", "why"),
    [
        (
            lambda text: text.replace("+    int y", "*    int y"),
            2,
            "bad.patch:7: the @@ line counts 7 lines",
            "by hand",
        ),
        (
            lambda text: text.replace(" int function_2", "-int function_2"),
            2,
            "bad.patch:7: the @@ line counts 7",
            "by hand",
        ),
        (lambda text: text.replace("x + 2;", "x + 7777;"), 3, "bad.patch does not apply to v1", "src/a.cpp:4"),
        (lambda text: text[: text.index("diff")], 2, "bad.patch has no diff", ""),
    ],
)
def test_bad_patch_is_named(
    empty: Tiny, kvtool: Any, work: Path, tmp_path: Path, change: Any, code: int, what: str, why: str
) -> None:
    text = "A description.\n\n" + edit(work, "src/a.cpp", "x + 2;", "x + 22;")
    write_files(tmp_path / "q", {"bad.patch": change(text)})
    before = empty.snapshot()
    ran = kvtool("import", "--patches", tmp_path / "q", "--json")
    error = ran.json["error"]
    assert (ran.code, what in error["what"], why in error["why"]) == (code, True, True), ran
    assert empty.snapshot() == before


def test_patch_in_upstream_is_named(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "q", {"one.diff": edit(work, "src/a.cpp", "x + 8;", "x + 88;")})
    ran = kvtool("import", "--patches", tmp_path / "q", "--base", "v2", "--json")
    assert ran.code == 3 and "has this change" in ran.json["error"]["what"], ran


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"readme": "x"}, "has no patches"),
        ({"series": "# nothing\n"}, "lists no patches"),
        ({"series": "one\n"}, "series:1: there is no"),
        ({"series": "one -x\n", "one": "x"}, "series:1: unknown option '-x'"),
        ({"debian/patches/series": "one\n"}, "has no patches"),
    ],
)
def test_folder_without_patches_is_explained(
    empty: Tiny, kvtool: Any, tmp_path: Path, files: dict[str, str], what: str
) -> None:
    write_files(tmp_path / "q", files)
    ran = kvtool("import", "--patches", tmp_path / "q", "--json")
    assert ran.code == 2 and what in ran.json["error"]["what"], ran


def test_base_commit_of_local_mirror(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    """Use a short commit id that has no tag, as Ollama's Makefile.sync does."""
    (empty.upstream / "src/b.h").write_text("struct other {};\n")
    git(empty.upstream, "commit", "-qam", "untagged")
    base = git(empty.upstream, "rev-parse", "HEAD")
    git(work, "fetch", "-q", "origin")
    git(work, "checkout", "-q", base)
    write_files(tmp_path / "q", {"one.diff": edit(work, "src/b.h", "other", "another")})
    ran = imported(empty, kvtool, work, tmp_path / "q", "--base", base[:9])
    assert ran.json["base"] == base


def test_electron_order_and_cover_letter(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    """Import a folder of patches with a cover letter, in the order that its file .patches lists."""
    edit(work, "src/a.cpp", "x + 2;", "x + 22;")
    edit(work, "src/a.cpp", "x + 22;", "x + 222;")
    queue = tmp_path / "queue"
    git(work, "format-patch", "-q", "-2", "--cover-letter", "-o", str(queue))
    second, first = sorted(queue.glob("000[12]*"), reverse=True)
    second.rename(queue / "a_second.patch")
    first.rename(queue / "b_first.patch")
    (queue / ".patches").write_text("b_first.patch\na_second.patch\n")
    ran = imported(empty, kvtool, work, queue)
    assert [patch["id"] for patch in ran.json["patches"]] == ["b-first", "a-second"]


def test_cover_letter_is_no_patch(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    edit(work, "src/a.cpp", "x + 2;", "x + 22;")
    git(work, "format-patch", "-q", "-1", "--cover-letter", "-o", str(tmp_path / "queue"))
    assert len(imported(empty, kvtool, work, tmp_path / "queue").json["patches"]) == 1


def test_diff_without_prefix_is_applied(empty: Tiny, kvtool: Any, work: Path, tmp_path: Path) -> None:
    """Use a diff as CVS and Subversion write it. A new file with a prefix must not be put into a folder b."""
    text = "--- /dev/null\n+++ b/src/a.cpp\n@@ -0,0 +1 @@\n+x\n"
    write_files(tmp_path / "taken", {"1.diff": text})
    assert kvtool("import", "--patches", tmp_path / "taken", "--json").code == 3
    diff = edit(work, "src/a.cpp", "x + 2;", "x + 22;").partition("@@")[2]
    write_files(
        tmp_path / "queue",
        {"1.diff": f"Only in new: a.o\nIndex: src/a.cpp\n{'=' * 67}\n--- src/a.cpp\t(1)\n+++ src/a.cpp\t(2)\n@@{diff}"},
    )
    imported(empty, kvtool, work, tmp_path / "queue")
    assert message(empty, 0).endswith("\n1")
