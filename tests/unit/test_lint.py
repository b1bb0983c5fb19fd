"""Test each rule of kvtool lint with a patch file and the line of the mistake. Also test a patch without mistakes."""

from __future__ import annotations

import pytest

from kvtool.lint import LintFinding
from kvtool.lint.mail import lint_patch

GOOD = b"""From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@example.invalid>
Date: Fri, 2 Jan 2026 03:04:05 +0100
Subject: cache : grow on demand

Why it does.

diff --git a/src/a.cpp b/src/a.cpp
index 1..2 100644
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -10,2 +10,3 @@ int f() {
     int x;
+    int y;
     int z;
@@ -20,3 +21,3 @@ int g() {
     int a;
-    int b;
+    int c;

"""


def lint(old: bytes = b"", new: bytes = b"", paths: tuple[str, ...] = ()) -> list[LintFinding]:
    assert old in GOOD
    return lint_patch(GOOD.replace(old, new, 1), "patches/x.patch", paths)[1]


def test_good_patch_has_no_findings() -> None:
    mail, found = lint_patch(GOOD, "patches/x.patch", ("src/new.cpp",))
    assert found == [] and mail is not None and mail.subject == "cache : grow on demand"


@pytest.mark.parametrize(
    ("old", "new", "rule", "line", "says"),
    [
        (b"From 0000", b"Frm 0000", "mail", 1, "From line"),
        (b"Date: ", b"Dat: ", "mail", 1, "no Date header"),
        (b"Subject: cache : grow on demand", b"Subject:", "mail", 1, "no Subject header"),
        (b": grow", b": grows", "subject", 4, "'grows'"),
        (b": grow", b": Added", "subject", 4, "'Added'"),
        (b": grow", b": growing", "subject", 4, "'growing'"),
        (b"on demand", b"on demand.", "subject", 4, "full stop"),
        (b"cache :", b"[PATCH] cache :", "subject", 4, "prefix"),
        (b"on demand", b"on demand " * 8, "subject", 4, "characters"),
        (b"@@ -10,2 +10,3", b"@@ -10,2 +10,4", "hunk-count", 12, "counts 2 and 4 lines, the hunk has 2 and 3"),
        (b"+    int y;\n", b"", "hunk-count", 12, "counts 2 and 3 lines, the hunk has 2 and 2"),
        (b"+    int y;\n", b"!    int y;\n", "hunk-count", 12, "hunk 1 of 2"),
        (b"@@ -20,3", b"@@ -11,3", "hunk-order", 16, "hunk 2 of 2 begins before"),
        (b"@@ -10,2 +10,3 @@ int f() {\n", b"@@ -9,3 +9,4 @@ int f() {\n {\n", "context", 12, "more than 1 line"),
        (b"@@ -10,2 +10,3 @@ int f() {\n     int x;\n", b"@@ -11,1 +11,2 @@\n", "context", 12, "no context before"),
        (b"+    int y;", b"+    int y; ", "whitespace", 14, "ends in white space"),
        (b"+    int y;", b"+  \tint y;", "whitespace", 14, "space before a tab"),
        (b"int y;\n", b"int y;\r\n", "crlf", 14, "CR LF"),
        (b"--- a/src/a.cpp", b"new file mode 100644\n--- /dev/null", "new-file", 8, "adds src/a.cpp"),
    ],
)
def test_each_rule_reports_line(old: bytes, new: bytes, rule: str, line: int, says: str) -> None:
    found = lint(old, new)
    assert [(f.rule, f.line) for f in found] == [(rule, line)], found
    assert says in found[0].what and found[0].next and str(found[0]).startswith(f"patches/x.patch:{line}: ")


def test_empty_hunk_and_empty_patch() -> None:
    assert "hunk-empty" in {
        f.rule for f in lint(b"+10,3 @@ int f() {\n     int x;\n+    int y;\n", b"+10,2 @@\n     int x;\n")
    }
    empty = GOOD[: GOOD.index(b"diff --git")]
    assert [f.rule for f in lint_patch(empty, "patches/x.patch", ())[1]] == ["empty"]


def test_binary_file_is_reported() -> None:
    binary = GOOD[: GOOD.index(b"--- a/")] + b"GIT binary patch\nliteral 0\nHc$@<O00001\n\n"
    assert [f.rule for f in lint_patch(binary, "patches/x.patch", ())[1]] == ["binary"]


def test_patched_cpp_file_is_reported() -> None:
    assert [(f.rule, f.line) for f in lint(paths=("src/a.cpp",))] == [("new-file", 8)]


def test_crlf_file_of_upstream_is_allowed() -> None:
    assert lint_patch(GOOD.replace(b";\n", b";\r\n"), "patches/x.patch", ())[1] == []


def test_all_findings_are_reported() -> None:
    bad = GOOD.replace(b": grow", b": grows").replace(b"int y;", b"int y; ").replace(b"-20,3", b"-20,4")
    assert [f.rule for f in lint_patch(bad, "patches/x.patch", ())[1]] == ["subject", "whitespace", "hunk-count"]


@pytest.mark.parametrize("subject", [b"bring it back", b"need two", b"embed the library", b"process more", b"speed up"])
def test_imperative_ending_like_inflection(subject: bytes) -> None:
    assert lint(b"grow on demand", subject) == []
