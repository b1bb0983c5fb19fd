"""Check a whole project: series.toml, upstream.lock, patches/ and cpp/, each alone and against each other."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias, TypeVar

from kvtool.errors import KvtoolError
from kvtool.lint import LintFinding
from kvtool.lint.entries import SeriesText, lint_entries, parse_entries
from kvtool.lint.mail import lint_patch
from kvtool.project import Project, read_text
from kvtool.series.groups import Group, owners_of, parse_groups
from kvtool.series.patchfile import Mail, diff_size, parse_diff
from kvtool.series.series import Patch, goal_lines, new_files
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock, load_lock, read_tables

_T = TypeVar("_T")
SERIES = "patches/series.toml"
_Mailed: TypeAlias = tuple[int, Patch, Mail]  # the number of an entry of series.toml, the patch, and its parsed file
_BELONG = ("series.toml", "upstream.lock", "README.md")


def lint_project(project: Project, known_tests: Collection[str]) -> tuple[LintFinding, ...]:
    """Return every mistake, sorted by file and line.

    A mistake in a file is returned, and never raised as an exception.
    """
    found: list[LintFinding] = []
    lock = _loaded(lambda: load_lock(project.lock), found, "patches/upstream.lock", "lock", "correct it")
    files = _loaded(lambda: new_files(project.cpp), found, "cpp", "new-file", "replace it by a plain file") or ()
    paths = tuple(file.path for file in files)
    try:
        text = read_text(project.series)
        _, tables = read_tables(text, "patch", SERIES)
    except KvtoolError as err:
        return (*found, LintFinding(SERIES, 0, "toml", str(err), "correct it"))
    lines = SeriesText(text, SERIES)
    patches, problems = parse_entries(tables, lines)
    mailed = _mails(project, patches, lines, paths, found)
    found += [*problems, *lint_entries(patches, lock, known_tests, lines)]
    found += [*_subjects(mailed, lines), *_moves(mailed)]
    groups = _loaded(lambda: parse_groups(text, SERIES), found, SERIES, "group", "correct the table")
    if groups is not None:
        found += [*_ungrouped(patches, groups, lines), *_owners(groups, paths)]
    found += _unlisted(project, tables, groups or ())
    if lock is not None:
        goal = _loaded(lambda: goal_lines(text, SERIES), found, SERIES, "entry", "correct it")
        found += [*(_size(mailed, lock, goal) if goal else ()), *_in_upstream(project, lock, paths)]
    return tuple(sorted(found, key=lambda f: (f.file, f.line)))


def _loaded(load: Callable[[], _T], found: list[LintFinding], file: str, rule: str, todo: str) -> _T | None:
    """Return the result of `load`. If it fails, add a finding and return None."""
    try:
        return load()
    except KvtoolError as err:
        found.append(LintFinding(file, 0, rule, str(err), err.next_step or todo))
        return None


def _mails(
    project: Project, patches: dict[int, Patch], lines: SeriesText, paths: tuple[str, ...], found: list[LintFinding]
) -> list[_Mailed]:
    """Check each listed patch file. Return those that could be read."""
    mailed: list[_Mailed] = []
    for number, patch in patches.items():
        try:
            raw = (project.patches / patch.file).read_bytes()
        except OSError:
            what = f"{patch.id}: patches/{patch.file} does not exist"
            found.append(lines.finding(number, "file", "missing", what, "restore the file, or remove the entry"))
            continue
        mail, problems = lint_patch(raw, f"patches/{patch.file}", paths)
        found += problems
        mailed += [(number, patch, mail)] if mail else []
    return mailed


def _subjects(mailed: list[_Mailed], lines: SeriesText) -> Iterator[LintFinding]:
    for number, patch, mail in mailed:
        if patch.why.strip() == mail.subject:
            what = f"{patch.id}: why only repeats the subject"
            yield lines.finding(number, "why", "why", what, "describe in one sentence the failure without this patch")


def _moves(mailed: list[_Mailed]) -> Iterator[LintFinding]:
    """Find patches that move a line which an earlier patch added.

    The earlier patch should add the line in the right place at once.
    """
    brought: dict[tuple[str, bytes], str] = {}
    for _, patch, mail in mailed:
        for file in parse_diff(mail.diff):
            rows = [row for hunk in file.hunks for row in hunk.rows]
            added, removed = ({row[1:] for row in rows if row[:1] == sign} for sign in (b"+", b"-"))
            known = (line for line in sorted(added & removed) if (file.path, line) in brought and len(line.split()) > 1)
            if moved := next(known, b""):
                line = moved.decode("utf-8", "replace").strip()
                what = f"it moves a line of {brought[file.path, moved]} in {file.path}: {line}"
                todo = "make that patch add it in the right place: commit --fixup=<its commit>, then kvtool export"
                yield LintFinding(f"patches/{patch.file}", 0, "moves", what, todo)
            brought |= {(file.path, line): patch.id for line in added}


def _ungrouped(patches: dict[int, Patch], groups: Sequence[Group], lines: SeriesText) -> Iterator[LintFinding]:
    """Find patches whose group is not in series.toml. A tree that is made with --group would never contain them."""
    known = [group.id for group in groups]
    for number, patch in patches.items():
        if patch.group and patch.group not in known:
            todo = f"name one of {', '.join(known)}" if known else "add a [[group]] table, or remove the key"
            yield lines.finding(number, "group", "group", f"{patch.id}: there is no group {patch.group!r}", todo)
        elif known and not patch.group:
            what = f"{patch.id} belongs to no group"
            yield lines.finding(number, "id", "group", what, f"add group = one of {', '.join(known)}")


def _owners(groups: Sequence[Group], paths: Sequence[str]) -> Iterator[LintFinding]:
    """Find files of cpp/ that do not belong to exactly one group, and patterns that no file matches."""
    for path in paths if groups else ():
        owners = owners_of(groups, path)
        if len(owners) != 1:
            what = f"it belongs to {' and '.join(owners)}" if owners else "it belongs to no group"
            yield LintFinding(f"cpp/{path}", 0, "group", what, "change `files` of the groups in patches/series.toml")
    for group in groups:
        for pattern in group.files:
            if not any(Group(group.id, files=(pattern,)).has_file(path) for path in paths):
                what = f"group {group.id}: no file of cpp/ matches {pattern!r}"
                yield LintFinding(SERIES, 0, "group", what, "remove the pattern")


def _unlisted(project: Project, tables: list[object], groups: Sequence[Group]) -> Iterator[LintFinding]:
    listed = {str(t.get("file") or f"{t.get('id')}.patch") for t in tables if isinstance(t, dict)}
    listed |= {f"{group.id}.md" for group in groups}  # the page of a group
    for path in sorted(project.patches.iterdir()):
        if path.name in _BELONG or path.name in listed or path.name.startswith("."):
            continue
        if path.suffix == ".patch":
            what, todo = "series.toml does not list it", "add an entry, or remove the file"
        else:
            what, todo = "it is not a patch, and not a file that kvtool knows", "move it elsewhere"
        yield LintFinding(f"patches/{path.name}", 0, "unlisted", what, todo)


def _size(mailed: list[_Mailed], lock: Lock, goal: int) -> Iterator[LintFinding]:
    """Yield a finding for each group whose patches change `goal` or more lines of upstream's own files.

    The number of lines depends on the upstream tag. The largest number over all tags counts.
    """
    known = [
        (patch, sum(diff_size(mail.diff)[1:]))
        for _, patch, mail in mailed
        if all(tag in lock.upstreams for tag in (patch.since, patch.until) if tag)
    ]
    for group in sorted({patch.group for patch, _ in known}):
        of_group = [(patch, lines) for patch, lines in known if patch.group == group]
        sums = [(sum(n for patch, n in of_group if patch.wanted(lock, up)), up.tag) for up in lock.upstreams.values()]
        most, where = max(reversed(sums), key=lambda found: found[0])
        if most >= goal:
            what = f"{most} changed lines in upstream's own files at {where}, and the goal is less than {goal}"
            what += f" (group {group})" if group else ""
            yield LintFinding(SERIES, 0, "size", what, "move code into cpp/, and leave hooks in the patches")


def _in_upstream(project: Project, lock: Lock, paths: tuple[str, ...]) -> Iterator[LintFinding]:
    """Find files of cpp/ whose path is also the path of a file of upstream. Only tags in the cache are checked."""
    cache = Cache(project.cache)
    for tag, upstream in lock.upstreams.items():
        if paths and (commit := cache.base(upstream)):
            for path in sorted(cache.git.paths(commit) & set(paths)):
                what = f"{lock.name} {tag} has {path} already"
                yield LintFinding(f"cpp/{path}", 0, "in-upstream", what, "choose another name")
