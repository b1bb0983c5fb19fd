"""Parse and edit patches/upstream.lock: the known upstream tags, the ids of their trees, and where to download them.

    name = "llama.cpp"                     # upstream's name, also that of the folder of the patched tree; the default
    current = "v0.5.0"                     # the tag that `kvtool fetch` and `kvtool apply` use by default
    remote = "https://github.com/ggml-org/llama.cpp"

    [[upstream]]                           # oldest first: from/until in series.toml refer to this order
    tag = "v0.5.0"
    date = "2026-09-28"
    tree = "<git tree id, 40 hex>"         # the same for every source, so it proves that a download is right
    sources = [{ kind = "npm", name = "...", version = "...", path = "...", integrity = "sha512-..." }]

`kind` is npm or sdist. For npm, `path` is a git bundle in the package, and the commit HEAD of the bundle has the tree.
For sdist, `path` is a folder in the source archive. `integrity` is the digest of the archive, sha512-<base64> or
sha256-<hex>. It is optional, because the tree id is checked in any case.

A new entry is inserted by its date. But tags b<number> always stay in the order of their numbers, because a mirror
without history may give a tag a wrong date.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit

from kvtool.errors import UsageError
from kvtool.project import read_text
from kvtool.result import from_plain

SOURCE_KINDS = ("npm", "sdist")
_TREE = re.compile(r"[0-9a-f]{40}")
_BUILD = re.compile(r"b(\d+)")
_ENTRY = re.compile(r"^(?:#[^\n]*\n)*\[\[upstream\]\]", re.MULTILINE)  # comments directly above an entry belong to it
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Source:
    """Describe an archive in a package registry. Such an archive never changes.

    kind: one of SOURCE_KINDS
    integrity: the digest of the archive, "" if it was not recorded
    size: the bytes of the archive, for the progress bar; 0 if it was not recorded
    """

    kind: str
    name: str
    version: str
    path: str
    integrity: str = ""
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} package {self.name} {self.version}"


@dataclass(frozen=True)
class Upstream:
    """Describe one upstream tag of the lock.

    tree: the id of its git tree (40 hex digits)
    date: its date, as YYYY-MM-DD
    order: its position in the lock, in which the oldest tag is the first
    """

    tag: str
    tree: str
    date: str
    sources: tuple[Source, ...] = ()
    order: int = 0
    name: str = "llama.cpp"

    @property
    def label(self) -> str:
        """Return the name of upstream and the tag, for messages."""
        return f"{self.name} {self.tag}"


@dataclass(frozen=True)
class Lock:
    """Hold the whole upstream.lock.

    current: the tag that is used if the user names none
    remote: the URL of a git repository that has every tag
    upstreams: the entries by tag, the oldest first
    """

    current: str
    remote: str
    upstreams: Mapping[str, Upstream]
    name: str = "llama.cpp"  # name of the upstream project

    def upstream(self, tag: str | None = None) -> Upstream:
        """Return the entry of a tag; None means the current tag.

        Raise UsageError, which lists the known tags, if the lock does not have the tag.
        """
        wanted = self.current if tag is None else tag
        if not wanted:
            raise UsageError(
                f"no state of {self.name} is chosen yet",
                why="patches/upstream.lock has no entry",
                next_step="choose the tag that the series begins with: kvtool rebase TAG",
            )
        if wanted not in self.upstreams:
            raise UsageError(
                f"unknown upstream tag {wanted!r}",
                why="patches/upstream.lock has no entry for it",
                next_step=f"move the series to it: kvtool rebase {wanted}; or name one of: {', '.join(self.upstreams)}",
            )
        return self.upstreams[wanted]


def usable_tag(tag: str) -> bool:
    """Return True if the tag can be used in a lock, a git ref and the name of a file."""
    return bool(_TAG.fullmatch(tag)) and ".." not in tag and not tag.endswith((".", ".lock"))


def is_usable_name(name: str) -> bool:
    """Return whether the name of an upstream project can be the name of a folder in the project."""
    return bool(_TAG.fullmatch(name)) and name not in ("patches", "cpp", "Makefile", "README.md")


def _upstream(table: Any, order: int, where: str) -> Upstream:
    try:
        entry = replace(from_plain(Upstream, table), order=order)
    except (KeyError, TypeError) as err:
        why = f"it has no {err}" if isinstance(err, KeyError) else str(err)
        raise UsageError(f"{where}: [[upstream]] {order + 1} cannot be read", why=why) from err
    here = f"{where}: {entry.tag}"
    if not usable_tag(entry.tag):
        raise UsageError(f"{here}: not a usable tag name")
    if not _TREE.fullmatch(entry.tree):
        raise UsageError(f"{here}: tree must be 40 hex digits", why=f"it is {entry.tree!r}")
    for source in entry.sources:
        if source.kind not in SOURCE_KINDS:
            why = f"known are {', '.join(SOURCE_KINDS)}"
            raise UsageError(f"{here}: unknown source kind {source.kind!r}", why=why)
    return entry


def read_tables(text: str, key: str, where: str) -> tuple[dict[str, Any], list[Any]]:
    """Return a TOML document and its [[key]] tables. The content of the tables is not checked.

    Raises UsageError if the text is not TOML, or if `key` is not an array of tables.
    """
    try:
        doc = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise UsageError(f"{where} is not valid TOML", why=str(err)) from err
    entries = doc.get(key, [])
    if not isinstance(entries, list):
        raise UsageError(f"{where}: {key} must be [[{key}]] tables")
    return doc, entries


def parse_lock(text: str, where: str = "upstream.lock") -> Lock:
    """Parse and check a lock. Raise UsageError with the wrong entry and the reason."""
    doc, entries = read_tables(text, "upstream", where)
    upstreams: dict[str, Upstream] = {}
    name = doc.get("name", "llama.cpp")
    if not isinstance(name, str) or not is_usable_name(name):
        raise UsageError(f"{where}: name must be a folder's name", why=f"it is {name!r}")
    for order, table in enumerate(entries):
        entry = replace(_upstream(table, order, where), name=name)
        if entry.tag in upstreams:
            raise UsageError(f"{where}: {entry.tag} is listed twice")
        upstreams[entry.tag] = entry
    current, remote = doc.get("current"), doc.get("remote", "")
    if not isinstance(current, str) or (current not in upstreams and (current or upstreams)):
        raise UsageError(f"{where}: current = {current!r} has no [[upstream]] entry")
    if not isinstance(remote, str):
        raise UsageError(f"{where}: remote must be a string", why=f"it is {remote!r}")
    return Lock(current, remote, upstreams, name)


def load_lock(path: Path) -> Lock:
    """Read and check upstream.lock."""
    return parse_lock(read_text(path), str(path))


# --- a lock with another upstream --------------------------------------------------------------------------------


def place_of(lock: Lock, tag: str, date: str) -> int:
    """Return the position at which an unknown tag must be inserted."""
    known = list(lock.upstreams.values())
    first, last = 0, len(known)
    if mine := _BUILD.fullmatch(tag):
        numbers = {at: int(found[1]) for at, entry in enumerate(known) if (found := _BUILD.fullmatch(entry.tag))}
        first = max((at + 1 for at, number in numbers.items() if number < int(mine[1])), default=first)
        last = min((at for at, number in numbers.items() if number >= int(mine[1])), default=last)
    by_date = sum(entry.date <= date for entry in known)
    return max(first, min(by_date, last))


def with_upstream(lock: Lock, tag: str, tree: str, date: str) -> Lock:
    """Return the lock with an additional upstream. The new entry names no package to download it from."""
    entries = list(lock.upstreams.values())
    entries.insert(place_of(lock, tag, date), Upstream(tag, tree, date, name=lock.name))
    return replace(lock, upstreams={e.tag: replace(e, order=number) for number, e in enumerate(entries)})


def pin(text: str, lock: Lock, tag: str) -> str:
    """Return the text of a lock with `tag` as the current tag, and with an entry for this tag.

    All other lines stay the same.
    """
    document = tomlkit.parse(text)
    document["current"] = tag
    known = [str(entry["tag"]) for entry in document.get("upstream", [])]
    fresh = tomlkit.dumps(document)
    if tag in known:
        return fresh
    new = lock.upstream(tag)
    entry = f'[[upstream]]\ntag = "{new.tag}"\ndate = "{new.date}"\ntree = "{new.tree}"\nsources = []\n'
    starts = [found.start() for found in _ENTRY.finditer(fresh)]
    if new.order >= len(starts):
        return f"{fresh.rstrip()}\n\n{entry}"
    at = starts[new.order]
    return f"{fresh[:at]}{entry}\n{fresh[at:]}"
