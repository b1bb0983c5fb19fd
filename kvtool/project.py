"""Find the project (patches/ and cpp/), the patched tree, and the user's cache."""

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs

from kvtool.errors import UsageError

LLAMA_CPP = "llama.cpp"  # the only upstream that build, verify and bench support
_PACKAGE = Path(__file__).resolve().parent
# The folder, in a patched tree and in cpp/, of the program that proves the dynamic cache. A series about something else
# does not have it.
PROOF = PurePosixPath("tools/kv-check")
# the series in an installed wheel; with an editable install, the series is next to the package
PACKAGED = _PACKAGE / "_data"


@dataclass(frozen=True)
class Project:
    """Hold the absolute paths of a project. The tree and the cache need not exist yet."""

    root: Path
    tree: Path
    cache: Path
    name: str = LLAMA_CPP  # name of the upstream project

    @property
    def patches(self) -> Path:
        """Return the folder of the patch files."""
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
        """Raise UsageError if a command supports only llama.cpp, and the project has another upstream."""
        if self.name != LLAMA_CPP:
            raise UsageError(
                f"kvtool {command} supports only llama.cpp",
                why=f"the upstream of this project is {self.name}",
                next_step=f"use {self.name}'s own tools in {self.tree}",
            )

    def refuse_packaged(self) -> None:
        """Raise UsageError if patches/ and cpp/ are a part of an installed kvtool, where they must not be changed."""
        if self.root == PACKAGED:
            raise UsageError(
                "the series that came with kvtool cannot be changed",
                why=f"it is part of the installation ({self.root}), and an update would undo it",
                next_step="make a project of your own, and work there: kvtool init DIR",
            )


def expanded(path: str | Path) -> Path:
    """Return a path in which ~ is replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as err:  # the user does not exist, or there is no HOME
        raise UsageError(f"there is no {path}", why=str(err)) from err


def place_of(url: str) -> str:
    """Return the place of a repository in a form that git accepts in any folder.

    A URL is returned unchanged. A path is made absolute, and links in it are resolved.
    """
    return str(expanded(url).resolve()) if expanded(url).exists() else url


def _named(variable: str, given: Path | None = None) -> Path | None:
    """Return the given path or, if it is None, the path in an environment variable."""
    place = given or os.environ.get(variable)
    return expanded(place).absolute() if place else None


def user_cache() -> Path:
    """Return KVTOOL_CACHE or, without it, the folder for caches of this user on this system."""
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
    """Find the project and return it.

    These places are tried in order: --project, KVTOOL_PROJECT, the nearest folder above the current one, kvtool's own
    checkout, and the series that was installed with kvtool. Raises UsageError if there is none. Links in the path of
    the tree are resolved, so that one tree has only one name. The tree of the installed series is ./llama.cpp, because
    the installation cannot contain a tree.

    start: the value of --project, None without it
    tree: the value of --tree. None means KVTOOL_TREE or, without it, a folder in the project with the name of
        the upstream.
    """
    root = _root(start)
    name = _name_of(root)
    checkout = _named("KVTOOL_TREE", tree) or (Path.cwd() if root == PACKAGED else root) / name
    return Project(root, checkout.resolve(), user_cache(), name)


def _name_of(root: Path) -> str:
    """Return the name of a project's upstream.

    An error in the lock is ignored here, because other functions report it.
    """
    try:
        name = tomllib.loads(read_text(root / "patches/upstream.lock")).get("name", LLAMA_CPP)
    except (UsageError, tomllib.TOMLDecodeError):
        return LLAMA_CPP
    return name if isinstance(name, str) and re.fullmatch(r"\w[\w.+-]*", name) else LLAMA_CPP


def read_text(path: Path) -> str:
    """Return the text of a file of the project. A byte order mark, which editors on Windows write, is removed.

    Raises UsageError if the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"cannot read {path}", why=str(err)) from err
