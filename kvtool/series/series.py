"""Read patches/series.toml and cpp/, and edit the text of series.toml. Git is not run.

Every file in cpp/ becomes the file with the same path in llama.cpp. Exceptions are cpp/README.md, and names that start
with a dot or end with a tilde.
"""

import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import UsageError
from kvtool.project import Project, read_text
from kvtool.series.groups import Group, close_groups, parse_groups
from kvtool.series.patchfile import Mail, find_wrong_count, parse_diff, parse_mail
from kvtool.upstream.lock import Lock, Upstream, read_tables

UPSTREAM_STATUS = ("local", "submitted", "merged", "rejected")
_ID = re.compile(r"[a-z0-9][a-z0-9-]*")
_KEYS = {"id", "file", "group", "why", "upstream", "from", "until", "tests"}


@dataclass(frozen=True)
class Patch:
    """Hold one entry of series.toml."""

    id: str
    file: str  # name of the file in patches/
    why: str
    status: str = "local"
    pr: str = ""
    since: str = ""  # first tag that needs the patch, "" for no limit
    until: str = ""  # first tag that no longer needs the patch, "" for no limit
    tests: tuple[str, ...] = ()
    group: str = ""  # id of the [[group]] that the patch belongs to, "" for none

    def wanted(self, lock: Lock, upstream: Upstream) -> bool:
        """Return True if from/until include this upstream. The tags are in the order of upstream.lock."""
        after = not self.since or lock.upstream(self.since).order <= upstream.order
        return after and (not self.until or upstream.order < lock.upstream(self.until).order)


@dataclass(frozen=True)
class NewFile:
    """Describe a file of cpp/."""

    path: str  # path in llama.cpp, with slashes
    source: Path  # path in the project
    executable: bool


@dataclass(frozen=True)
class LoadedPatch:
    """Hold a patch of the series and its parsed patch file."""

    patch: Patch
    mail: Mail
    wanted: bool  # False if from/until leave the patch out on the upstream


@dataclass(frozen=True)
class Series:
    """Hold all files and patches of a series for one upstream."""

    upstream: Upstream
    files: tuple[NewFile, ...]
    patches: tuple[LoadedPatch, ...]
    digest: str  # hash of everything that affects the resulting commits
    groups: tuple[str, ...] = ()  # groups of the patches and files; empty for the whole series
    known_groups: tuple[Group, ...] = ()  # every group of series.toml


def entry_problems(table: Any) -> Iterator[tuple[str, UsageError]]:
    """Yield each error in a [[patch]] table, with the key that the error is about.

    patch_of() accepts a table without errors.
    """
    if not isinstance(table, dict):
        yield "", UsageError("not a table")
        return
    for key in sorted(set(table) - _KEYS):
        yield key, UsageError(f"unknown key {key!r}", next_step=f"known are {', '.join(sorted(_KEYS))}")
    fields = {key: table.get(key, "") for key in ("id", "file", "group", "why", "from", "until")}
    wrong = {key for key, value in fields.items() if not isinstance(value, str)}
    for key in sorted(wrong):
        yield key, UsageError(f"{key} must be a string", why=f"it is {fields[key]!r}")
    if "id" not in wrong and not _ID.fullmatch(fields["id"]):
        yield "id", UsageError("id must be lower-case letters, digits and dashes", why=f"it is {fields['id']!r}")
    file = fields["file"]
    if "file" not in wrong and file and ("/" in file or "\\" in file or not file.endswith(".patch")):
        yield "file", UsageError("file must be a name in patches/ that ends in .patch", why=f"it is {file!r}")
    if "why" not in wrong and not fields["why"].strip():
        yield "why", UsageError("why is empty", next_step="describe in one sentence the failure without this patch")
    upstream = table.get("upstream", {})
    if not isinstance(upstream, dict) or upstream.get("status", "local") not in UPSTREAM_STATUS:
        yield "upstream", UsageError(f"upstream.status must be one of {', '.join(UPSTREAM_STATUS)}")
    tests = table.get("tests", [])
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        yield "tests", UsageError("tests must be a list of strings", why=f"it is {tests!r}")


