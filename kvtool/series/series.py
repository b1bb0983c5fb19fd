"""patches/series.toml and cpp/: what a patched tree is made of, and its text with a change. Reads files, runs nothing.

The rule for cpp/: every file below it stands for the file at the same path in llama.cpp, except cpp/README.md and names
that start with a dot or end with a tilde.
"""

import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import UsageError
from kvtool.project import Project, read_text
from kvtool.series.patchfile import Mail, parse_diff, parse_mail
from kvtool.upstream.lock import Lock, Upstream, read_tables

UPSTREAM_STATUS = ("local", "submitted", "merged", "rejected")
_ID = re.compile(r"[a-z0-9][a-z0-9-]*")
_KEYS = {"id", "file", "group", "why", "upstream", "from", "until", "tests"}


@dataclass(frozen=True)
class Patch:
    """One entry of series.toml. group: the feature it is a part of, "" for the one that the series is about; since,
    until: tags ("" for no limit); until is the first tag it no longer applies to."""

    id: str
    file: str
    why: str
    status: str = "local"
    pr: str = ""
    since: str = ""
    until: str = ""
    tests: tuple[str, ...] = ()
    group: str = ""

    def wanted(self, lock: Lock, upstream: Upstream) -> bool:
        """Whether from/until let it apply to this upstream (order of the lock)."""
        after = not self.since or lock.upstream(self.since).order <= upstream.order
        return after and (not self.until or upstream.order < lock.upstream(self.until).order)


@dataclass(frozen=True)
class NewFile:
    """A file of cpp/. path: inside llama.cpp, with slashes; source: where it is here."""

    path: str
    source: Path
    executable: bool


@dataclass(frozen=True)
class Step:
    """A patch of the series with its parsed mail; wanted: False when from/until exclude the upstream."""

    patch: Patch
    mail: Mail
    wanted: bool


@dataclass(frozen=True)
class Series:
    """Everything that goes on top of one upstream, and a digest of all that decides the result."""

    upstream: Upstream
    files: tuple[NewFile, ...]
    steps: tuple[Step, ...]
    digest: str


def entry_problems(table: Any) -> Iterator[tuple[str, UsageError]]:
    """Everything that keeps a [[patch]] table from being a Patch, each with the key that it is about; nothing means
    that `patch_of` takes it."""
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
        yield "why", UsageError("why is empty", next_step="say in one sentence what breaks without this patch")
    upstream = table.get("upstream", {})
    if not isinstance(upstream, dict) or upstream.get("status", "local") not in UPSTREAM_STATUS:
        yield "upstream", UsageError(f"upstream.status must be one of {', '.join(UPSTREAM_STATUS)}")
    tests = table.get("tests", [])
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        yield "tests", UsageError("tests must be a list of strings", why=f"it is {tests!r}")


def patch_of(table: dict[str, Any]) -> Patch:
    """A [[patch]] table without problems as a Patch."""
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
    """Parse and check series.toml; UsageError says which entry is wrong and how."""
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
    return parse_series(read_text(project.series), str(project.series))


def goal_lines(text: str, where: str = "series.toml") -> int:
    """`goal_lines` of series.toml: a group is to change fewer lines of upstream's own files. 0: there is no goal."""
    goal = read_tables(text, "patch", where)[0].get("goal_lines", 0)
    if not isinstance(goal, int) or isinstance(goal, bool) or goal < 0:
        raise UsageError(f"{where}: goal_lines must be a number of lines", why=f"it is {goal!r}")
    return goal


def patch_named(patches: Collection[Patch], patch_id: str) -> Patch:
    """The patch of that id; UsageError when the series has none."""
    if found := next((patch for patch in patches if patch.id == patch_id), None):
        return found
    known = ", ".join(patch.id for patch in patches)
    raise UsageError(f"there is no patch {patch_id!r}", next_step=f"name one of: {known}")


def hidden(path: str) -> bool:
    """Whether a path below cpp/ (with slashes) stands for nothing in llama.cpp, by the rule above."""
    return path == "README.md" or any(part.startswith(".") or part.endswith("~") for part in path.split("/"))


def new_files(cpp: Path) -> tuple[NewFile, ...]:
    """The files of cpp/ by the rule above, sorted by path; none when there is no cpp/."""
    found: list[NewFile] = []
    for source in sorted(cpp.rglob("*")) if cpp.is_dir() else ():
        parts = source.relative_to(cpp).parts
        if hidden("/".join(parts)) or (source.is_dir() and not source.is_symlink()):
            continue
        if source.is_symlink() or not source.is_file():
            raise UsageError(f"{source} is not a plain file", why="cpp/ holds plain files only")
        found.append(NewFile("/".join(parts), source, bool(source.stat().st_mode & 0o100)))
    return tuple(sorted(found, key=lambda f: f.path))


def load_series(project: Project, lock: Lock, upstream: Upstream) -> Series:
    """Read the whole series for one upstream. UsageError for a file that is missing or no mail, or a subject twice."""
    steps: list[Step] = []
    for patch in load_patches(project):
        path = project.patches / patch.file
        try:
            raw = path.read_bytes()
        except OSError as err:
            raise UsageError(f"patch {patch.id!r}: cannot read {path}", why=str(err)) from err
        steps.append(Step(patch, parse_mail(raw, f"patch {patch.id!r} ({path})"), patch.wanted(lock, upstream)))
    subjects = [step.mail.subject for step in steps]
    if double := next((s for s in subjects if subjects.count(s) > 1), None):
        raise UsageError(
            f"two patches have the subject {double!r}",
            why="export tells commits apart by their subject",
            next_step="give one of them another, in the Subject: line of its file",
        )
    files = new_files(project.cpp)
    return Series(upstream, files, tuple(steps), _digest(upstream, files, tuple(steps)))


def _digest(upstream: Upstream, files: tuple[NewFile, ...], steps: tuple[Step, ...]) -> str:
    """Over everything that decides the commits: the upstream, each new file, each wanted patch; not the reasons."""
    parts = [b"kvtool series 1", upstream.tag.encode(), upstream.tree.encode()]
    for file in files:
        path, mode = file.path.encode("utf-8", "surrogateescape"), b"x" if file.executable else b"-"
        parts += b"file", path, mode, file.source.read_bytes()
    for step in steps:
        if step.wanted:
            parts += b"patch", step.patch.id.encode(), step.mail.raw
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


def unsettled(steps: Sequence[Step], lock: Lock, upstream: Upstream) -> dict[str, str]:
    """The patches of which from/until do not tell whether an upstream that the lock did not have needs them: they begin
    or end with the next one that it has, whose tag is told, and the change that they answer may be in any before that.

    A feature may come later than what it needs, and what takes the place of another patch comes when that one goes.
    """
    tag = next((known.tag for known in lock.upstreams.values() if known.order == upstream.order + 1), None)
    ending = [step for step in steps if tag and step.patch.until == tag and step.wanted]
    theirs = {file.path for step in ending for file in parse_diff(step.mail.diff)}
    beginning = [
        step
        for step in steps
        if tag and step.patch.since == tag and not step.patch.group
        if theirs.isdisjoint(file.path for file in parse_diff(step.mail.diff))
    ]
    return {step.patch.id: str(tag) for step in (*ending, *beginning)}


def new_id(subject: str, taken: set[str]) -> str:
    """A patch id from a subject: lower-case words and dashes, unique."""
    stem = "-".join(re.findall(r"[a-z0-9]+", subject.lower()))[:40].strip("-") or "patch"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)
