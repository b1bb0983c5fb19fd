"""Read the groups of series.toml: their ids, their dependencies, and the files of cpp/ that belong to them.

A group is a part of the series; the glossary calls a group a layer. A tree can be made with only some groups. Such a
tree has the patches and the files of these groups, and of all groups that these groups depend on.
"""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtool.errors import UsageError
from kvtool.upstream.lock import read_tables

GROUP_ID = re.compile(r"[a-z0-9][a-z0-9-]*")
_KEYS = {"id", "depends", "files"}


@dataclass(frozen=True)
class Group:
    """Hold one [[group]] table of series.toml."""

    id: str
    # Ids of the groups that this group needs, in any order; empty for a group that works alone.
    depends: tuple[str, ...] = ()
    # Patterns of paths in cpp/. `*` matches any characters, including slashes.
    files: tuple[str, ...] = ()

    def has_file(self, path: str) -> bool:
        """Return whether a file of cpp/ belongs to this group. The path must have slashes."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.files)


def group_problems(table: Any) -> Iterator[UsageError]:
    """Yield each mistake of one [[group]] table, without looking at other tables.

    A table without mistakes can become a Group.
    """
    if not isinstance(table, dict):
        yield UsageError("not a table")
        return
    for key in sorted(set(table) - _KEYS):
        yield UsageError(f"unknown key {key!r}", next_step=f"known are {', '.join(sorted(_KEYS))}")
    name = table.get("id", "")
    if not isinstance(name, str) or not GROUP_ID.fullmatch(name):
        yield UsageError("id must be lower-case letters, digits and dashes", why=f"it is {name!r}")
    for key in ("depends", "files"):
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            yield UsageError(f"{key} must be a list of strings", why=f"it is {value!r}")


def parse_groups(text: str, where: str = "series.toml") -> tuple[Group, ...]:
    """Parse the [[group]] tables in their order.

    Raises UsageError for the first wrong table. The error names the table and the mistake.
    """
    _, tables = read_tables(text, "group", where)
    groups: list[Group] = []
    for number, table in enumerate(tables, 1):
        for problem in group_problems(table):
            problem.what = f"{where}: [[group]] {number}: {problem.what}"
            raise problem
        groups.append(Group(table["id"], tuple(table.get("depends", [])), tuple(table.get("files", []))))
    names = [group.id for group in groups]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{where}: two groups have the id {double!r}")
    for number, group in enumerate(groups):
        # if each group depends only on earlier groups, there can be no circle
        if wrong := [name for name in group.depends if name not in names[:number]]:
            raise UsageError(
                f"{where}: group {group.id!r} depends on {wrong[0]!r}, which is not an earlier group",
                next_step="list a group after the groups that it depends on",
            )
    return tuple(groups)


def close_groups(groups: Sequence[Group], named: Sequence[str]) -> tuple[str, ...]:
    """Return the named groups and all groups that they depend on, in the order of series.toml.

    An empty tuple means the whole series. It is returned if no group or every group is named. Raises UsageError
    for an unknown name.
    """
    by_id = {group.id: group for group in groups}
    if unknown := [name for name in named if name not in by_id]:
        known = f"name one of: {', '.join(by_id)}" if by_id else "leave out --group: series.toml has no [[group]]"
        raise UsageError(f"there is no group {unknown[0]!r}", next_step=known)
    wanted = set(named)
    for group in reversed(groups):  # a group depends only on earlier groups, so one pass from the end finds all of them
        if group.id in wanted:
            wanted.update(group.depends)
    return () if len(wanted) == len(groups) else tuple(group.id for group in groups if group.id in wanted)


def owners_of(groups: Sequence[Group], path: str) -> tuple[str, ...]:
    """Return the groups that a file of cpp/ belongs to. There should be exactly one; lint reports other numbers."""
    return tuple(group.id for group in groups if group.has_file(path))


def last_of(groups: Sequence[Group], chosen: Sequence[str]) -> str:
    """Return the chosen group on which no other chosen group depends; "" if there are several such groups."""
    needed = {name for group in groups if group.id in chosen for name in group.depends}
    tops = [name for name in chosen if name not in needed]
    return tops[0] if len(tops) == 1 else ""
