"""Test the parsers of mails and diffs."""

from __future__ import annotations

import pytest

from kvtool.errors import UsageError
from kvtool.series.patchfile import diff_size, parse_diff, parse_mail

MAIL = b"""From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: =?UTF-8?q?J=C3=B6?= <j@example.invalid>
Date: Fri, 20 Nov 2026 13:41:10 +0100
Subject: =?UTF-8?q?=C3=9Cn=C3=AF=20[x]=20one?=
 two
MIME-Version: 1.0
Content-Type: text/plain; charset=UTF-8
Content-Transfer-Encoding: 8bit

Body with \xc3\xbc.

diff --git a/src/a b.cpp b/src/a b.cpp
index 1111111..2222222 100644
--- a/src/a b.cpp\t
+++ b/src/a b.cpp\t
@@ -3,2 +3,3 @@ int f() {
 x
+--- not a header
 y
@@ -9 +10 @@
-z
+zz
\\ No newline at end of file
diff --git a/gone.h b/gone.h
deleted file mode 100644
--- a/gone.h
+++ /dev/null
@@ -1 +0,0 @@
-all
diff --git a/run.sh b/run.sh
old mode 100644
new mode 100755
"""


def test_parse_mail_fields() -> None:
    mail = parse_mail(MAIL, "here")
    assert (mail.name, mail.email) == ("Jö", "j@example.invalid")
    assert mail.date == "Fri, 20 Nov 2026 13:41:10 +0100"
    assert mail.subject == "Ünï [x] one two"
    assert mail.message == "Ünï [x] one two\n\nBody with ü.\n"
    assert mail.diff.startswith(b"diff --git a/src/a b.cpp") and mail.raw == MAIL


LONG = b"=?UTF-8?q?=D0=92=D0=BB=D0=B0?=\n =?UTF-8?q?=D0=B4=D0=B8=D0=BC=20=D0=98?=\n <a@b>"


@pytest.mark.parametrize(
    ("header", "name", "email"),
    [
        (b"dependabot[bot] <1+dependabot[bot]@users.example>", "dependabot[bot]", "1+dependabot[bot]@users.example"),
        (LONG, "Влади\u043c И", "a@b"),
        (b'"M\xc3\xbcller, \\"H\\" <x>" <m@x>', 'Müller, "H" <x>', "m@x"),
        (b"Foo <>", "Foo", ""),
        (b"x@y", "x@y", "x@y"),
        (b"x@y (X Y)", "X Y", "x@y"),
        (b"A <a@b@c d>", "A", "a@b@c d"),
    ],
)
def test_author_matches_git(header: bytes, name: str, email: str) -> None:
    mail = parse_mail(MAIL.replace(b"=?UTF-8?q?J=C3=B6?= <j@example.invalid>", header), "here")
    assert (mail.name, mail.email) == (name, email)


def test_diffstat_is_not_message() -> None:
    mail = parse_mail(MAIL.replace(b"\ndiff --git a/src", b"\n---\n src/a | 2 +-\n\ndiff --git a/src", 1), "here")
    assert mail.message == "Ünï [x] one two\n\nBody with ü.\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"From 0000", b"Frame 0000", "From line"),
        (b"Date: Fri", b"X: Fri", "Date"),
        (b"Subject:", b"X-Subject:", "Subject"),
        (b"\nFrom: ", b"\nX-From: ", "From header"),
    ],
)
def test_invalid_mail_is_error(old: bytes, new: bytes, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_mail(MAIL.replace(old, new, 1), "patch 'x'")
    assert "patch 'x'" in caught.value.what and says in caught.value.why and "kvtool export" in caught.value.next_step


def test_empty_file_is_error() -> None:
    with pytest.raises(UsageError):
        parse_mail(b"", "here")


@pytest.mark.parametrize("signature", [b"-- \n2.39.5\n\n", b"-- \nmine\n- two\n"])
def test_signature_is_not_diff(signature: bytes) -> None:
    # the removed line "- " looks like the signature of a mail
    row = MAIL.replace(b"-all\n", b"-all\n-- \n").replace(b"@@ -1 +0,0", b"@@ -1,2 +0,0")
    assert parse_mail(row + signature, "here").diff == parse_mail(row, "here").diff == row[row.index(b"diff --git") :]


def test_crlf_mail_is_error() -> None:
    with pytest.raises(UsageError) as caught:
        parse_mail(MAIL.replace(b"\n", b"\r\n"), "here")
    assert "CR LF" in caught.value.why


def test_parse_diff_hunks() -> None:
    spaced, gone, mode = parse_diff(parse_mail(MAIL, "here").diff)
    assert [f.path for f in (spaced, gone, mode)] == ["src/a b.cpp", "gone.h", "run.sh"]
    assert [(h.number, h.total, h.header, h.heading) for h in spaced.hunks] == [
        (1, 2, "@@ -3,2 +3,3 @@", "int f() {"),
        (2, 2, "@@ -9 +10 @@", ""),
    ]
    assert (
        spaced.head + b"".join(h.text for h in spaced.hunks)
        == MAIL[MAIL.index(b"diff --git") : MAIL.index(b"diff --git a/gone")]
    )
    assert (len(gone.hunks), len(mode.hunks)) == (1, 0)


def test_carriage_return_is_content() -> None:
    (file,) = parse_diff(b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\r@@ -1 +1 @@\r\n+b\r+c")
    assert (len(file.hunks), file.hunks[0].text) == (1, b"@@ -1 +1 @@\n-a\r@@ -1 +1 @@\r\n+b\r+c")


def test_diff_size() -> None:
    assert diff_size(parse_mail(MAIL, "here").diff)[1:] == (2, 2)
    assert diff_size(b"") == (0, 0, 0)
