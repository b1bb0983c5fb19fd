"""Find the commit of upstream that caused a conflict, if the user has a clone with the history of llama.cpp."""

import os
from dataclasses import dataclass
from typing import Self

from kvtool.gitcmd import Git
from kvtool.project import expanded
from kvtool.upstream.lock import Upstream

_LONGEST = 10_000  # a longer argument may be too long for the command line of a process
NONE = "not known: this copy of upstream has no history between the two tags"


@dataclass(frozen=True)
class History:
    """Search the commits between two upstream tags, in a repository with both tags and the history between them.

    One tag must be an ancestor of the other tag.
    """

    git: Git
    span: str  # the commits between the two tags, as git writes it

    @classmethod
    def open(cls, mirror: str | None, old: Upstream, new: Upstream) -> Self | None:
        """Open the mirror's history. Return None if the mirror is not a local repository with both tags.

        Both tags must have the git trees that the lock names, and one tag must be an ancestor of the other one.

        mirror: the path of the repository; None for the path in the environment variable KVTOOL_UPSTREAM
        """
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
        """Return the newest commit that added or removed the first of the lines for which there is such a commit.

        The other lines are then not searched for. Lines longer than _LONGEST are left out. Returns "" if no commit
        added or removed any of the lines.
        """
        for line in filter(None, map(str.strip, lines)):
            if len(line) > _LONGEST:
                continue
            said = self.git.run("log", "-1", "--format=%h %s", f"-S{line}", self.span, "--", path, check=False)
            if found := said.stdout.strip():
                return found
        return ""
