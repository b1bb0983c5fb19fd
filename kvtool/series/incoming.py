"""Read patches that other tools wrote: mails, quilt patches and plain diffs, in the order of a series file.

Headers of DEP-3, Debian's rules for patches (Origin, Bug, Forwarded, ...), become trailers of the commit message. So
every later export keeps them. Git is not run.
"""

import re
from dataclasses import dataclass, replace
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from itertools import pairwise
from pathlib import Path

from kvtool.errors import UsageError
from kvtool.series.patchfile import Authored, parse_sender

# Used if a patch has no author or no date. All commits that kvtool makes by itself have this date.
_NO_AUTHOR = ("kvtool", "kvtool@localhost")
_NO_DATE = "1767225600 +0000"
_SUFFIXES = (".patch", ".diff")
_SERIES = ("series", ".patches")  # the names that quilt and Electron use
_MBOX = re.compile(rb"^From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n(?=[A-Z][A-Za-z-]*: )", re.MULTILINE)
_DIFF_START = re.compile(rb"^(?:diff -|Index: |--- [^\n]*\n\+\+\+ )", re.MULTILINE)
_SIGNATURE = re.compile(rb"^-- \n(?!\+\+\+ )[^\n]*\n?\s*\Z", re.MULTILINE)
_ONLY_IN = re.compile(rb"^Only in [^\n]*: [^\n]*\n", re.MULTILINE)  # lines that diff -r prints
_FIELD = re.compile(r"([A-Za-z][A-Za-z0-9-]*):(?:[ \t]+(.*))?$")
_PREFIX = re.compile(r"\[[^\]]*\bPATCH\b[^\]]*\]\s*")
_NUMBER = re.compile(r"^\d+[-_.]+")
# Headers that are about the mail and not about the patch.
_OF_THE_MAIL = re.compile(
    r"(to|cc|bcc|date|message-id|in-reply-to|references|reply-to|sender|return-path|received|delivered-to|user-agent"
    r"|status|lines|(list|mime|content|x|dkim|authentication|arc)-[a-z-]+)"
)
_OF_THE_COMMIT = frozenset(("description", "subject", "from", "author", "date"))


@dataclass(frozen=True)
class IncomingPatch(Authored):
    """Hold a patch of another tool. Its diff is unchanged."""

    file: Path  # path of the file, for messages
    first_line: int  # number of the diff's first line in the file, counted from 1
    strip: int = 1  # number of folders to remove from the names in the diff, like -p of patch(1)
    reverse: bool = False  # True if the series file has the option -R for this patch

    @property
    def stem(self) -> str:
        """Return the name of the file without its number and its ending."""
        return _NUMBER.sub("", self.file.name.removesuffix(self.file.suffix)) or self.file.stem

    def in_file(self, text: str) -> str:
        """Return a message of git about the diff, with line numbers of the file instead of line numbers of the diff."""
        return re.sub(r"\bat line (\d+)", lambda found: f"at line {int(found[1]) + self.first_line - 1}", text)


def read_patches(place: Path) -> tuple[IncomingPatch, ...]:
    """Read the patches of a folder, of a series file or of one file, in their order."""
    if not place.exists():
        raise UsageError(f"there is no {place}", next_step="name a folder with patches, or a series file")
    if place.is_dir():
        return _read_folder(place)
    if place.suffix in _SUFFIXES or place.suffix == ".mbox":
        return _read_file(place)
    return _read_series(place)


def _read_folder(folder: Path) -> tuple[IncomingPatch, ...]:
    """Read the patches that the folder's series file names. Without such a file, read all patches, sorted by name."""
    if series := next((folder / name for name in _SERIES if (folder / name).is_file()), None):
        return _read_series(series)
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    files = [path for path in files if not path.name.endswith("0000-cover-letter.patch")]
    if not files:
        inner = next((f for f in ("debian/patches", "patches") if (folder / f).is_dir()), "")
        raise UsageError(
            f"{folder} has no patches",
            why="it has no file named series or .patches, and no *.patch or *.diff",
            next_step=f"kvtool import --patches {folder / inner}" if inner else "name the folder that has them",
        )
    return tuple(patch for file in files for patch in _read_file(file))


def _read_series(series: Path) -> tuple[IncomingPatch, ...]:
    """Read the patches that a quilt series file lists.

    Each line has a name, and can have -pN or -R. A comment starts with #.
    """
    found: list[IncomingPatch] = []
    for number, line in enumerate(_read_bytes(series).decode("utf-8", "replace").splitlines(), 1):
        words = re.split(r"(?:^|\s)#", line)[0].split()
        if not words:
            continue
        name, *flags = words
        here, strip = f"{series}:{number}", 1
        for flag in flags:
            if known := re.fullmatch(r"-p(\d+|ab)", flag):
                strip = 1 if known[1] == "ab" else int(known[1])
            elif flag != "-R":
                raise UsageError(f"{here}: unknown option {flag!r}", why="known are -pN and -R")
        file = series.parent / name
        if not file.is_file():
            raise UsageError(f"{here}: there is no {file}", next_step="correct the line, or remove it")
        read = _read_file(file)
        found += [replace(patch, strip=strip, reverse="-R" in flags) for patch in read]
    if not found:
        raise UsageError(f"{series} lists no patches", next_step="name a folder with patches, or a series file")
    return tuple(found)


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as err:
        raise UsageError(f"cannot read {file}", why=str(err)) from err


