"""Decide for each path of a tree whether its changes are put into a patch or whether it is a file of cpp/."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvtool.gitcmd import Git, folders
from kvtool.series.series import is_ignored_path

_PLAIN = ("100644", "100755")


class Entry(NamedTuple):
    """Hold the state of a path in a git tree. The mode is "" if the tree does not have the path."""

    mode: str
    id: str


ABSENT = Entry("", "")


def read_tree(git: Git, tree: str) -> dict[str, Entry]:
    """Return the entries of a git tree or a commit, by path."""
    found: dict[str, Entry] = {}
    for line in git.entries("ls-tree", "-r", "-z", tree):
        meta, _, path = line.partition("\t")
        mode, _, blob = meta.split()
        found[path] = Entry(mode, blob)
    return found


def patch_paths(theirs: Iterable[str], final: Mapping[str, Entry]) -> frozenset[str]:
    """Return the paths whose changes are put into patches: those of upstream, and new paths that cpp/ cannot hold.

    cpp/ cannot hold links, submodules, and names that kvtool ignores there. It cannot hold a file where upstream has a
    folder, or a file in a folder where upstream has a file.

    theirs: the paths of upstream
    final: the entries of the patched tree
    """
    theirs = frozenset(theirs)
    above = folders(theirs)

    def is_held(path: str, mode: str) -> bool:
        in_the_way = path in above or not theirs.isdisjoint(folders([path]))
        return mode in _PLAIN and not (is_ignored_path(path) or "\n" in path or in_the_way)

    return theirs | {path for path, entry in final.items() if path not in theirs and not is_held(path, entry.mode)}
