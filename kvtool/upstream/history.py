"""Find the upstream commit that caused a conflict, if the user has a clone with the history of llama.cpp."""

import os
from dataclasses import dataclass
from typing import Self

from kvtool.gitcmd import Git
from kvtool.project import expanded
from kvtool.upstream.lock import Upstream

_LONGEST = 10_000  # bytes that are safe as an argument of a process
NONE = "not known: this copy of upstream has no history between the two tags"


@dataclass(frozen=True)
class History:
    """A repository that has both tags, one an ancestor of the other."""

    git: Git
    span: str  # revision range between the two tags

    @classmethod
    def open(cls, mirror: str | None, old: Upstream, new: Upstream) -> Self | None:
        """Return None unless the mirror (or KVTOOL_UPSTREAM) is a local repository with both tags as in the lock."""
        mirror = mirror or os.environ.get("KVTOOL_UPSTREAM")
        place = expanded(mirror) if mirror else None
        if place is None or not place.is_dir():
            return None
        git, ends = Git(place), [f"refs/tags/{upstream.tag}" for upstream in (old, new)]
        if [git.resolve(f"{end}^{{tree}}") for end in ends] != [old.tree, new.tree] or old.tag == new.tag:
            return None
        ways = (ends, ends[::-1])
        return next((cls(git, "..".join(way)) for way in ways if git.ok("merge-base", "--is-ancestor", *way)), None)

    def blame(self, path: str, lines: tuple[str, ...]) -> str:
        """Return the newest commit that removed or added the first of these lines that has one, or ""."""
        for line in filter(None, map(str.strip, lines)):
            if len(line) > _LONGEST:
                continue
            said = self.git.run("log", "-1", "--format=%h %s", f"-S{line}", self.span, "--", path, check=False)
            if found := said.stdout.strip():
                return found
        return ""