def _read_file(file: Path) -> tuple[IncomingPatch, ...]:
    """Read the patches of one file. A mailbox has several."""
    raw = _read_bytes(file)
    if raw.startswith(b"\x1f\x8b"):
        raise UsageError(f"{file} is compressed", next_step=f"gunzip {file}")
    starts = [found.start() for found in _MBOX.finditer(raw)]
    parts = [0, *(start for start in starts if start), len(raw)]
    return tuple(_parse(raw[a:b], file, raw[:a].count(b"\n")) for a, b in pairwise(parts))


def _parse(raw: bytes, file: Path, lines_before: int) -> IncomingPatch:
    """Parse one patch, which may be a mail, a quilt patch or a plain diff."""
    text = raw.partition(b"\n")[2] if raw.startswith(b"From ") else raw
    skipped = raw[: len(raw) - len(text)].count(b"\n")
    header, body = _split_header(text)
    mail = BytesParser(policy=policy.default).parsebytes(header + b"\n") if header else EmailMessage()
    assert isinstance(mail, EmailMessage)
    if str(mail.get("Content-Transfer-Encoding", "")).strip().lower() in ("quoted-printable", "base64"):
        whole = BytesParser(policy=policy.default).parsebytes(text)
        body = whole.get_payload(decode=True) or b""  # type: ignore[assignment]
        body = body.replace(b"\r\n", b"\n")
    start = _DIFF_START.search(body)
    if start is None:
        raise UsageError(f"{file} has no diff", why="it has neither a 'diff' line nor a '---' and a '+++' line")
    diff = _SIGNATURE.sub(b"", body[start.start() :])
    free = re.split(rb"^---\s*$", body[: start.start()], maxsplit=1, flags=re.MULTILINE)[0]
    free = _ONLY_IN.sub(b"", free)
    fields = _fields(header.decode("utf-8", "replace"))
    name, email = _author(fields, mail)
    message = _message(fields, mail, free.decode("utf-8", "surrogateescape"), file)
    first = lines_before + skipped + (text.count(b"\n") - body.count(b"\n")) + body[: start.start()].count(b"\n") + 1
    return IncomingPatch(name, email, str(mail.get("Date", "")).strip() or _NO_DATE, message, diff, file, first)


def _split_header(text: bytes) -> tuple[bytes, bytes]:
    """Divide a text into its headers and the rest. The first part is empty if the text does not begin with a header."""
    stop = _DIFF_START.search(text)
    lines = (text[: stop.start()] if stop else text).splitlines(keepends=True)
    count = 0
    for line in lines:
        shown = line.decode("utf-8", "replace").rstrip("\r\n")
        if not (_FIELD.match(shown) or (count and re.match(r"[ \t]+\S", shown))):
            break
        count += 1
    if count < len(lines) and lines[count].strip() and lines[count].rstrip() != b"---":
        return b"", text  # the line only looks like a header; it is a sentence with a colon
    header = b"".join(lines[:count])
    return header, text[len(header) :]


def _fields(header: str) -> list[tuple[str, str]]:
    """Return the name and the value of each header of a patch file. A value of several lines keeps its line ends."""
    found: list[tuple[str, str]] = []
    for line in header.splitlines():
        if line[:1] in " \t" and found:
            more = line.strip()
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{'' if more == '.' else more}")
        elif field := _FIELD.match(line):
            found.append((field[1], (field[2] or "").strip()))
    return found


def _author(fields: list[tuple[str, str]], mail: EmailMessage) -> tuple[str, str]:
    """Return the name and the address of the header From, or of Author, which DEP-3 allows instead."""
    raw = next((value for key, value in mail.raw_items() if key.lower() == "from"), "")
    raw = raw or next((value for key, value in fields if key.lower() == "author"), "")
    name, email = parse_sender(raw.replace("\n", " ")) if raw else _NO_AUTHOR
    return name or email or _NO_AUTHOR[0], email or _NO_AUTHOR[1]


def _message(fields: list[tuple[str, str]], mail: EmailMessage, free: str, file: Path) -> str:
    """Return the commit message: the subject, the text, and the other headers as trailers."""
    by_name = {key.lower(): value for key, value in reversed(fields)}
    first, _, rest = by_name.get("description", "").partition("\n")
    subject = _PREFIX.sub("", " ".join(str(mail.get("Subject") or "").split())).strip()
    text = [rest if first else "", free]
    if subject and first:
        text = [f"{first}\n{rest}", free]
    subject = subject or first.strip()
    if not subject:  # there is only free text, or nothing at all
        lines = [line for line in free.strip().splitlines() if line.strip()]
        subject, text = (lines[0].strip(" #") if lines else file.stem), ["\n".join(free.strip().splitlines()[1:])]
    kept = [
        f"{key}: {' '.join(value.split())}"
        for key, value in fields
        if value and key.lower() not in _OF_THE_COMMIT and not _OF_THE_MAIL.fullmatch(key.lower())
    ]
    paragraphs = [part.strip("\n").rstrip() for part in text if part.strip()]
    return "\n\n".join([subject, *paragraphs, *(["\n".join(kept)] if kept else [])]) + "\n"
