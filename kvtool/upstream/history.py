"""Which upstream commit is behind a conflict, where somebody has llama.cpp's history."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvtool.gitcmd import Git
from kvtool.upstream.lock import Upstream

NONE = "not known: this copy of upstream has no history between the two tags"


@dataclass(frozen=True)
class History:
    """A repository (a mirror with history) that has both tags, one an ancestor of the other."""

    git: Git
    old: str
    new: str

    @classmethod
    def between(cls, mirror: str | None, old: Upstream, new: Upstream) -> Self | None:
        """None when the mirror (or KVTOOL_UPSTREAM) is not a local repository that has both, as the lock pins them."""
        mirror = mirror or os.environ.get("KVTOOL_UPSTREAM")
        place = Path(mirror).expanduser() if mirror else None
        if place is None or not place.is_dir():
            return None
        git = Git(place)
        if not git.ok("rev-parse", "--git-dir"):
            return None
        commits = [git.resolve(f"refs/tags/{upstream.tag}^{{commit}}") for upstream in (old, new)]
        trees = [git.resolve(f"{commit}^{{tree}}") if commit else None for commit in commits]
        if None in commits or trees != [old.tree, new.tree] or commits[0] == commits[1]:
            return None
        first, last = (str(commit) for commit in commits)
        if git.ok("merge-base", "--is-ancestor", first, last):
            return cls(git, first, last)
        return cls(git, last, first) if git.ok("merge-base", "--is-ancestor", last, first) else None

    def behind(self, path: str, lines: tuple[str, ...]) -> str:
        """The newest commit that took away (or brought back) the first of these lines of a file, "" when none did."""
        for line in (line for line in lines if line.strip()):
            found = self.git.run(
                "log", "-1", "--format=%h %s", f"-S{line.strip()}", f"{self.old}..{self.new}", "--", path, check=False
            ).stdout.strip()
            if found:
                return found
        return ""
