"""The fast way to build a series: where every patch finds just the files that it was written against.

A patch names the blob that it expects and the blob that it makes (`index <old>..<new>`, whole ids). Where a file is the
one, its hunks stand at the very lines they name, and the result is held against the other: nothing is searched and
nothing can be misplaced. One git process then writes all the commits, instead of four for each patch. Whatever is not
so plain (a file that upstream changed, a mode, a rename, a name that git would clean up) gives None, and the ordinary
way decides; both give the same commit ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import PurePosixPath

from kvtool.gitcmd import EPOCH, IDENTITY_EMAIL, IDENTITY_NAME, Git
from kvtool.tree.mailbox import FileDiff, Mail, parse_diff
from kvtool.tree.series import NewFile

_INDEX = re.compile(rb"^index [0-9a-f]{40}\.\.([0-9a-f]{40}) (100644|100755)$")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NAME = re.compile(r"[^\W\d_](?:[\w @+-]*\w)?")  # what git takes as it is; it strips dots and the like at the ends
_EMAIL = re.compile(r"\w(?:[\w.@+-]*\w)?")
_DATE = re.compile(r"\w{3}, \d{1,2} \w{3} \d{4} \d\d:\d\d:\d\d [+-]\d{4}")
_PATH = re.compile(r"[\w./+-]+", re.ASCII)
_REF = "refs/kvtool/exact"  # fast-import needs one while it runs


@dataclass(frozen=True)
class Exact:
    """The commits: that of the new files ("" without any), then one for each mail; head and its tree."""

    commits: tuple[str, ...]
    head: str
    tree: str


def build(git: Git, base: str, files: Sequence[NewFile], subject: str, mails: Sequence[Mail]) -> Exact | None:
    """Commit `files` and each mail's diff on top of base. None where it is not that plain; then nothing was written."""
    diffs = [parse_diff(mail.diff) for mail in mails]
    touched = list(dict.fromkeys(file.path for diff in diffs for file in diff))
    paths = [*touched, *(file.path for file in files)]
    if not mails or not all(diffs) or not all(_plain(mail) for mail in mails):
        return None
    if not all(_PATH.fullmatch(path) for path in paths) or not _are_new(git, base, files):
        return None
    blobs = _read(git, base, touched)
    if blobs is None:
        return None
    commits = [_new_files(files, subject)] if files else []
    for mail, diff in zip(mails, diffs, strict=True):
        changed: list[bytes] = []
        for part in diff:
            after = _patched(part, blobs[part.path])
            if after is None:
                return None
            blobs[part.path] = after
            index = _index(part)
            assert index is not None  # or it would not have been patched
            changed.append(_modify(index[2].decode(), part.path, after))
        commits.append(_commit(mail, changed))
    return _write(git, base, commits, bool(files))


def _plain(mail: Mail) -> bool:
    named = _NAME.fullmatch(mail.name) and _EMAIL.fullmatch(mail.email) and _DATE.fullmatch(mail.date)
    return bool(named) and "\0" not in mail.message


def _are_new(git: Git, base: str, files: Sequence[NewFile]) -> bool:
    """Whether upstream has none of these paths, and no file where one of them needs a folder."""
    if not files:
        return True
    folders = {str(parent) for file in files for parent in PurePosixPath(file.path).parents if str(parent) != "."}
    asked = [*sorted(folders), *(file.path for file in files)]
    lines = "".join(f"{base}:{path}\n" for path in asked)
    kinds = git.run("cat-file", "--batch-check=%(objecttype)", input=lines).stdout.splitlines()
    wrong = [kind for kind in kinds[: len(folders)] if kind == "blob"]
    return not wrong and all(kind.endswith("missing") for kind in kinds[len(folders) :])


def _read(git: Git, base: str, paths: Sequence[str]) -> dict[str, bytes] | None:
    """The files of the base; None when one is missing."""
    lines = "".join(f"{base}:{path}\n" for path in paths)
    out = git.run("cat-file", "--batch", input=lines).stdout.encode("utf-8", "surrogateescape")
    found: dict[str, bytes] = {}
    at = 0
    for path in paths:
        end = out.index(b"\n", at)
        head = out[at:end].split(b" ")
        if len(head) != 3 or head[1] != b"blob":
            return None
        size = int(head[2])
        found[path] = out[end + 1 : end + 1 + size]
        at = end + size + 2
    return found


