"""Which tag is upstream's newest. Asked of the remote where it can be reached, else of the lock."""

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import NetworkError
from kvtool.gitcmd import Git
from kvtool.upstream.lock import Lock

# llama.cpp tags each build with a running number, and some of them again as a version; both go on.
_SCHEMES = (re.compile(r"b(\d+)"), re.compile(r"v(\d+)\.(\d+)(?:\.(\d+))?"))


@dataclass(frozen=True)
class Latest:
    """tag: the newest known; source: the remote's URL, or "upstream.lock"; why: why the remote was not asked."""

    tag: str
    source: str
    why: str = ""


def candidates(tags: Iterable[str]) -> tuple[str, ...]:
    """The highest tag of each of upstream's schemes; tags that follow none are passed over."""
    best: dict[int, tuple[tuple[int, ...], str]] = {}
    for tag in tags:
        for number, scheme in enumerate(_SCHEMES):
            if found := scheme.fullmatch(tag):
                rank = tuple(int(part or 0) for part in found.groups())
                best[number] = max(best.get(number, ((), "")), (rank, tag))
    return tuple(tag for _, (_, tag) in sorted(best.items()))


def find(lock: Lock, remote: str) -> Latest:
    """The newest tag of a remote (URL or path), or the last of the lock when it cannot be asked or has none."""
    known = list(lock.upstreams)[-1]
    try:
        with tempfile.TemporaryDirectory(prefix="kvtool-") as name:
            return Latest(_newest(Git.create(Path(name)), remote), remote)
    except NetworkError as err:
        return Latest(known, "upstream.lock", err.why)


def _newest(git: Git, remote: str) -> str:
    where = str(Path(remote).expanduser().absolute()) if Path(remote).expanduser().exists() else remote
    done = git.run("ls-remote", "--tags", "--refs", where, check=False)
    if done.returncode != 0:
        raise NetworkError("the remote cannot be asked", why=(done.stderr.strip().splitlines() or [remote])[0])
    found = candidates(line.partition("refs/tags/")[2] for line in done.stdout.splitlines())
    if not found:
        raise NetworkError("the remote has no tag", why=f"{remote} has no tag b<number> or v<version>")
    if len(found) == 1:
        return found[0]
    # Names do not say whether b11063 is older than v0.5.0, dates do; commits alone are a few hundred bytes.
    refs = [f"+refs/tags/{tag}:refs/tags/{tag}" for tag in found]
    done = git.run("fetch", "--quiet", "--depth=1", "--filter=tree:0", "--no-tags", where, *refs, check=False)
    if done.returncode != 0:
        raise NetworkError("the remote cannot be asked", why=(done.stderr.strip().splitlines() or [remote])[-1])
    return max(found, key=lambda tag: int(git.line("log", "-1", "--format=%ct", tag)))
