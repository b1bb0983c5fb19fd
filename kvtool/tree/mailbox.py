"""Patch files: mails as `git format-patch` writes them. Parse them, take their diff apart. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email import policy
from email.parser import BytesHeaderParser
from email.utils import parseaddr
from itertools import pairwise

from kvtool.errors import UsageError

# How a change is written, so that no user's configuration and no git version shows in it. One line of context: hunks
# then apply over months of upstream where three lines fail.
DIFF_FLAGS = (
    "--full-index",
    "--binary",
    "-U1",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--diff-algorithm=myers",
    "--no-renames",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
)
# And the mail around it.
MAIL_FLAGS = (
    "--zero-commit",
    "--no-signature",
    "--no-stat",
    "--keep-subject",
    "--no-attach",
    "--no-thread",
    "--no-cover-letter",
    "--no-base",
    "--no-from",
    "--no-signoff",
    "--no-add-header",
)


@dataclass(frozen=True)
class Mail:
    """A parsed patch file. message: the whole commit message, ending in one newline; date: as git takes it.

    diff: from the first "diff --git" on, b"" for none; raw: the file as it is.
    """

    name: str
    email: str
    date: str
    subject: str
    message: str
    diff: bytes
    raw: bytes


@dataclass(frozen=True)
class Hunk:
    """One hunk. number: 1-based in its file, of `total`; heading: what stands behind the second @@ (the function)."""

    path: str
    number: int
    total: int
    header: str
    heading: str
    text: bytes


@dataclass(frozen=True)
class FileDiff:
    """The part of a diff about one file. head: the lines before the first hunk; path: after the change."""

    path: str
    head: bytes
    hunks: tuple[Hunk, ...]


_HUNK = re.compile(rb"^(@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@)(.*)$")
_DIFF = re.compile(rb"^diff --git ", re.MULTILINE)


def parse_mail(raw: bytes, where: str) -> Mail:
    """Parse a patch file; UsageError when it is not a mail as format-patch writes it."""
    hint = "write it with `kvtool export`, or git format-patch"
    head, separator, rest = raw.partition(b"\n\n")
    if not separator or not head.startswith(b"From "):
        raise UsageError(f"{where} is not a patch mail", why="it does not begin with a From line", next_step=hint)
    headers = BytesHeaderParser(policy=policy.default).parsebytes(head.partition(b"\n")[2] + b"\n\n")
    name, email = parseaddr(str(headers["From"] or ""))
    subject, date = str(headers["Subject"] or "").strip(), str(headers["Date"] or "").strip()
    for what, value in (("From", email), ("Date", date), ("Subject", subject)):
        if not value:
            raise UsageError(f"{where} is not a patch mail", why=f"it has no {what} header", next_step=hint)
    start = _DIFF.search(rest)
    text, diff = (rest[: start.start()], rest[start.start() :]) if start else (rest, b"")
    body = re.split(rb"^---$", text, maxsplit=1, flags=re.MULTILINE)[0].decode("utf-8", "surrogateescape").strip()
    message = f"{subject}\n\n{body}\n" if body else f"{subject}\n"
    return Mail(name or email, email, date, subject, message, diff, raw)


def parse_diff(diff: bytes) -> tuple[FileDiff, ...]:
    """Take a git diff apart, file by file and hunk by hunk (a binary change has no hunks)."""
    starts = [found.start() for found in _DIFF.finditer(diff)] + [len(diff)]
    return tuple(_file(diff[a:b]) for a, b in pairwise(starts))


def _file(text: bytes) -> FileDiff:
    lines = text.split(b"\n")  # not splitlines(): a lone carriage return is content
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    at = [n for n, line in enumerate(lines) if _HUNK.match(line)]
    head = b"".join(lines[: at[0]] if at else lines)
    path = _path(head)
    hunks = []
    for number, (a, b) in enumerate(pairwise([*at, len(lines)]), 1):
        found = _HUNK.match(lines[a])
        assert found
        heading = found[2].decode("utf-8", "replace").strip()
        hunks.append(Hunk(path, number, len(at), found[1].decode(), heading, b"".join(lines[a:b])))
    return FileDiff(path, head, tuple(hunks))


def _path(head: bytes) -> str:
    for prefix in (rb"\+\+\+ b/", rb"--- a/", rb"rename to "):
        if found := re.search(rb"^" + prefix + rb"(.*?)\t?$", head, re.MULTILINE):
            return found[1].decode("utf-8", "surrogateescape")
    found = re.match(rb"diff --git a/(.*) b/\1$", head.split(b"\n")[0])
    return found[1].decode("utf-8", "surrogateescape") if found else ""


def changed_lines(diff: bytes) -> tuple[int, int]:
    """Added and removed lines."""
    lines = [line for file in parse_diff(diff) for hunk in file.hunks for line in hunk.text.split(b"\n")[1:]]
    return sum(line.startswith(b"+") for line in lines), sum(line.startswith(b"-") for line in lines)
