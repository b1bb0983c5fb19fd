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

from kvtool.gitcmd import Git
from kvtool.tree.fastimport import Written, are_new, commit_of, is_plain, modify, new_files, write
from kvtool.tree.mailbox import FileDiff, Mail, parse_diff
from kvtool.tree.series import NewFile

_INDEX = re.compile(rb"^index [0-9a-f]{40}\.\.([0-9a-f]{40}) (100644|100755)$")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def build(git: Git, base: str, files: Sequence[NewFile], subject: str, mails: Sequence[Mail]) -> Written | None:
    """Commit `files` and each mail's diff on top of base. None where it is not that plain; then nothing was written."""
    diffs = [parse_diff(mail.diff) for mail in mails]
    touched = list(dict.fromkeys(file.path for diff in diffs for file in diff))
    paths = [*touched, *(file.path for file in files)]
    if not mails or not all(diffs) or not is_plain(mails, paths) or not are_new(git, base, files):
        return None
    blobs = git.blobs(base, touched)
    if blobs is None:
        return None
    commits = [new_files(files, subject)] if files else []
    for mail, diff in zip(mails, diffs, strict=True):
        changed: list[bytes] = []
        for part in diff:
            after = _patched(part, blobs[part.path])
            if after is None:
                return None
            blobs[part.path] = after
            index = plain_index(part)
            assert index is not None  # or it would not have been patched
            changed.append(modify(index[2].decode(), part.path, after))
        commits.append(commit_of(mail, changed))
    return write(git, base, commits, bool(files))


def blob_id(content: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def plain_index(part: FileDiff) -> re.Match[bytes] | None:
    """The index line (new id, mode) of a change that is about content alone: no mode, no rename, no new file."""
    lines = part.head.rstrip(b"\n").split(b"\n")
    plain = len(lines) == 4 and lines[2].startswith(b"--- a/") and lines[3].startswith(b"+++ b/")
    return _INDEX.match(lines[1]) if plain else None


def _patched(part: FileDiff, before: bytes) -> bytes | None:
    """The file after the change, when that is the very file that the patch says it makes."""
    index = plain_index(part)
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
