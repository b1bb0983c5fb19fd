"""Test the report of a conflict: a summary, a short diff with its cause, and the next commands.

Also test which upstreams and resolutions kvtool rebase accepts, and patches that fit into two similar functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.commands.conflicts import render_reports
from kvtool.console import Console
from kvtool.replay.apply import FailedHunk, PatchReport
from kvtool.result import PatchOutcome
from tests.conftest import Tiny, git, write_files
from tests.repo.edits import edit
from tests.repo.rebases import finished, outcomes, release, resolve


def test_rebase_prints_summary_first(stopped: Tiny, kvtool: Any) -> None:
    ran = kvtool("rebase", "v3")
    first = ran.out.splitlines()[0]
    assert first == "3 of 5 patches apply, 1 needs block first, 1 needs you: block (1 hunk)"
    steps = ran.err[ran.err.index("next:") :].splitlines()
    assert [step.split("rebase ")[1].split()[0] for step in steps if "rebase " in step] == [
        "--continue",
        "--skip",
        "--drop",
        "--abort",
    ]
    assert "tail" not in ran.out and "the patch wants" not in ran.out
    kvtool("rebase", "--abort")
    more = kvtool("rebase", "v3", "--verbose").out
    assert "tail" in more and "the patch wants" in more


def test_merged_patches_are_counted(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool two;\n    bool  dynamic;\n"))
    ran = kvtool("rebase", "v3")
    assert (ran.code, ran.out.splitlines()[0]) == (0, "1 of 2 patches apply, 1 is upstream now")


def test_four_conflicts_fit_120_lines(applied: Tiny, kvtool: Any) -> None:
    """Put each conflict into a function of 300 lines that upstream has rewritten."""
    body = "".join(f"    step_{n}(x, {'y' * 150});\n" for n in range(300))
    text = "".join(f"int big_{n}(int x) {{\n{body}    return {n};\n}}\n\n" for n in range(4))
    write_files(applied.upstream, {"src/big.cpp": text})
    git(applied.upstream, "add", "-A")
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    for n in range(4):
        file = applied.tree / "src/big.cpp"
        rows = file.read_text().split("\n")
        for k in range(0, 300, 100):
            at = rows.index(f"int big_{n}(int x) {{") + 5 + k
            rows[at] += " // mine"
        file.write_text("\n".join(rows))
        git(applied.tree, "commit", "-qam", f"big {n}")
    assert kvtool("export").code == 0
    (applied.upstream / "src/big.cpp").write_text(text.replace("step_", "walk_").replace("(x, ", "(x, x, "))
    release(applied, "v4")
    ran = kvtool("rebase", "v4")
    lines = (ran.out + ran.err).splitlines()
    assert ran.code == 3 and len(lines) <= 120, len(lines)
    assert "4 need you: big-0 (3 hunks)" in ran.out.splitlines()[0]
    assert "big-2 (1 more hunk): big.cpp: upstream changed the same lines" in ran.out
    assert "big-3 (3 hunks): big.cpp: upstream changed the same lines" in ran.out
    assert max(map(len, ran.out.splitlines()[1:])) <= 100


def test_summary_names_only_the_first_of_many_patches(capsys: pytest.CaptureFixture[str]) -> None:
    """Print 13 patches with conflicts, one of them with 40 hunks, and the hunks that upstream has."""
    diff = ("     same", *(f"-old {n}" for n in range(30)), *(f"+new {n}" for n in range(30)), "     same")
    hunk = FailedHunk("src/a.cpp", 1, 40, "@@ -1,3 +1,4 @@ static int f(", "upstream changed the same lines", diff=diff)
    reports = [
        PatchReport(f"p{n}", PatchOutcome.CONFLICT, failed=(hunk,) * (40 if not n else 2), hunks=9) for n in range(13)
    ]
    notes = (*(f"src/a.cpp hunk {n}: upstream already has it" for n in range(3)), "look at it: something")
    render_reports(Console(), [*reports, PatchReport("q", PatchOutcome.APPLIED, "1", moved=notes)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 14 patches apply, 13 need you: p0 (40 hunks), p1 (2 hunks), p2 (2 hunks) and 10 more"
    assert lines[1] == "  q: upstream already has 3 of its hunks: src/a.cpp (0, 1, 2)" and "something" in lines[2]
    assert len(lines) <= 100 and max(map(len, lines[1:])) <= 100
    assert {"    -old 0", "    +new 0"} <= set(lines), "a diff shows both sides"
    assert "p0 (32 more hunks): a.cpp: upstream changed the same lines" in lines
    assert "p12 (2 hunks): a.cpp: upstream changed the same lines" in lines


def move_entry(project: Tiny, name: str, at: int) -> None:
    series = project.root / "patches/series.toml"
    head, *entries = series.read_text().split("[[patch]]")
    entry = next(entry for entry in entries if f'id = "{name}"' in entry)
    entries.remove(entry)
    entries.insert(at, entry)
    series.write_text("[[patch]]".join([head, *entries]))


def test_required_patch_is_named(project: Tiny, kvtool: Any) -> None:
    project.add_patch("one", ("src/a.cpp", "x + 4;", "x + 44;"))
    project.add_patch("two", ("src/a.cpp", "x + 5;", "x + 55;"))
    project.add_patch("three", ("src/a.cpp", "x + 44;", "x + 45;"))
    move_entry(project, "three", 0)
    ran = kvtool("apply", "--json")
    (hunk,) = ran.json["patches"][0]["failed"]
    assert (ran.code, hunk["cause"], ran.json["patches"][0]["blocked_by"]) == (3, "reordered series", "one")
    assert ran.json["error"]["next"].startswith("move the entry of 'one' above 'three' in patches/series.toml")
    move_entry(project, "three", 4)
    assert kvtool("apply").code == 0


def test_jointly_required_patches_are_named(project: Tiny, kvtool: Any) -> None:
    """Let the last patch change lines that one patch removes, and change a line that another patch adds."""
    project.add_patch("adds", ("src/a.cpp", "x + 4;\n", "x + 4;\n    call();\n"))
    project.add_patch("between", ("src/b.h", "bool one;", "bool uno;"))
    project.add_patch("also", ("src/a.cpp", "x + 5;\n", "x + 5;\n    other();\n"))
    project.add_patch(
        "needs", ("src/a.cpp", "    call();", "    call(1);"), ("src/a.cpp", "    other();", "    other(1);")
    )
    move_entry(project, "needs", 0)
    ran = kvtool("apply", "--json")
    assert "'adds' and 'also'" in ran.json["patches"][0]["failed"][0]["reason"]


def test_moved_tag_is_reported(applied: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kvtool("rebase", "v2").code == 0
    edit_upstream = applied.upstream / "src/b.h"
    edit_upstream.write_text(edit_upstream.read_text().replace("bool one;", "bool uno;"))
    git(applied.upstream, "commit", "-qam", "moved")
    git(applied.upstream, "tag", "-f", "v2")
    tree = git(applied.upstream, "rev-parse", "v2^{tree}")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "empty"))
    for args in (("fetch",), ("fetch", "--mirror", applied.upstream)):
        error = kvtool(*args, "--json").json["error"]
        assert error["exit_code"] == 5 and "the tag was moved" in error["why"] and "network" not in error["next"]
        assert f'write tree = "{tree}"' in error["next"]
    monkeypatch.delenv("KVTOOL_UPSTREAM")
    lock = applied.root / "patches/upstream.lock"
    lock.write_text(lock.read_text().replace(str(applied.root / "no-remote"), str(applied.upstream)))
    error = kvtool("fetch", "--json").json["error"]
    assert error["exit_code"] == 5 and f'write tree = "{tree}"' in error["next"] and "network" not in error["next"]


def test_commit_id_as_upstream(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3", ("src/b.h", "bool one;", "bool uno;"), lock=False)
    old = git(applied.upstream, "rev-parse", "HEAD")
    release(applied, "v4", ("src/b.h", "bool uno;", "bool ein;"), lock=False)
    for commit in (git(applied.upstream, "rev-parse", "HEAD"), old):
        assert kvtool("rebase", "--dry-run", commit).code == 0
    assert kvtool("rebase", old).code == 0
    assert "bool uno;" in (applied.tree / "src/b.h").read_text()
    assert kvtool("status", "--json").json["state"] == "clean"
    short = kvtool("rebase", "--dry-run", old[:10], "--json")
    assert short.code == 2 and "full id" in short.json["error"]["next"]
    assert kvtool("rebase", "--dry-run", "f" * 40).code != 0


def test_resolution_with_lint_error_stops(stopped: Tiny, kvtool: Any) -> None:
    before = stopped.snapshot()
    assert kvtool("rebase", "v3").code == 3
    resolve(stopped, "src/a.cpp", "x + 44;", "x + 44;  \n    one();\n    mid();\n    last();")
    for _ in range(2):
        ran = kvtool("rebase", "--continue", "--json")
        assert ran.code == 6 and "white space" in ran.json["error"]["what"], ran
        assert stopped.snapshot() == before
    file = stopped.tree / "src/a.cpp"
    file.write_text(file.read_text().replace("x + 44;  \n", "x + 44;\n"))
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 0, ran
    finished(stopped, kvtool)


def test_equal_twin_is_not_merged(project: Tiny, kvtool: Any) -> None:
    """Use a patch whose reverse also fits lines that a function already has.

    These lines must not be mistaken for the patch in upstream.
    """
    project.add_patch("count", ("src/a.cpp", "int function_7(int x) {\n", "int function_7(int x) {\n    count();\n"))
    text = (project.root / "patches/count.patch").read_text()
    assert kvtool("apply").code == 0
    assert outcomes(kvtool("apply", "--json"))["count"] == "applied" and "function_7" in text
    edit(project, "src/a.cpp", "int function_5(int x) {\n", "int function_5(int x) {\n    count();\n", "fixup! count")
    assert kvtool("export").code == 0
    release(project, "v3", ("src/a.cpp", "int function_5(int x) {\n", "int function_5(int x) {\n    count();\n"))
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0 and ran.json["patches"][2]["moved"], ran.json["patches"][2]
    assert (project.tree / "src/a.cpp").read_text().count("    count();\n") == 2


TWIN = """From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@x>
Date: Tue, 3 Feb 2026 04:05:06 +0100
Subject: twin: call

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -18,2 +18,3 @@ int function_{}(int x) {{
     same(x);
+    call(x);
     end(x);
"""


@pytest.mark.parametrize(("function", "outcome"), [(4, "conflict"), (7, "merged")])
def test_reverse_patch_fitting_twin(project: Tiny, kvtool: Any, function: int, outcome: str) -> None:
    """Let upstream have the call only in function_7."""
    head = "int function_7(int x) {\n"
    release(project, "v3", ("src/a.cpp", head, f"{head}    same(x);\n    call(x);\n    end(x);\n"))
    lock = project.root / "patches/upstream.lock"
    lock.write_text(lock.read_text().replace('current = "v1"', 'current = "v3"'))
    (project.root / "patches/twin.patch").write_text(TWIN.format(function))
    with (project.root / "patches/series.toml").open("a") as series:
        series.write('\n[[patch]]\nid = "twin"\nwhy = "because"\n')
    assert outcomes(kvtool("apply", "--json"))["twin"] == outcome
