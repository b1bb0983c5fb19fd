"""Parse patch files and their diffs. A patch file is a mail that `git format-patch` wrote. Git is not run."""

import itertools
import re
from dataclasses import dataclass
from email import policy
from email.header import decode_header, make_header
from email.parser import BytesHeaderParser
from email.utils import parseaddr, unquote
from itertools import pairwise, takewhile

from kvtool.errors import UsageError
from kvtool.series.source import split_lines

# With these flags, a diff does not depend on the user's configuration and the version of git.
PLAIN_FLAGS = (
    *("--src-prefix=a/", "--dst-prefix=b/", "--inter-hunk-context=0"),
    *("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"),
)
# One line of context: such hunks still apply after months of changes in upstream, but hunks with three lines do not.
DIFF_FLAGS = (*PLAIN_FLAGS, "--diff-algorithm=myers", "--full-index", "--binary", "-U1")
# With these flags, a mail has only the necessary headers.
MAIL_FLAGS = (
    *("--zero-commit", "--no-signature", "--no-stat", "--keep-subject", "--no-attach", "--no-thread"),
    *("--no-cover-letter", "--no-base", "--no-from", "--no-signoff", "--no-add-header"),
)


@dataclass(frozen=True)
class Authored:
    """Hold a change and its author."""

    name: str
    email: str
    date: str  # date in a form that git accepts
    message: str  # the whole commit message
    diff: bytes  # begins with the first "diff --git"; b"" if there is no diff

    @property
    def subject(self) -> str:
        """Return the subject as git does: the first paragraph as one line."""
        return " ".join(map(str.rstrip, takewhile(str.strip, self.message.lstrip("\n").split("\n")))).strip()


@dataclass(frozen=True)
class Mail(Authored):
    """Hold a parsed patch file. Its message ends in exactly one line end."""

    raw: bytes  # the unchanged content of the file


@dataclass(frozen=True)
class Block:
    """Describe a block of a line diff. Lines are counted from 0.

    The lines [old, old + removed) were replaced by the lines [new, new + added).
    """

    old: int
    removed: int
    new: int
    added: int


@dataclass(frozen=True)
class Hunk(Block):
    """Hold one hunk of a diff."""

    path: str
    number: int  # position of the hunk in its file, counted from 1
    total: int  # number of hunks in its file
    header: str  # "@@ -10,3 +10,5 @@"
    heading: str  # text after the second @@, usually the function around the hunk
    text: bytes

    @property
    def rows(self) -> list[bytes]:
        """Return the lines of the hunk with their marks (+, - or blank), without the header."""
        return split_lines(self.text)[1:]

    @property
    def function(self) -> str:
        """Return the function around the first changed line.

        The heading that git prints after "@@" names the last function that begins before the hunk. If another function
        begins in the hunk itself, above the change, the first line of that function is returned instead.
        """
        name = self.heading
        for row in self.rows:
            is_head = _FUNCTION.match(row[1:])
            if row[:1] != b" ":
                return _label(row[1:]) if is_head and row[:1] == b"-" else name
            name = _label(row[1:]) if is_head else name
        return name


@dataclass(frozen=True)
class FileDiff:
    """Hold the part of a diff that changes one file."""

    path: str  # path after the change
    head: bytes  # the lines before the first hunk
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Piece:
    """Hold a hunk as lines before and after the change."""

    hunk: Hunk
    start: int  # number of the first line in the old file, counted from 0
    made: int  # number of the first line in the new file, counted from 0
    before: tuple[bytes, ...]  # old lines, including context
    after: tuple[bytes, ...]  # new lines, including context
    lead: int  # number of context lines at the start
    trail: int  # number of context lines at the end


_FUNCTION = re.compile(rb"[A-Za-z_$]")  # git's default rule for lines that can be the heading of a hunk
_LABEL_WIDTH = 80  # most characters of a heading, as in git
_HUNK = re.compile(rb"^(@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@)(.*)$")
_DIFF = re.compile(rb"^diff --git ", re.MULTILINE)
_SIGNATURE = re.compile(rb"^-- \n(?!diff --git )[^-+ @\\].*\Z", re.MULTILINE | re.DOTALL)  # signature of a mail


