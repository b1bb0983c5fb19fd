"""A throw-away git repository that sees other repositories' objects: what is built in it leaves no trace in them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool.gitcmd import Git


@dataclass(frozen=True)
class Borrowed:
    """git: the repository, bare; scratch: a directory beside it that goes with it."""

    git: Git
    scratch: Path

    def place(self, name: str) -> Path:
        """A fresh directory in scratch."""
        folder = self.scratch / name
        folder.mkdir(parents=True)
        return folder


@contextlib.contextmanager
def borrowing(*repositories: Path) -> Iterator[Borrowed]:
    """Yield a repository over the objects of all of these (work trees or bare); nothing is copied, nothing is kept.

    One that does not exist yet is taken to become a bare one: git looks again in each call.
    """
    with tempfile.TemporaryDirectory(prefix="kvtool-") as name:
        place = Path(name).resolve() / "repo.git"
        place.mkdir()
        git = Git(place)
        git.run("init", "--quiet", "--bare", ".")
        objects, shallow = [], set[str]()
        for repository in repositories:
            if not repository.exists():
                objects.append(repository / "objects")
                continue
            there = Git(repository)
            objects.append(_path(there, "objects"))
            cut = _path(there, "shallow")
            if cut.is_file():  # where its history ends; without it git would look for parents that nobody has
                shallow |= set(cut.read_text("ascii").split())
        (place / "objects/info/alternates").write_text("".join(f"{path}\n" for path in objects), encoding="utf-8")
        if shallow:
            (place / "shallow").write_text("".join(f"{commit}\n" for commit in sorted(shallow)), encoding="ascii")
        scratch = place.parent / "scratch"
        scratch.mkdir()
        yield Borrowed(git, scratch)


def _path(git: Git, name: str) -> Path:
    """A path inside a repository's git directory, absolute."""
    return (git.repo / git.line("rev-parse", "--git-path", name)).resolve()
