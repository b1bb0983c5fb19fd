"""Pin another upstream: a new entry of patches/upstream.lock at its place in the order, a new `current`. Pure.

The lock is oldest first, and from/until in series.toml compare by that order. A new entry goes by its date, except that
the numbers of b<number> tags are never put out of order: a mirror without history may date a tag anyhow.
"""

import re
from dataclasses import replace

import tomlkit

from kvtool.upstream.lock import Lock, Upstream

_BUILD = re.compile(r"b(\d+)")
_ENTRY = re.compile(r"^(?:#[^\n]*\n)*\[\[upstream\]\]", re.MULTILINE)  # comments right above belong to it


def place_of(lock: Lock, tag: str, date: str) -> int:
    """Where in the order an unknown tag goes."""
    known = list(lock.upstreams.values())
    first, last = 0, len(known)
    if mine := _BUILD.fullmatch(tag):
        for number, entry in enumerate(known):
            if theirs := _BUILD.fullmatch(entry.tag):
                if int(theirs[1]) < int(mine[1]):
                    first = number + 1
                else:
                    last = min(last, number)
    by_date = sum(entry.date <= date for entry in known)
    return max(first, min(by_date, last))


def with_upstream(lock: Lock, tag: str, tree: str, date: str) -> Lock:
    """The lock with one more upstream, of which no package is known."""
    entries = list(lock.upstreams.values())
    entries.insert(place_of(lock, tag, date), Upstream(tag, tree, date))
    return replace(lock, upstreams={e.tag: replace(e, order=number) for number, e in enumerate(entries)})


def pin(text: str, lock: Lock, tag: str) -> str:
    """The text of a lock with `tag` of `lock` as the current one, and an entry for it if it has none.

    Every other line stays as it is.
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
