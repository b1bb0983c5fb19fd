"""Commits by git fast-import: a chain of them, trees and files included, in one process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import PurePosixPath

from kvtool.gitcmd import EPOCH, IDENTITY_EMAIL, IDENTITY_NAME, Git
from kvtool.tree.mailbox import Mail
from kvtool.tree.series import NewFile

_NAME = re.compile(r"[^\W\d_](?:[\w @+-]*\w)?")  # what git takes as it is; it strips dots and the like at the ends
_EMAIL = re.compile(r"\w(?:[\w.@+-]*\w)?")
_DATE = re.compile(r"\w{3}, \d{1,2} \w{3} \d{4} \d\d:\d\d:\d\d [+-]\d{4}")
_PATH = re.compile(r"[\w./+-]+", re.ASCII)
_REF = "refs/kvtool/exact"  # fast-import needs one while it runs

Entry = tuple[bytes, bytes]  # a commit for fast-import, in two parts: its parent goes between them


@dataclass(frozen=True)
class Written:
    """The commits: that of the new files ("" without any), then one for each mail; head and its tree."""

    commits: tuple[str, ...]
    head: str
    tree: str


def is_plain(mails: Sequence[Mail], paths: Sequence[str]) -> bool:
    """Whether all of these can be written as they are: git itself would clean up or quote none of them."""
    return all(_plain(mail) for mail in mails) and all(_PATH.fullmatch(path) for path in paths)


def _plain(mail: Mail) -> bool:
    named = _NAME.fullmatch(mail.name) and _EMAIL.fullmatch(mail.email) and _DATE.fullmatch(mail.date)
    return bool(named) and "\0" not in mail.message


def are_new(git: Git, base: str, files: Sequence[NewFile]) -> bool:
    """Whether upstream has none of these paths, and no file where one of them needs a folder."""
    if not files:
        return True
    folders = {str(parent) for file in files for parent in PurePosixPath(file.path).parents if str(parent) != "."}
    asked = [*sorted(folders), *(file.path for file in files)]
    lines = "".join(f"{base}:{path}\n" for path in asked)
    kinds = git.run("cat-file", "--batch-check=%(objecttype)", input=lines).stdout.splitlines()
    wrong = [kind for kind in kinds[: len(folders)] if kind == "blob"]
    return not wrong and all(kind.endswith("missing") for kind in kinds[len(folders) :])


def _data(content: bytes) -> bytes:
    return b"data %d\n%s\n" % (len(content), content)


def modify(mode: str, path: str, content: bytes) -> bytes:
    """A file as a commit is to have it; mode as git writes it, "100644"."""
    return f"M {mode} inline {path}\n".encode() + _data(content)


def _person(kind: str, name: str, email: str, when: str) -> bytes:
    return f"{kind} {name} <{email}> {when}\n".encode("utf-8", "surrogateescape")


def commit_of(mail: Mail, changed: Sequence[bytes]) -> Entry:
    """The commit of a mail, with its author and message; changed: its files, from modify()."""
    date = parsedate_to_datetime(mail.date)
    when = f"{int(date.timestamp())} {mail.date[-5:]}"
    author = _person("author", mail.name, mail.email, when)
    return _entry(author, mail.message, changed)


def new_files(files: Sequence[NewFile], subject: str) -> Entry:
    """The commit, by kvtool itself, that adds the files of cpp/."""
    author = _person("author", IDENTITY_NAME, IDENTITY_EMAIL, EPOCH)
    modes = ("100755" if file.executable else "100644" for file in files)
    changed = [modify(mode, f.path, f.source.read_bytes()) for mode, f in zip(modes, files, strict=True)]
    return _entry(author, f"{subject}\n", changed)


def _entry(author: bytes, message: str, changed: Sequence[bytes]) -> Entry:
    committer = _person("committer", IDENTITY_NAME, IDENTITY_EMAIL, EPOCH)
    text = message.encode("utf-8", "surrogateescape")
    return author + committer + _data(text), b"".join(changed)


def write(git: Git, base: str, commits: Sequence[Entry], with_files: bool) -> Written:
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
    return Written((*([] if with_files else [""]), *ids), ids[-1], tree)