def patch_of(table: dict[str, Any]) -> Patch:
    """Convert a [[patch]] table without errors into a Patch."""
    upstream = table.get("upstream", {})
    return Patch(
        id=table["id"],
        file=table.get("file") or f"{table['id']}.patch",
        why=table["why"],
        status=upstream.get("status", "local"),
        pr=str(upstream.get("pr", "")),
        since=table.get("from", ""),
        until=table.get("until", ""),
        tests=tuple(table.get("tests", [])),
        group=table.get("group", ""),
    )


def parse_series(text: str, where: str = "series.toml") -> tuple[Patch, ...]:
    """Parse and check series.toml. Raise UsageError with the wrong entry and the reason."""
    _, entries = read_tables(text, "patch", where)
    for number, table in enumerate(entries, 1):
        for key, problem in entry_problems(table):
            named = isinstance(table, dict) and key != "id" and isinstance(table.get("id"), str) and table["id"]
            problem.what = f"{where}: {named or f'[[patch]] {number}'}: {problem.what}"
            raise problem
    patches = tuple(map(patch_of, entries))
    for key in ("id", "file"):
        names = [getattr(p, key) for p in patches]
        if double := next((n for n in names if names.count(n) > 1), None):
            raise UsageError(f"{where}: two patches have the {key} {double!r}")
    return patches


def load_patches(project: Project) -> tuple[Patch, ...]:
    """Return the patches of series.toml."""
    return parse_series(read_text(project.series), str(project.series))


def load_groups(project: Project) -> tuple[Group, ...]:
    """Return the groups of series.toml; nothing if it has no [[group]] table."""
    return parse_groups(read_text(project.series), str(project.series))


def goal_lines(text: str, where: str = "series.toml") -> int:
    """Return `goal_lines` of series.toml, the limit for the changed lines of upstream in a group; 0 for no limit."""
    goal = read_tables(text, "patch", where)[0].get("goal_lines", 0)
    if not isinstance(goal, int) or isinstance(goal, bool) or goal < 0:
        raise UsageError(f"{where}: goal_lines must be a number of lines", why=f"it is {goal!r}")
    return goal


def patch_named(patches: Collection[Patch], patch_id: str) -> Patch:
    """Return the patch with an id. Raise UsageError if the series does not have it."""
    if found := next((patch for patch in patches if patch.id == patch_id), None):
        return found
    known = ", ".join(patch.id for patch in patches)
    raise UsageError(f"there is no patch {patch_id!r}", next_step=f"name one of: {known}")


def is_ignored_path(path: str) -> bool:
    """Return True if a path in cpp/, with slashes, is not copied to llama.cpp. See the head of this module."""
    return path == "README.md" or any(part.startswith(".") or part.endswith("~") for part in path.split("/"))


def new_files(cpp: Path) -> tuple[NewFile, ...]:
    """Return the files of cpp/ that are copied to llama.cpp, sorted by path; nothing if there is no cpp/."""
    found: list[NewFile] = []
    for source in sorted(cpp.rglob("*")) if cpp.is_dir() else ():
        parts = source.relative_to(cpp).parts
        if is_ignored_path("/".join(parts)) or (source.is_dir() and not source.is_symlink()):
            continue
        if source.is_symlink() or not source.is_file():
            raise UsageError(
                f"{source} is not a plain file",
                why="cpp/ is only for plain files; a patch can add a link",
                next_step="remove it there, make it in the patched tree, commit, and run kvtool export",
            )
        found.append(NewFile("/".join(parts), source, bool(source.stat().st_mode & 0o100)))
    return tuple(sorted(found, key=lambda f: f.path))


def files_of_groups(project: Project, chosen: Collection[str]) -> tuple[NewFile, ...]:
    """Return the files of cpp/ that belong to the chosen groups; every file if no group is chosen."""
    files = new_files(project.cpp)
    groups = [group for group in load_groups(project) if group.id in chosen]
    return tuple(file for file in files if any(group.has_file(file.path) for group in groups)) if chosen else files


