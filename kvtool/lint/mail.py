"""Lint of one patch file: a mail that parses, hunks that say the truth, nothing that a reviewer would refuse. Pure."""

import re
from collections.abc import Collection, Iterator

from kvtool.errors import UsageError
from kvtool.lint import LintFinding
from kvtool.tree.patchfile import FileDiff, Hunk, Mail, parse_diff, parse_mail

CONTEXT = 1  # lines of context on each side, as export writes them (patchfile.DIFF_FLAGS)
_SUBJECT_WIDTH = 72
_EXPORT = "let kvtool export write it: apply, commit in the tree, export"

# The first word of a subject is a command to the code base. Words that only look like another form are listed.
_NOT_IMPERATIVE = re.compile(r"^(?!(?:need|feed|seed|embed|shed|speed|bring|string|ring|sing)$)[a-z]+(?:ed|ing)$")
_THIRD_PERSON = re.compile(r"^(adds|fixes|makes|lets|uses|removes|changes|grows|moves|keeps|allows|updates|sets)$")


def lint_patch(raw: bytes, file: str, new_paths: Collection[str]) -> tuple[Mail | None, list[LintFinding]]:
    """The mail (None when it cannot be read) and what is wrong with it. new_paths: what cpp/ holds."""
    found = list(_line_ends(raw, file))
    try:
        mail = parse_mail(raw, file)
    except UsageError as err:
        why = err.why or err.what
        return None, [*found, LintFinding(file, 1, "mail", f"not a patch mail: {why}", err.next_step or _EXPORT)]
    offset = raw[: len(raw) - len(mail.diff)].count(b"\n")
    found += _subject(mail, file)
    if not mail.diff:
        found.append(LintFinding(file, 0, "empty", "it changes nothing", "drop it, or write what it is for"))
    for part in parse_diff(mail.diff):
        found += _paths(part, file, offset + 1, new_paths)
        offset += part.head.count(b"\n")
        end = 0  # the line (0-based) of the old file behind the last hunk
        for hunk in part.hunks:
            found += _hunk(hunk, file, offset + 1, end)
            end = hunk.old + hunk.removed
            offset += hunk.text.count(b"\n")
    return mail, found


def _line_ends(raw: bytes, file: str) -> Iterator[LintFinding]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.endswith(b"\r"):
            yield LintFinding(file, number, "crlf", "the line ends in CR LF", "check git's core.autocrlf; " + _EXPORT)
            return


def _subject(mail: Mail, file: str) -> Iterator[LintFinding]:
    line = mail.raw[: mail.raw.find(b"\nSubject:") + 1].count(b"\n") + 1
    again = "amend it: git commit --fixup=amend:<its commit>, then kvtool export"
    if len(mail.subject) > _SUBJECT_WIDTH:
        what = f"the subject has {len(mail.subject)} characters, more than {_SUBJECT_WIDTH}"
        yield LintFinding(file, line, "subject", what, again)
    if mail.subject.endswith("."):
        yield LintFinding(file, line, "subject", "the subject ends in a full stop", again)
    if re.match(r"\[?PATCH\b|\[", mail.subject):
        yield LintFinding(file, line, "subject", "the subject has a [PATCH] prefix", again)
    said = re.sub(r"^[\w./+-]+ ?: ", "", mail.subject)
    words = said.split()
    first = words[0].lower() if words else ""
    if _NOT_IMPERATIVE.match(first) or _THIRD_PERSON.match(first):
        what = f"the subject says {words[0]!r}; what a commit does is said as a command ('add', not 'added')"
        yield LintFinding(file, line, "subject", what, again)


def _paths(part: FileDiff, file: str, line: int, new_paths: Collection[str]) -> Iterator[LintFinding]:
    head = part.head.split(b"\n")
    if part.path in new_paths:
        what = f"it changes {part.path}, which is a file of cpp/"
        yield LintFinding(file, line, "new-file", what, f"change cpp/{part.path} instead")
    elif any(row.startswith(b"new file mode") for row in head):
        what = f"it adds {part.path}"
        yield LintFinding(file, line, "new-file", what, f"new files live in cpp/{part.path}; patches only hook them in")
    if any(row.startswith((b"GIT binary patch", b"Binary files")) for row in head):
        what = f"{part.path} is binary; nobody can review it"
        yield LintFinding(file, line, "binary", what, "keep binary files out of the series")


def _hunk(hunk: Hunk, file: str, line: int, end: int) -> Iterator[LintFinding]:
    """line: of the hunk's header in the patch file; end: where in the old file (0-based) the hunk before ended."""
    said = (hunk.removed, hunk.added)
    body = [row for row in hunk.rows if not row.startswith(b"\\")]
    kinds = [row[:1].replace(b"\n", b" ") for row in body]  # a mailer may have cut the blank of an empty context line
    here = f"{hunk.path} hunk {hunk.number} of {hunk.total}"
    there = (sum(k in (b" ", b"-") for k in kinds), sum(k in (b" ", b"+") for k in kinds))
    if said != there or any(kind not in (b" ", b"+", b"-") for kind in kinds):
        what = f"{here}: the header says {said[0]} and {said[1]} lines, there are {there[0]} and {there[1]}"
        yield LintFinding(file, line, "hunk-count", what, _EXPORT)
        return
    if hunk.old < end:
        yield LintFinding(file, line, "hunk-order", f"{here} begins before the one above it ends", _EXPORT)
    if b"+" not in kinds and b"-" not in kinds:
        yield LintFinding(file, line, "hunk-empty", f"{here} changes nothing", _EXPORT)
    yield from _context(kinds, hunk.old, here, file, line)
    yield from _whitespace(hunk.rows, here, file, line)


def _context(kinds: list[bytes], start: int, here: str, file: str, line: int) -> Iterator[LintFinding]:
    runs = re.findall(rb" +", b"".join(kinds))
    text = b"".join(kinds)
    lead, trail = len(text) - len(text.lstrip(b" ")), len(text) - len(text.rstrip(b" "))
    if lead > CONTEXT or trail > CONTEXT or any(len(run) > 2 * CONTEXT for run in runs):
        what = f"{here} has more than {CONTEXT} line of context"
        yield LintFinding(file, line, "context", what, f"more context conflicts sooner; {_EXPORT}")
    elif lead < CONTEXT and start > 0:
        what = f"{here} has no context before its change"
        yield LintFinding(file, line, "context", what, f"without any it is placed by number alone; {_EXPORT}")


def _whitespace(body: list[bytes], here: str, file: str, line: int) -> Iterator[LintFinding]:
    again = "remove it in the tree, then kvtool export"
    for number, row in enumerate(body, line + 1):
        added = row[1:].rstrip(b"\r\n") if row.startswith(b"+") else b""
        if re.search(rb"[ \t]$", added):
            yield LintFinding(file, number, "whitespace", f"{here}: the added line ends in white space", again)
        if re.match(rb"\t* +\t", added):
            what = f"{here}: the added line has a space before a tab in its indent"
            yield LintFinding(file, number, "whitespace", what, again)
