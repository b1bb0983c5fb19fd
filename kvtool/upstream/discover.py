"""Fetch a tag that patches/upstream.lock does not know, and take the tree it has for its identity."""

import os

from kvtool.console import Console
from kvtool.errors import UsageError
from kvtool.gitcmd import Git
from kvtool.upstream import sources
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock, Upstream, usable_tag
from kvtool.upstream.pin import with_upstream
from kvtool.upstream.sources import Fetched


def ensure(cache: Cache, lock: Lock, tag: str, console: Console, mirror: str | None) -> tuple[Lock, Fetched]:
    """Have a tag in the cache, and a lock that knows it: the one given, or one with an entry more (nothing is written).

    An unknown tag comes from the mirror (or KVTOOL_UPSTREAM, or the lock's remote), which must have it by that name; no
    history is needed. Raises as sources.ensure does.
    """
    if known := lock.upstreams.get(tag):
        return lock, sources.ensure(cache, lock, known, console, mirror)
    url = mirror or os.environ.get("KVTOOL_UPSTREAM") or lock.remote
    if not usable_tag(tag):
        raise UsageError(f"{tag!r} is not a usable tag name")
    if not url:
        raise UsageError(
            f"unknown upstream tag {tag!r}",
            why="patches/upstream.lock has no entry for it and names no remote",
            next_step=f"name a git repository that has it: --mirror PATH; known are {', '.join(lock.upstreams)}",
        )
    with cache.locked(console) as scratch:
        repo = Git.create(scratch / "repo.git")
        with console.progress(f"fetching llama.cpp {tag}: {url}") as bar:
            wanted = Upstream(tag, "", "")
            tree = sources.from_git(repo, url, wanted, bar, is_mirror=True)
        date = repo.line("log", "-1", "--format=%cs", "FETCH_HEAD")
        grown = with_upstream(lock, tag, tree, date)
        commit = cache.adopt(repo, tree, grown.upstream(tag), scratch)
        return grown, Fetched(grown.upstream(tag), commit, url)