def load_series(project: Project, lock: Lock, upstream: Upstream, groups: Sequence[str] = ()) -> Series:
    """Return the series for one upstream. With groups, return only these groups and those that they depend on.

    Raises UsageError if a patch file cannot be read, two patches have the same subject, or a group is unknown.
    """
    known = load_groups(project)
    chosen = close_groups(known, groups)
    patches: list[LoadedPatch] = []
    for patch in load_patches(project):
        path = project.patches / patch.file
        try:
            raw = path.read_bytes()
        except OSError as err:
            raise UsageError(f"patch {patch.id!r}: cannot read {path}", why=str(err)) from err
        mail = parse_mail(raw, f"patch {patch.id!r} ({path})")
        _refuse_wrong_count(mail, path)
        patches.append(LoadedPatch(patch, mail, patch.wanted(lock, upstream)))
    here = tuple(loaded for loaded in patches if not chosen or loaded.patch.group in chosen)
    files = files_of_groups(project, chosen)
    return Series(upstream, files, here, _series_digest(upstream, files, here), chosen, known)


def _refuse_wrong_count(mail: Mail, path: Path) -> None:
    """Raise UsageError, with the line of the file, if the header of a hunk does not agree with its number of lines."""
    if wrong := find_wrong_count(mail.diff):
        line = mail.raw[: mail.raw.find(mail.diff)].count(b"\n") + wrong[0] + 1
        raise UsageError(
            f"{path}:{line}: {wrong[1]}",
            why="the file was edited by hand, or it was cut off",
            next_step="restore it with git, and change the patch in the tree: kvtool apply, commit, kvtool export",
        )


def _series_digest(upstream: Upstream, files: tuple[NewFile, ...], patches: tuple[LoadedPatch, ...]) -> str:
    """Return a hash of everything that affects the commits.

    This is the upstream, each new file, and each patch that is applied.
    """
    parts = [b"kvtool series 1", upstream.tag.encode(), upstream.tree.encode()]
    for file in files:
        path, mode = file.path.encode("utf-8", "surrogateescape"), b"x" if file.executable else b"-"
        parts += b"file", path, mode, file.source.read_bytes()
    for loaded in patches:
        if loaded.wanted:
            parts += b"patch", loaded.patch.id.encode(), loaded.mail.raw
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


def undecided_patches(series: Series, lock: Lock, upstream: Upstream) -> dict[str, str]:
    """Return the patches for which from/until do not decide whether an upstream needs them.

    There are such patches only for an upstream that is not in the lock, between two tags of the lock. Such a patch has
    the later of these two tags as its `from` or `until`, because of a change of upstream between the two tags. It is
    unknown whether the given upstream already has that change. The result maps the id of each such patch to the later
    tag.

    Two kinds of patches with this tag as `from` are not in the result:

    - A patch of a group that depends on another group. The patch may be a feature, and a feature can start later than
      the code of upstream that the feature needs.
    - A patch that changes a file of a patch whose `until` is this tag. The first patch replaces the second patch, and
      starts at this tag only because the second patch ends there.
    """
    alone, patches = {"", *(group.id for group in series.known_groups if not group.depends)}, series.patches
    tag = next((known.tag for known in lock.upstreams.values() if known.order == upstream.order + 1), None)
    ending = [loaded for loaded in patches if tag and loaded.patch.until == tag and loaded.wanted]
    theirs = {file.path for loaded in ending for file in parse_diff(loaded.mail.diff)}
    beginning = [
        loaded
        for loaded in patches
        if tag and loaded.patch.since == tag and loaded.patch.group in alone
        if theirs.isdisjoint(file.path for file in parse_diff(loaded.mail.diff))
    ]
    return {loaded.patch.id: str(tag) for loaded in (*ending, *beginning)}


def new_id(subject: str, taken: set[str]) -> str:
    """Return a unique id for a patch, made from its subject: lower-case words with dashes between them."""
    stem = "-".join(re.findall(r"[a-z0-9]+", subject.lower()))[:40].strip("-") or "patch"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)
