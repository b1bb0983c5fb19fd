"""Check one patch file: a valid mail, correct line counts, and nothing that a reviewer would reject."""

import re
from collections.abc import Collection, Iterator
from typing import TypeAlias

from kvtool.errors import UsageError
from kvtool.lint import LintFinding
from kvtool.series.patchfile import FileDiff, Hunk, Mail, parse_diff, parse_mail
from kvtool.series.series import is_ignored_path

CONTEXT = 1  # lines of context on each side of a change, as export writes them (patchfile.DIFF_FLAGS)
_SUBJECT_WIDTH = 72
_EXPORT = "let kvtool export write it: apply, commit in the tree, export"

# The first word of a subject must be imperative. These endings are not. Words in the list have such an ending, but are
# imperative.
_NO_COMMAND = re.compile(
    r"^(?:(?!(?:need|feed|seed|embed|shed|speed|bring|string|ring|sing)$)[a-z]+(?:ed|ing)"
    r"|adds|fixes|makes|lets|uses|removes|changes|grows|moves|keeps|allows|updates|sets)$"
)
Findings: TypeAlias = Iterator[tuple[int, str, str, str]]  # number of the line, rule, mistake, next step


def lint_patch(raw: bytes, file: str, new_paths: Collection[str]) -> tuple[Mail | None, list[LintFinding]]:
    """Return the parsed mail and its mistakes. The mail is None if it cannot be read.

    new_paths: the paths of the files of cpp/
    """
    found, mail = list[tuple[int, str, str, str]](), None
    try:
        mail = parse_mail(raw, file)
        found += [*_subject(mail), *_diff(mail, new_paths)]
    except UsageError as err:
        found.append((1, "mail", f"not a patch mail: {err.why or err.what}", err.next_step or _EXPORT))
    return mail, [LintFinding(file, *said) for said in found]


def _subject(mail: Mail) -> Findings:
    subject, line = mail.subject, mail.raw[: mail.raw.find(b"\nSubject:") + 1].count(b"\n") + 1
    (word, *_) = re.sub(r"^[\w./+-]+ ?: ", "", subject).split() or [""]
    is_wrong = {
        f"has {len(subject)} characters, more than {_SUBJECT_WIDTH}": len(subject) > _SUBJECT_WIDTH,
        "ends in a full stop": subject.endswith("."),
        "has a [PATCH] prefix": re.match(r"\[?PATCH\b", subject),
        f"says {word!r}; the subject must be imperative ('add', not 'added')": _NO_COMMAND.match(word.lower()),
    }
    for what, wrong in is_wrong.items():
        if wrong:
            again = "amend it: git commit --fixup=amend:<its commit>, then kvtool export"
            yield line, "subject", f"the subject {what}", again


def _diff(mail: Mail, new_paths: Collection[str]) -> Findings:
    line = mail.raw[: mail.raw.find(mail.diff)].count(b"\n") + 1
    if not mail.diff:
        yield 0, "empty", "it changes nothing", "remove it, or describe its purpose"
    for part in parse_diff(mail.diff):
        yield from _paths(part, line, new_paths)
        line += part.head.count(b"\n")
        end = 0  # the line of the old file after the last hunk, counted from 0
        for hunk in part.hunks:
            yield from _hunk(hunk, line, end)
            end = hunk.old + hunk.removed
            line += hunk.text.count(b"\n")


def _paths(part: FileDiff, line: int, new_paths: Collection[str]) -> Findings:
    head = part.head.split(b"\n")
    if part.path in new_paths:
        what = f"it changes {part.path}, which is a file of cpp/"
        yield line, "new-file", what, f"change cpp/{part.path} instead"
    elif any(re.match(rb"new file mode 100(644|755)$", row) for row in head) and not is_ignored_path(part.path):
        todo = f"new files live in cpp/{part.path}; patches only hook them in"
        yield line, "new-file", f"it adds {part.path}", todo
    if any(row.startswith((b"GIT binary patch", b"Binary files")) for row in head):
        what = f"{part.path} is binary and cannot be reviewed"
        yield line, "binary", what, "keep binary files out of the series"


def _hunk(hunk: Hunk, line: int, end: int) -> Findings:
    """Check the line counts and the order of one hunk.

    line: the line of the hunk's header in the patch file
    end: the index of the line after the previous hunk in the old file, counted from 0
    """
    # an empty context line is a single blank, which a mail program may have removed
    kinds = b"".join(row[:1].replace(b"\n", b" ") for row in hunk.rows if not row.startswith(b"\\"))
    here = f"{hunk.path} hunk {hunk.number} of {hunk.total}"
    said, there = (hunk.removed, hunk.added), tuple(sum(kind in mine for kind in kinds) for mine in (b" -", b" +"))
    if said != there or kinds.strip(b" +-"):
        what = f"{here}: the header counts {said[0]} and {said[1]} lines, the hunk has {there[0]} and {there[1]}"
        yield line, "hunk-count", what, _EXPORT
        return
    if hunk.old < end:
        yield line, "hunk-order", f"{here} begins before the one above it ends", _EXPORT
    if not kinds.strip(b" "):
        yield line, "hunk-empty", f"{here} changes nothing", _EXPORT
    lead, trail = (len(kinds) - len(left) for left in (kinds.lstrip(b" "), kinds.rstrip(b" ")))
    if max(lead, trail) > CONTEXT or b" " * (2 * CONTEXT + 1) in kinds:
        what = f"{here} has more than {CONTEXT} line of context"
        yield line, "context", what, f"more context leads to more conflicts; {_EXPORT}"
    elif lead < CONTEXT and hunk.old > 0:
        what = f"{here} has no context before its change"
        yield line, "context", what, f"without context, its place is found only by the line number; {_EXPORT}"
    yield from _whitespace(hunk.rows, here, line)


def _whitespace(body: list[bytes], here: str, line: int) -> Findings:
    again = "remove it in the tree, then kvtool export"
    theirs = any(row.endswith(b"\r\n") and row[:1] != b"+" for row in body)  # upstream's own lines end in CR LF
    for number, row in enumerate(body, line + 1):
        if row.startswith(b"+") and row.endswith(b"\r\n") and not theirs:
            yield number, "crlf", f"{here}: the added line ends in CR LF", "check git's core.autocrlf; " + again
        added = row[1:].rstrip(b"\r\n") if row.startswith(b"+") else b""
        if re.search(rb"[ \t]$", added):
            yield number, "whitespace", f"{here}: the added line ends in white space", again
        if re.match(rb"\t* +\t", added):
            yield number, "whitespace", f"{here}: the added line has a space before a tab in its indent", again