def blob_id(content: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _index(part: FileDiff) -> re.Match[bytes] | None:
    lines = part.head.rstrip(b"\n").split(b"\n")
    plain = len(lines) == 4 and lines[2].startswith(b"--- a/") and lines[3].startswith(b"+++ b/")
    return _INDEX.match(lines[1]) if plain else None


def _patched(part: FileDiff, before: bytes) -> bytes | None:
    """The file after the change, when that is the very file that the patch says it makes."""
    index = _index(part)
    if index is None or not part.hunks:
        return None
    old, new, at = before.split(b"\n"), list[bytes](), 0
    for hunk in part.hunks:
        ranges = _HUNK.match(hunk.header)
        rows = hunk.text.split(b"\n")[1:]
        rows = rows[:-1] if rows and not rows[-1] else rows
        if ranges is None or any(row[:1] not in (b" ", b"-", b"+") for row in rows):
            return None
        start = int(ranges[1]) - (0 if ranges[2] == "0" else 1)
        was = [row[1:] for row in rows if row[:1] != b"+"]
        if start < at or old[start : start + len(was)] != was:
            return None
        new += [*old[at:start], *(row[1:] for row in rows if row[:1] != b"-")]
        at = start + len(was)
    after = b"\n".join([*new, *old[at:]])
    return after if blob_id(after) == index[1].decode() and after != before else None


# --- fast-import --------------------------------------------------------------------------------------------------


def _data(content: bytes) -> bytes:
    return b"data %d\n%s\n" % (len(content), content)


def _modify(mode: str, path: str, content: bytes) -> bytes:
    return f"M {mode} inline {path}\n".encode() + _data(content)


def _person(kind: str, name: str, email: str, when: str) -> bytes:
    return f"{kind} {name} <{email}> {when}\n".encode("utf-8", "surrogateescape")


_Entry = tuple[bytes, bytes]  # a commit for fast-import, in two parts: its parent goes between them


def _commit(mail: Mail, changed: Sequence[bytes]) -> _Entry:
    date = parsedate_to_datetime(mail.date)
    when = f"{int(date.timestamp())} {mail.date[-5:]}"
    author = _person("author", mail.name, mail.email, when)
    return _entry(author, mail.message, changed)


def _new_files(files: Sequence[NewFile], subject: str) -> _Entry:
    author = _person("author", IDENTITY_NAME, IDENTITY_EMAIL, EPOCH)
    modes = ("100755" if file.executable else "100644" for file in files)
    changed = [_modify(mode, f.path, f.source.read_bytes()) for mode, f in zip(modes, files, strict=True)]
    return _entry(author, f"{subject}\n", changed)


def _entry(author: bytes, message: str, changed: Sequence[bytes]) -> _Entry:
    committer = _person("committer", IDENTITY_NAME, IDENTITY_EMAIL, EPOCH)
    text = message.encode("utf-8", "surrogateescape")
    return author + committer + _data(text), b"".join(changed)


def _write(git: Git, base: str, commits: Sequence[_Entry], with_files: bool) -> Exact:
    """All commits in one process. The ref is deleted in the same breath, so it never exists outside."""
    stream = [b"feature done\n"]
    for number, (head, rest) in enumerate(commits, 1):
        parent = base if number == 1 else f":{number - 1}"
        stream += [f"commit {_REF}\nmark :{number}\n".encode(), head, f"from {parent}\n".encode(), rest]
        stream.append(f"get-mark :{number}\n".encode())
    stream.append(f"reset {_REF}\nfrom {'0' * 40}\n\ndone\n".encode())
    light = ("-c", "core.compression=1")  # zlib at its best is most of the time here, for a few hundred kilobytes
    ids = git.run(*light, "fast-import", "--quiet", "--force", "--depth=0", input=b"".join(stream)).stdout.split()
    tree = git.line("rev-parse", f"{ids[-1]}^{{tree}}")
    return Exact((*([] if with_files else [""]), *ids), ids[-1], tree)