def parse_sender(raw: str) -> tuple[str, str]:
    """Return the name and the address of a From header that git wrote.

    Python's own parser is not used. It cuts off unusual addresses such as 1+x[bot]@y, and adds blanks to a name that
    has several encoded words.
    """
    text = raw.encode("ascii", "surrogateescape").decode("utf-8", "replace")
    name, bracket, email = text.rpartition("<")
    if not bracket:
        return parseaddr(text)
    name = unquote(" ".join(name.split()))
    return str(make_header(decode_header(name))) if "=?" in name else name, email.rstrip("> \r\n")


_BY_HAND = "apply it in the patched tree (git apply), commit there, and run kvtool export"


def parse_mail(raw: bytes, where: str) -> Mail:
    """Parse a patch file. Raise UsageError if it is not a mail that git format-patch wrote."""
    hint = "write it with `kvtool export`, or git format-patch"
    if re.search(rb"^--- [^\n]*\n\+\+\+ ", raw, re.MULTILINE):  # this is a diff of another tool
        hint = f"import it: kvtool import --patches FILE, in an empty project; or {_BY_HAND}"
    head, separator, rest = raw.partition(b"\n\n")
    if not separator or not head.startswith(b"From "):
        why = "its lines end in CR LF" if b"\r\n\r\n" in raw else "it does not begin with a From line"
        raise UsageError(f"{where} is not a patch mail", why=why, next_step=hint)
    headers = BytesHeaderParser(policy=policy.default).parsebytes(head.partition(b"\n")[2] + b"\n\n")
    name, email = parse_sender(next((value for key, value in headers.raw_items() if key.lower() == "from"), ""))
    subject, date = str(headers["Subject"] or "").strip(), str(headers["Date"] or "").strip()
    for what, value in (("From", name or email), ("Date", date), ("Subject", subject)):
        if not value:
            raise UsageError(f"{where} is not a patch mail", why=f"it has no {what} header", next_step=hint)
    start = _DIFF.search(rest)
    text, diff = (rest[: start.start()], _SIGNATURE.sub(b"", rest[start.start() :])) if start else (rest, b"")
    body = (
        re.split(rb"^---$", text, maxsplit=1, flags=re.MULTILINE)[0]
        .decode("utf-8", "surrogateescape")
        .strip("\r\n")
        .rstrip()
    )
    message = f"{subject}\n\n{body}\n" if body else f"{subject}\n"
    return Mail(name or email, email, date, message, diff, raw)


def parse_diff(diff: bytes) -> tuple[FileDiff, ...]:
    """Parse a diff of git into files and hunks. A binary change has no hunks."""
    starts = [found.start() for found in _DIFF.finditer(diff)] + [len(diff)]
    return tuple(_file(diff[a:b]) for a, b in pairwise(starts))


def _file(text: bytes) -> FileDiff:
    lines = split_lines(text)
    at = [n for n, line in enumerate(lines) if _HUNK.match(line)]
    head = b"".join(lines[: at[0]] if at else lines)
    path = _path(head)
    parts = enumerate(pairwise([*at, len(lines)]), 1)
    return FileDiff(path, head, tuple(_hunk(path, number, len(at), lines[a:b]) for number, (a, b) in parts))


