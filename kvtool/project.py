"""Where things are: the project (patches/ and cpp/), the patched tree, the user-wide cache."""

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs

from kvtool.errors import UsageError

LLAMA_CPP = "llama.cpp"  # the upstream that build, verify and bench support
_PACKAGE = Path(__file__).resolve().parent
# The folder of a patched tree, and of cpp/, with the program that proves the dynamic cache. Other series have none.
PROOF = PurePosixPath("tools/kv-check")
PACKAGED = _PACKAGE / "_data"  # the series of an installed wheel; an editable install has it next to the package


@dataclass(frozen=True)
class Project:
    """All paths are absolute. tree and cache need not exist yet."""

    root: Path
    tree: Path
    cache: Path
    name: str = LLAMA_CPP  # the upstream project

    @property
    def patches(self) -> Path:
        """Return the folder of the patches."""
        return self.root / "patches"

    @property
    def cpp(self) -> Path:
        """Return the folder of the new files."""
        return self.root / "cpp"

    @property
    def series(self) -> Path:
        """Return the path of series.toml."""
        return self.patches / "series.toml"

    @property
    def lock(self) -> Path:
        """Return the path of upstream.lock."""
        return self.patches / "upstream.lock"

    def require_llama_cpp(self, command: str) -> None:
        """Raise UsageError for a command that knows no upstream but llama.cpp."""
        if self.name != LLAMA_CPP:
            raise UsageError(
                f"kvtool {command} supports only llama.cpp",
                why=f"the upstream of this project is {self.name}",
                next_step=f"use {self.name}'s own tools in {self.tree}",
            )

    def refuse_packaged(self) -> None:
        """Raise UsageError for a change of patches/ and cpp/ that are part of an installation."""
        if self.root == PACKAGED:
            raise UsageError(
                "the series that came with kvtool cannot be changed",
                why=f"it is part of the installation ({self.root}), and an update would undo it",
                next_step="make a project of your own, and work there: kvtool init DIR",
            )


def expanded(path: str | Path) -> Path:
    """Return a path with its ~ resolved."""
    try:
        return Path(path).expanduser()
    except RuntimeError as err:  # no such user, no HOME
        raise UsageError(f"there is no {path}", why=str(err)) from err


def place_of(url: str) -> str:
    """Return a repository as git accepts it from any folder: a URL unchanged, an absolute path with links resolved."""
    return str(expanded(url).resolve()) if expanded(url).exists() else url


def _named(variable: str, given: Path | None = None) -> Path | None:
    """Return a given path, or the path in an environment variable."""
    place = given or os.environ.get(variable)
    return expanded(place).absolute() if place else None


def user_cache() -> Path:
    """KVTOOL_CACHE, or the cache directory of this user on this system."""
    return _named("KVTOOL_CACHE") or platformdirs.user_cache_path("kvtool", appauthor=False)


def _is_project(path: Path) -> bool:
    return (path / "patches" / "series.toml").is_file()


def _root(start: Path | None) -> Path:
    if root := _named("KVTOOL_PROJECT", start):
        if not _is_project(root):
            raise UsageError(
                f"{root} is not a kvtool project",
                why="it has no patches/series.toml",
                next_step="name the directory that has one with --project DIR or KVTOOL_PROJECT",
            )
        return root
    here = Path.cwd()
    for place in (here, *here.parents, _PACKAGE.parent, PACKAGED):
        if _is_project(place):
            return place
    raise UsageError(
        "no kvtool project found",
        why=f"there is no patches/series.toml in {here} or above, and this kvtool contains none",
        next_step="run kvtool inside a checkout, or name one with --project DIR or KVTOOL_PROJECT",
    )


def find_project(start: Path | None = None, tree: Path | None = None) -> Project:
    """Find the project: --project, KVTOOL_PROJECT, upward from here, kvtool's own checkout, packaged data.

    start: --project, or None
    tree: --tree, or None for KVTOOL_TREE, then `<root>/llama.cpp`. Links are resolved, so one tree has one name.
    Packaged data cannot contain a tree, so its tree is ./llama.cpp. Raises UsageError without a project.
    """
    root = _root(start)
    name = _name_of(root)
    checkout = _named("KVTOOL_TREE", tree) or (Path.cwd() if root == PACKAGED else root) / name
    return Project(root, checkout.resolve(), user_cache(), name)


def _name_of(root: Path) -> str:
    """Return the name of a project's upstream. Commands that read the lock report its errors."""
    try:
        name = tomllib.loads(read_text(root / "patches/upstream.lock")).get("name", LLAMA_CPP)
    except (UsageError, tomllib.TOMLDecodeError):
        return LLAMA_CPP
    return name if isinstance(name, str) and re.fullmatch(r"\w[\w.+-]*", name) else LLAMA_CPP


def read_text(path: Path) -> str:
    """Return the text of a project file, without the byte order mark of Windows' editors.

    Raises UsageError if the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"cannot read {path}", why=str(err)) from err
