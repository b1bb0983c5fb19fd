"""Test kvtool rebase after upstream renamed files or moved their contents, and its report about a resolution."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.rebases import BLOCK, finished, outcomes, release, resolve
from tests.repo.test_rebase import wrong_place


def renamed(project: Tiny, *names: tuple[str, str]) -> None:
    for old, new in names:
        (project.upstream / new).parent.mkdir(parents=True, exist_ok=True)
        git(project.upstream, "mv", old, new)


def test_renames_that_swap_order(project: Tiny, kvtool: Any) -> None:
    project.add_patch(
        "both", ("src/a.cpp", "x + 4;\n", "x + 4;\n    four();\n"), ("src/b.h", "two;\n", "two;\n  int b;\n")
    )
    renamed(project, ("src/a.cpp", "src/z.cpp"), ("src/b.h", "src/a.h"))
    release(project, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    text = (project.root / "patches/both.patch").read_text()
    assert text.index("+++ b/src/a.h") < text.index("+++ b/src/z.cpp")


@pytest.mark.parametrize("name", ["src/core.cpp", "lib/src/a.cpp"])
def test_conflict_in_renamed_file(stopped: Tiny, kvtool: Any, name: str) -> None:
    git(stopped.upstream, "checkout", "-q", "--detach", "v3")
    renamed(stopped, ("src/a.cpp", name))
    release(stopped, "v4")
    ran = kvtool("rebase", "v4", "--dry-run", "--keep-going", "--json")
    hunks = {patch["id"]: patch["failed"] for patch in ran.json["patches"]}
    assert {hunk["path"] for failed in hunks.values() for hunk in failed} == {name}
    assert [hunk["number"] for hunk in hunks["block"]] == [1]
    assert hunks["block"][0]["cause"] == "changed lines"
    assert hunks["block"][0]["found"][0] == "    int y = x + 44;"


def test_renamed_folder_of_cpp_is_reported(applied: Tiny, kvtool: Any) -> None:
    renamed(applied, ("src/a.cpp", "lib/a.cpp"), ("src/b.h", "lib/b.h"))
    release(applied, "v3")
    astray = [
        "upstream has no src any more (most of its files are in lib); only the files of cpp/src would be in this folder"
    ]
    assert kvtool("rebase", "v3", "--dry-run", "--json").json["astray"] == astray
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["astray"]) == (0, "rebased", astray)
    finished(applied, kvtool)


def test_own_folder_is_not_reported(applied: Tiny, kvtool: Any) -> None:
    """Use the folder tools/check, which only cpp/ has."""
    release(applied, "v3")
    assert kvtool("rebase", "v3", "--json").json["astray"] == []


def test_function_moved_to_other_file(project: Tiny, kvtool: Any) -> None:
    far = "int far(int x) {\n    int distance_of_x = x + 1;\n    return distance_of_x;\n}\n"
    (project.upstream / "src/far.cpp").write_text("// far\n")
    (project.upstream / "src/a.cpp").write_text((project.upstream / "src/a.cpp").read_text() + far)
    git(project.upstream, "add", "-A")
    release(project, "v3")
    assert kvtool("rebase", "v3").code == 0
    file = project.tree / "src/a.cpp"
    file.write_text(file.read_text().replace("    return distance_of_x;", "    grow();\n    return distance_of_x;"))
    git(project.tree, "commit", "-qam", "far")
    assert kvtool("export").code == 0
    write_files(project.upstream, {"src/far.cpp": "// far\n" + far})
    release(project, "v4", ("src/a.cpp", far, ""))
    ran = kvtool("rebase", "v4", "--dry-run", "--json")
    (hunk,) = ran.json["patches"][2]["failed"]
    assert hunk["path"] == "src/a.cpp" and hunk["reason"] == "upstream moved 'int far(int x) {' to src/far.cpp:2"


def test_function_moved_away_from_its_twin(applied: Tiny, kvtool: Any) -> None:
    """Exchange two files whose functions differ only in their names.

    The hunk then fits into the function that is now in the old file.
    """
    python = "".join(f"def function_{n}(x):\n    y = x + {n}\n    return y\n\n\n" for n in range(1, 5))
    write_files(applied.upstream, {"p.py": python, "q.py": python.replace("function_", "other_")})
    twin = applied.upstream / "src/z.cpp"
    twin.write_text((applied.upstream / "src/a.cpp").read_text().replace("function_", "other_"))
    git(applied.upstream, "add", "-A")
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    mine = applied.tree / "p.py"
    mine.write_text(mine.read_text().replace("    y = x + 3\n", "    y = x + 3\n    total(y)\n"))
    git(applied.tree, "commit", "-qam", "python")
    assert kvtool("export").code == 0
    for one, other in (("src/a.cpp", "src/z.cpp"), ("p.py", "q.py")):
        first, second = applied.upstream / one, applied.upstream / other
        texts = first.read_text(), second.read_text()
        second.write_text(texts[0])
        first.write_text(texts[1])
    release(applied, "v4")
    ran = kvtool("rebase", "v4", "--json")
    assert ran.code == 3, ran
    reasons = [hunk["reason"] for report in ran.json["patches"] for hunk in report["failed"]]
    assert [reason.partition(":")[0] for reason in reasons] == [
        "upstream moved 'int function_2(int x) {' to src/z.cpp",
        "upstream moved 'def function_3(x)",
    ], reasons


@pytest.mark.parametrize("is_similar", [True, False])
def test_rename_to_hardly_similar_file_is_noted(applied: Tiny, kvtool: Any, is_similar: bool) -> None:
    renamed(applied, ("src/a.cpp", "src/core.cpp"))
    file = applied.upstream / "src/core.cpp"
    if not is_similar:
        file.write_text(file.read_text().replace("    int y = x + 7;\n    return y;\n", "    other(x);\n" * 12))
    git(applied.upstream, "add", "-A")
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    notes = ran.json["patches"][1]["moved"]
    assert bool(notes) != is_similar and all(
        "src/core.cpp counts as the renamed src/a.cpp" in note for note in notes
    ), notes


def test_unchanged_refused_place_is_reported(project: Tiny, kvtool: Any) -> None:
    wrong_place(project)
    assert kvtool("rebase", "v3").code == 3
    wrong = git(project.tree, "show", "HEAD:src/a.cpp", strip=False)
    at = "int function_6(int x) {\n    int y = x + 5;\n"
    (project.tree / "src/a.cpp").write_text(wrong.replace(at, at + "    use(y);\n"))
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 0, ran
    (note,) = ran.json["patches"][2]["moved"]
    assert (
        note.startswith("src/a.cpp: not changed by the resolution, although it landed in line ")
        and "function_6" in note
    )


def test_resolution_with_other_file_is_reported(stopped: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v3").code == 3
    resolve(stopped, *BLOCK)
    file = stopped.tree / "src/b.h"
    file.write_text(file.read_text() + "// by the way\n")
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 0 and outcomes(ran)["block"] == "applied"
    notes = {patch["id"]: patch["moved"] for patch in ran.json["patches"]}
    assert notes["block"] == ["src/b.h: the resolution changes it, the patch did not"]


def test_resolution_with_new_files_is_refused(stopped: Tiny, kvtool: Any) -> None:
    """Add a leftover file of an editor to the resolution, as `git add -A` would."""
    assert kvtool("rebase", "v3").code == 3
    resolve(stopped, *BLOCK)
    (stopped.tree / "src/a.cpp.orig").write_text("junk\n")
    git(stopped.tree, "add", "-A")
    for _ in range(2):
        error = kvtool("rebase", "--continue", "--json").json["error"]
        assert error["exit_code"] == 3 and "'block' adds src/a.cpp.orig" in error["what"], error
    git(stopped.tree, "rm", "-q", "--cached", "src/a.cpp.orig")
    ran = kvtool("rebase", "--continue", "--json")
    assert (ran.code, outcomes(ran)["block"]) == (0, "applied"), ran
    assert git(stopped.tree, "status", "--porcelain") == "?? src/a.cpp.orig"


LINK = "upstream replaced a file by a symbolic link"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("link", LINK),
        ("folder", "upstream replaced a file by a folder"),
        ("own link", "the patch replaces a file by a symbolic link, and upstream changed it"),
    ],
)
def test_replaced_type_of_a_file_is_the_cause(applied: Tiny, kvtool: Any, kind: str, reason: str) -> None:
    theirs = applied.upstream / "src/b.h"
    if kind == "own link":
        (applied.tree / "src/a.cpp").unlink()
        (applied.tree / "src/a.cpp").symlink_to("b.h")
        git(applied.tree, "commit", "-qam", "link")
        assert kvtool("export").code == 0
        (applied.upstream / "src/a.cpp").write_text("int changed;\n")
    else:
        theirs.unlink()
        if kind == "link":
            theirs.symlink_to("a.cpp")
        else:
            write_files(applied.upstream, {"src/b.h/inner.h": "int x;\n"})
    git(applied.upstream, "add", "-A")
    git(applied.upstream, "commit", "-qm", "another type")
    release(applied, "v3")
    before = applied.snapshot()
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 3, ran
    reports = {report["id"]: report for report in ran.json["patches"]}
    (hunk,) = reports["link" if kind == "own link" else "flag"]["failed"]
    assert (hunk["path"], hunk["reason"]) == ("src/a.cpp" if kind == "own link" else "src/b.h", reason)
    assert kvtool("rebase", "--abort").code == 0 and applied.snapshot() == before