def _label(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()[:_LABEL_WIDTH]


def _hunk(path: str, number: int, total: int, lines: list[bytes]) -> Hunk:
    found = _HUNK.match(lines[0])
    assert found
    old, removed, new, added = (int(found[n]) if found[n] else 1 for n in range(2, 6))
    heading = found[6].decode("utf-8", "replace").strip()
    place = (
        old - (removed > 0),
        removed,
        new - (added > 0),
        added,
    )  # for an empty range, git prints the number of the line before it
    return Hunk(*place, path, number, total, found[1].decode(), heading, b"".join(lines))


_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
_NAME = rb'"(?:[^"\\]|\\.)*"|[^\n]*?'
_PLACES = tuple(
    re.compile(rb"^" + before + rb"(" + _NAME + rb")\t?$", re.MULTILINE)
    for before in (rb"\+\+\+ ", rb"--- ", rb"rename to ")
)
_BOTH = re.compile(rb'diff --git (?:a/(?P<plain>.*) b/(?P=plain)|"a/(?P<quoted>.*)" "b/(?P=quoted)")$')


def unquote_name(name: bytes) -> bytes:
    """Return a file name without the quotes and backslashes that git writes in a diff."""
    if not (len(name) > 1 and name.startswith(b'"') and name.endswith(b'"')):
        return name

    def character(found: re.Match[bytes]) -> bytes:
        code = found[1]
        return bytes([int(code, 8) & 255 if code.isdigit() else _ESCAPES.get(code, code[0])])

    return re.sub(rb"\\([0-7]{3}|.)", character, name[1:-1], flags=re.DOTALL)


def quote_name(name: bytes) -> bytes:
    """Return a file name as git writes it in a diff if core.quotePath is off.

    Quotes are added only if they are necessary.
    """
    codes = {code: b"\\" + letter for letter, code in _ESCAPES.items()}
    quoted = b"".join(codes.get(byte, b"\\%03o" % byte if byte < 32 or byte == 127 else bytes([byte])) for byte in name)
    return name if quoted == name else b'"' + quoted + b'"'


def _path(head: bytes) -> str:
    """Return the path of the file that a part of a diff changes. For a removed file, this is its old path."""
    for place in _PLACES:
        if found := place.search(head):
            name = unquote_name(found[1])
            if name != b"/dev/null":
                cut = name if head[found.start() :].startswith(b"rename") else name[2:]
                return cut.decode("utf-8", "surrogateescape")
    found = _BOTH.match(head.split(b"\n")[0])
    if not found:
        return ""
    plain = found["plain"]
    name = plain if plain is not None else unquote_name(b'"' + found["quoted"] + b'"')
    return name.decode("utf-8", "surrogateescape")


def find_wrong_count(diff: bytes) -> tuple[int, str] | None:
    """Find the first hunk whose header has other line counts than the hunk.

    Returns the number of the header's line, counted from 0, and a sentence about the mistake. Returns None if all
    headers are right.
    """
    lines = split_lines(diff)
    at = 0
    while at < len(lines):
        found = _HUNK.match(lines[at])
        start, at = at, at + 1
        if not found:
            continue
        wanted = [int(found[n]) if found[n] else 1 for n in (3, 5)]
        counts = [0, 0]  # before and after the change
        while counts != wanted and at < len(lines) and lines[at][:1] in (b" ", b"+", b"-", b"\n", b"\\"):
            counts[0] += lines[at][:1] in (b" ", b"-", b"\n")
            counts[1] += lines[at][:1] in (b" ", b"+", b"\n")
            at += 1
        more = list(itertools.takewhile(_is_row, lines[at:]))
        if counts == wanted and not any(row[:1] in (b"+", b"-") for row in more):
            continue
        counts[0] += sum(row[:1] != b"+" for row in more)
        counts[1] += sum(row[:1] != b"-" for row in more)
        sides = zip(("before", "after"), wanted, counts, strict=True)
        wrong = [f"{said} lines {side} the change (there are {n})" for side, said, n in sides if said != n]
        return start, f"the @@ line counts {' and '.join(wrong)}"
    return None


def _is_row(line: bytes) -> bool:
    """Return True if a line after a complete hunk looks like another line of the hunk."""
    return line[:1] in (b" ", b"+", b"-") and not line.startswith(b"--- ") and line.rstrip() != b"--"


def hunks_of(diff: bytes) -> list[Hunk]:
    """Return the hunks of all files of a diff."""
    return [hunk for file in parse_diff(diff) for hunk in file.hunks]


def diff_size(diff: bytes) -> tuple[int, int, int]:
    """Return the number of hunks, of added lines and of removed lines."""
    hunks = hunks_of(diff)
    marks = [row[:1] for hunk in hunks for row in hunk.rows]
    return len(hunks), marks.count(b"+"), marks.count(b"-")


def count_runs(diff: bytes) -> int:
    """Return the number of runs of adjacent changed lines.

    The number of hunks depends on the number of context lines, but this number does not.
    """
    marks = (b"".join(row[:1] for row in hunk.rows if row[:1] != b"\\") for hunk in hunks_of(diff))
    return sum(len(re.findall(rb"[-+]+", text)) for text in marks)


def hunk_headings(diff: bytes) -> list[tuple[str, str]]:
    """Return the path and the heading of each hunk. git's heading is usually the function."""
    return [(hunk.path, hunk.heading) for hunk in hunks_of(diff)]


def pieces_of(file: FileDiff) -> tuple[Piece, ...]:
    """Return the hunks of one file as lines before and after the change."""
    return tuple(map(_piece, file.hunks))


def _piece(hunk: Hunk) -> Piece:
    before: list[bytes] = []
    after: list[bytes] = []
    marks = b""
    for row in hunk.rows:
        mark, line = row[:1], row[1:]
        if mark == b"\\":  # this mark says that the line before it has no line end
            for side, kinds in ((before, b" -"), (after, b" +")):
                if side and marks[-1:] in kinds:
                    side[-1] = side[-1].removesuffix(b"\n")
            continue
        marks += mark
        if mark != b"+":
            before.append(line)
        if mark != b"-":
            after.append(line)
    lead, trail = len(marks) - len(marks.lstrip(b" ")), len(marks) - len(marks.rstrip(b" "))
    return Piece(hunk, hunk.old, hunk.new, tuple(before), tuple(after), lead, trail)


def changed_rows(diff: bytes) -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    """Return the changes of a diff without line numbers and context: modes, lines, and the ids of binary files."""
    return tuple(
        (
            file.path,
            (
                *re.findall(rb"^(?:old|new|new file|deleted file) mode .*", file.head, re.MULTILINE),
                *re.findall(rb"^index \w+\.\.(\w+)", b"" if file.hunks else file.head, re.MULTILINE),
                *(row for hunk in file.hunks for row in hunk.rows if row[:1] in (b"+", b"-")),
            ),
        )
        for file in parse_diff(diff)
    )


# --- messages and mails that git am reads unchanged ---------------------------------------------------------------

_TAKEN_FOR_DIFF = re.compile(r"^(?=---\s*$|--- \S|diff -|Index: |From .*\d:\d\d)", re.MULTILINE)
_TAKEN_FOR_HEADER = re.compile(r"(?=(?:From|Subject|Date|Content-Type):|>From\s|\[PATCH\]\s)", re.IGNORECASE)
_OWN_HEADERS = re.compile(rb"(?:From|Date|Subject|MIME-Version|Content-[\w-]+):", re.IGNORECASE)
_DIFFSTAT = re.compile(rb" .*\| +(?:\d+ [-+]*|Bin .*)\n| \d+ files? changed.*\n| (?:create|delete) mode \d+ .*\n")


def mail_message(message: str) -> str:
    """Return a commit message with a blank in front of each line that git am would read as a diff or a header."""
    subject, separator, body = message.partition("\n\n")
    rows = _TAKEN_FOR_DIFF.sub(" ", body).split("\n")
    at = 0
    while at < len(rows) and _TAKEN_FOR_HEADER.match(rows[at]):
        rows[at] = " " + rows[at]
        at += 1
    return subject + separator + "\n".join(rows)


def clean_message(message: str) -> str:
    """Return a message as git commit and git am clean it up.

    White space at the ends of lines is removed, and two blank lines in a row become one.
    """
    text = "\n".join(line.rstrip() for line in message.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def mail_extras(raw: bytes) -> tuple[bytes, bytes]:
    """Return the parts of a patch file that git does not write: other headers (Origin, Bug), and notes below `---`."""
    head, _, rest = raw.partition(b"\n\n")
    fields = re.findall(rb"^[^\s:]+:.*\n?(?:[ \t].*\n?)*", head.partition(b"\n")[2] + b"\n", re.MULTILINE)
    headers = b"".join(field for field in fields if not _OWN_HEADERS.match(field))
    start = _DIFF.search(rest)
    text = rest[: start.start()] if start else b""
    parts = re.split(rb"^---\n", text, maxsplit=1, flags=re.MULTILINE)
    notes = b"".join(row for row in split_lines(parts[1]) if not _DIFFSTAT.fullmatch(row)) if len(parts) == 2 else b""
    return headers, notes.strip(b"\n")


def with_extras(raw: bytes, extras: tuple[bytes, bytes]) -> bytes:
    """Return a new patch file with the additional headers and notes of the old one."""
    headers, notes = extras
    head, separator, rest = raw.partition(b"\n\n")
    start = _DIFF.search(rest)
    if notes and start:
        rest = rest[: start.start()].rstrip(b"\n") + b"\n---\n" + notes + b"\n\n" + rest[start.start() :]
    return head + b"\n" + headers.rstrip(b"\n") + separator + rest if headers else head + separator + rest
