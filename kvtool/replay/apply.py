"""Apply a series to an upstream, as commits in a temporary index. No checkout and no ref changes.

A conflict is not raised as an exception. Every patch is tried and gets a report.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from kvtool.errors import ConflictError, KvtoolError, UsageError
from kvtool.gitcmd import Git, Scratch, folders
from kvtool.replay.paths import Entry
from kvtool.result import PatchOutcome
from kvtool.series.patchfile import DIFF_FLAGS, Authored, Hunk, Mail, diff_size, hunk_headings, parse_diff, pieces_of
from kvtool.series.series import LoadedPatch, NewFile, Series
from kvtool.series.source import split_lines

# git reads such a date as a year if it has few digits, unless a @ is in front of it
_RAW_DATE = re.compile(r"\d+ [-+]\d{4}")
NEW_FILES_MESSAGE = "kvtool: add the files of cpp/\n"


@dataclass(frozen=True)
class FailedHunk:
    """Report a hunk that did not apply, or that git applied at a wrong place.

    `expected`, `wanted`, `found` and `diff` are empty if the tree that the patch was made on is not available.
    """

    path: str
    number: int  # number of the hunk in its file from 1 on, 0 for the whole file
    total: int
    header: str  # "@@ -10,3 +10,5 @@ function"
    reason: str
    expected: tuple[str, ...] = ()  # the lines that the hunk changes
    wanted: tuple[str, ...] = ()  # the lines that the hunk puts in the place of the expected lines
    found: tuple[str, ...] = ()  # the lines of the new upstream at the place of the hunk
    behind: str = ""  # upstream commit that changed the lines, if its history is available
    cause: str = ""  # the kind of conflict in one or two words, such as "renamed identifier"
    diff: tuple[str, ...] = ()  # from the expected lines to upstream's lines, with context

    @classmethod
    def of(cls, hunk: Hunk, reason: str, cause: str = "") -> Self:
        """Make the report of a hunk that failed."""
        header = f"{hunk.header} {hunk.function}".strip()
        return cls(hunk.path, hunk.number, hunk.total, header, reason, cause=cause)

    def __str__(self) -> str:
        hunk = f" hunk {self.number} of {self.total} ({self.header})" if self.number else ""
        return f"{self.path}{hunk}: {self.reason}"


@dataclass(frozen=True)
class PatchReport:
    """Report the outcome of one patch."""

    id: str
    outcome: PatchOutcome
    commit: str = ""  # id of the commit, "" unless the patch was applied
    hunks: int = 0
    added: int = 0  # number of added lines
    removed: int = 0  # number of removed lines
    failed: tuple[FailedHunk, ...] = ()  # hunks that conflict
    blocked_by: str = ""  # id of the failed patch that this patch seems to need
    moved: tuple[str, ...] = ()  # notes about places to review, for example a hunk that is now in another function
    lost: str = ""  # which part of the patch disappeared, "" for nothing
    seconds: float = 0.0

    @property
    def needs_user(self) -> bool:
        """Return True if the user must resolve something in this patch."""
        return bool(self.failed or self.lost)


class Blob(NamedTuple):
    """Hold a file of a git tree."""

    mode: str  # "100644" or "100755"
    id: str
    path: str


def blobs_of(git: Git, files: Sequence[NewFile]) -> list[Blob]:
    """Store the files of cpp/ as blobs in a repository."""
    names = "".join(f"{file.source.absolute()}\n" for file in files)
    ids = git.run("hash-object", "-w", "--no-filters", "--stdin-paths", input=names).stdout.split()
    modes = ("100755" if file.executable else "100644" for file in files)
    return [Blob(mode, blob, file.path) for mode, blob, file in zip(modes, ids, files, strict=True)]


@dataclass(frozen=True)
class Commit(Authored):
    """Hold a commit of a patched tree. `diff` is its diff, as git prints it with the options DIFF_FLAGS."""

    id: str
    parents: tuple[str, ...]  # ids of the parents; a merge has several

    @property
    def parent(self) -> str:
        """Return the first parent."""
        return next(iter(self.parents), "")


def commits_of(git: Git, base: str, head: str) -> tuple[Commit, ...]:
    """Return the commits base..head, the oldest first. Runs git once."""
    flags = ("--reverse", "--topo-order", "--date=raw", "-p", *DIFF_FLAGS)
    log = git.raw("log", *flags, "--format=%x00%x00%H%n%P%n%an%n%ae%n%ad%n%B%x00", f"{base}..{head}")
    commits = []
    # an entry starts with two NULs and an id, because the text of a file may contain NULs, too
    for entry in re.split(rb"\0\0(?=[0-9a-f]{40}\n)", log)[1:]:
        said, _, diff = entry.partition(b"\0")
        commit, parents, name, email, date, message = said.decode("utf-8", "surrogateescape").split("\n", 5)
        commits.append(Commit(name, email, date, message, diff.lstrip(b"\n"), commit, tuple(parents.split())))
    return tuple(commits)


def upstream_lines(reports: Sequence[PatchReport]) -> int:
    """Return the number of lines that all patches together change in upstream's own files."""
    return sum(report.added + report.removed for report in reports)


@dataclass(frozen=True)
class Replayed:
    """Hold a series that was applied, as commits."""

    base: str
    head: str  # the last commit
    tree: str  # id of the git tree of the last commit
    reports: tuple[PatchReport, ...]

    @property
    def complete(self) -> bool:
        """Return True if no patch needs the user."""
        return not any(report.needs_user for report in self.reports)


@dataclass(frozen=True)
class Applied:
    """Record what kvtool applied to a tree. It is stored in `.git/kvtool/state.json`."""

    tag: str
    tree: str  # id of upstream's git tree
    digest: str  # hash of the series, see Series.digest
    base: str  # id of the commit of unpatched upstream
    head: str  # id of the last commit
    pinned: bool = False  # the user named the tag, so the tree stays valid when the lock's current tag changes
    patches: tuple[PatchReport, ...] = ()  # in the order of the series
    groups: tuple[str, ...] = ()  # groups of the series that the tree contains; empty if it contains the whole series


def applied_of(series: Series, replayed: Replayed, *, pinned: bool) -> Applied:
    """Return the record for state.json of a series that was applied."""
    up, result = series.upstream, (replayed.base, replayed.head, pinned, replayed.reports)
    return Applied(up.tag, up.tree, series.digest, *result, series.groups)


def _listed(names: Sequence[str], between: str = ", ") -> str:
    """Return the first five names, and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return between.join(names[:5]) + more


class Builder:
    """Make a chain of commits, one after the other, in a git index of its own.

    `commit` and `tree` are the ids of the last commit and of its tree.
    """

    def __init__(self, scratch: Scratch, commit: str) -> None:
        self.git, self.commit = scratch, commit
        self._env = {"GIT_INDEX_FILE": str(scratch.place() / "index")}
        self.tree = self.git.line("rev-parse", f"{commit}^{{tree}}")
        self.reset()

    def commit_files(self, files: tuple[NewFile, ...], message: str = NEW_FILES_MESSAGE) -> None:
        """Commit the files of cpp/, if there are any.

        Raise UsageError if upstream has a file or a folder with one of their paths.
        """
        theirs = self.git.paths(self.tree)
        taken = theirs | folders(theirs)
        if odd := next((file for file in files if folders([file.path]) & theirs), None):
            (above,) = folders([odd.path]) & theirs
            raise UsageError(
                f"upstream has a file {above}, but cpp/ has a folder of this name: {odd.path}",
                why=f"cpp/{odd.path} would replace it",
                next_step=f"rename the folder cpp/{above}",
            )
        if odd := next((file for file in files if file.path in taken - theirs), None):
            raise UsageError(
                f"upstream has a folder {odd.path}, but cpp/ has a file of this name",
                why="the file would replace the folder",
                next_step=f"rename cpp/{odd.path}",
            )
        if both := [file for file in files if file.path in taken]:
            raise self._taken_error(both)
        if odd := next((f for f in files if "\n" in f.path), None):
            raise UsageError(f"{odd.source} has a line break in its name")
        self.commit_blobs(blobs_of(self.git, files), message)

    def _taken_error(self, files: Sequence[NewFile]) -> UsageError:
        """Return the error for files of cpp/ whose paths upstream uses."""
        found = self.git.blobs(*(f"{self.tree}:{file.path}" for file in files))
        theirs = dict(zip(files, found, strict=True))
        same = [file for file, (blob, text) in theirs.items() if blob and text == file.source.read_bytes()]
        removal = f"remove {_listed([f'cpp/{file.path}' for file in same])}: upstream took it" if same else ""
        other = [file.path for file in files if file not in same]
        if other:
            ours = [f"cpp/{path}" for path in other]
            steps = [
                f"to use upstream's file: git rm {_listed(ours, ' ')}, then run the command again",
                f"to keep your version as a patch: do the same, then git show HEAD:{ours[0]} > {other[0]} in the "
                "patched tree, commit there, and kvtool export",
                "to keep both: rename yours",
            ]
            return UsageError(
                f"upstream has {_listed(other)} already",
                why="cpp/ is only for new files; a file of upstream can be changed only by a patch",
                next_step="\n".join((*steps, f"also {removal}") if removal else steps),
                output="\n".join(ours) if len(ours) > 5 else "",
            )
        return UsageError(
            f"upstream has {_listed([file.path for file in same])} now, with the same content",
            why="cpp/ is only for new files, and these are equal to upstream's",
            next_step=f"{removal}; then run the command again",
        )

    def commit_blobs(self, blobs: Sequence[Blob], message: str = NEW_FILES_MESSAGE) -> None:
        """Commit new files, if there are any."""
        self.add_blobs(blobs)
        self.commit_index(message)

    def add_blobs(self, blobs: Sequence[Blob]) -> None:
        """Add files to the index."""
        if lines := "".join(f"{mode} {blob}\t{path}\0" for mode, blob, path in blobs):
            self.git.run("update-index", "-z", "--index-info", input=lines, env=self._env)

    def put_entries(self, entries: Mapping[str, Entry]) -> None:
        """Set the mode and the content of paths in the index. An entry without a mode removes its path."""
        gone = [f"0 {'0' * 40}\t{path}\0" for path, entry in entries.items() if not entry.mode]
        here = [f"{entry.mode} {entry.id}\t{path}\0" for path, entry in entries.items() if entry.mode]
        self.git.run("update-index", "-z", "--replace", "--index-info", input="".join(gone + here), env=self._env)

    def apply_error(self, diff: bytes, *flags: str) -> str | None:
        """Return git's error message if a diff does not apply to the index, and None if it applies."""
        done = self.git.run("apply", "--cached", "--check", "-C1", *flags, "-", input=diff, env=self._env, check=False)
        return done.stderr if done.returncode != 0 else None

    def apply(self, diff: bytes, *flags: str) -> bool:
        """Apply a diff to the index, completely or not at all. Return whether it applied.

        With --3way, a diff that does not apply leaves an index with conflicts.
        """
        done = self.git.run("apply", "--cached", "-C1", *flags, "-", input=diff, env=self._env, check=False)
        return done.returncode == 0

    def diff_of(self, before: str, after: str) -> bytes:
        """Return the difference of two trees, written with DIFF_FLAGS."""
        return self.git.raw("diff-tree", "-p", *DIFF_FLAGS, before, after)

    def reset(self, tree: str = "") -> None:
        """Reset the index to a tree. If no tree is given, reset it to the last commit."""
        self.git.run("read-tree", tree or self.tree, env=self._env)

    def write_tree(self) -> str:
        """Write the index as a git tree, and return its id."""
        return self.git.line("write-tree", env=self._env)

    def commit_index(self, message: str, *, author: Authored | None = None, tree: str = "") -> str | None:
        """Commit the index, and return the id of the commit. Return None if nothing changed.

        tree: the id of the index's tree, if the caller has written it
        """
        tree = tree or self.write_tree()
        if tree == self.tree:
            return None
        env: dict[str, str] = {}
        if author is not None:
            date = f"@{author.date}" if _RAW_DATE.fullmatch(author.date) else author.date
            env = {"GIT_AUTHOR_NAME": author.name, "GIT_AUTHOR_EMAIL": author.email, "GIT_AUTHOR_DATE": date}
        try:
            self.commit = self.git.line("commit-tree", tree, "-p", self.commit, env=env, input=message)
        except KvtoolError as err:
            if author is None or "invalid date format" not in err.output:
                raise
            raise UsageError(
                f"git cannot parse the date {author.date!r}",
                why=f"it is the date of the patch {message.partition(chr(10))[0]!r}",
                next_step="correct the Date: line of its file in patches/",
            ) from err
        self.tree = tree
        return self.commit


def replay(scratch: Scratch, base: str, series: Series, message: str = NEW_FILES_MESSAGE) -> Replayed:
    """Apply a series: commit the files of cpp/, then each patch that series.toml includes on this upstream.

    The same input always produces the same commit ids on every machine.

    base: the id of the commit of unpatched upstream
    message: the message of the commit with the files of cpp/
    """
    builder = Builder(scratch, base)
    builder.commit_files(series.files, message)
    missing = MissingLines()
    reports: list[PatchReport] = []
    for number, loaded in enumerate(series.patches):
        report = replay_patch(builder, loaded, missing)
        if report.outcome is PatchOutcome.CONFLICT:
            report = _name_later_patches(builder, report, loaded, series.patches[number + 1 :])
        reports.append(report)
    return Replayed(base, builder.commit, builder.tree, tuple(reports))


def _name_later_patches(
    builder: Builder, report: PatchReport, failed: LoadedPatch, later: Sequence[LoadedPatch]
) -> PatchReport:
    """Add to the report of a conflict the names of later patches that must be applied first, if there are any."""
    needed = _patches_needed(builder, failed, [loaded for loaded in later if loaded.wanted])
    if not needed:
        return report
    names = " and ".join(map(repr, needed))
    reason = f"it needs the patch {names}, which series.toml lists later"
    hunks = tuple(replace(hunk, reason=reason, cause="reordered series") for hunk in report.failed)
    return replace(report, failed=hunks, blocked_by=needed[0])


def _patches_needed(builder: Builder, failed: LoadedPatch, later: Sequence[LoadedPatch]) -> list[str]:
    """Return the ids of later patches after which a failed patch applies. Patches that are not needed are left out.

    Only later patches that change a file of the failed patch are tried. Returns an empty list if the failed patch does
    not apply even after all of them.
    """
    paths = {file.path for file in parse_diff(failed.mail.diff)}
    near = [loaded for loaded in later if paths & {file.path for file in parse_diff(loaded.mail.diff)}]

    def applies_after(patches: Sequence[LoadedPatch]) -> bool:
        builder.reset()
        for loaded in patches:
            builder.apply(loaded.mail.diff)
        return builder.apply(failed.mail.diff)

    needed = next(([loaded] for loaded in near if applies_after([loaded])), near)
    if not near or not applies_after(needed):
        needed = []
    for loaded in tuple(needed) if len(needed) > 1 else ():
        rest = [other for other in needed if other is not loaded]
        needed = rest if applies_after(rest) else needed
    builder.reset()
    return [loaded.patch.id for loaded in needed]


class MissingLines:
    """Record the lines that failed patches would have added.

    If the context of a later patch needs such a line, that patch is reported as blocked instead of as a conflict.
    """

    def __init__(self) -> None:
        self._missing: list[tuple[str, str, frozenset[bytes]]] = []  # patch, path, lines

    def record_failure(self, builder: Builder, patch: str, diff: bytes, failed: tuple[FailedHunk, ...]) -> PatchReport:
        """Return the report of a patch that does not apply, and record the lines that it would have added."""
        blocker = self._blocker(builder.git, builder.tree, diff, failed)
        for file in parse_diff(diff):
            added = frozenset(line for piece in pieces_of(file) for line in set(piece.after) - set(piece.before))
            self._missing.append((patch, file.path, added))
        outcome = PatchOutcome.BLOCKED if blocker else PatchOutcome.CONFLICT
        return PatchReport(patch, outcome, "", *diff_size(diff), failed, blocker)

    def _blocker(self, git: Git, tree: str, diff: bytes, failed: tuple[FailedHunk, ...]) -> str:
        """Return the id of the failed patch that a failed hunk seems to need, "" if there is none."""
        at = {(hunk.path, hunk.number) for hunk in failed}
        for file in parse_diff(diff):
            known = [(patch, lines) for patch, path, lines in self._missing if path == file.path]
            there = set(split_lines(git.blobs(f"{tree}:{file.path}")[0][1])) if known else set()
            for piece in pieces_of(file):
                if (file.path, piece.hunk.number) in at or (file.path, 0) in at:
                    needed = set(piece.before) - there
                    if found := next((patch for patch, lines in known if needed & lines), ""):
                        return found
        return ""


def replay_patch(builder: Builder, loaded: LoadedPatch, missing: MissingLines, *, strict: bool = False) -> PatchReport:
    """Apply one patch by its context lines, and commit it.

    strict: report a conflict if a hunk lands in another function than the patch file names
    """
    name, mail = loaded.patch.id, loaded.mail
    if not loaded.wanted:
        return PatchReport(name, PatchOutcome.SKIPPED)
    if not mail.diff:
        return PatchReport(name, PatchOutcome.EMPTY)
    if builder.apply(mail.diff):
        tree = builder.write_tree()
        moved = _moved(builder, mail, tree)
        if moved and strict:
            builder.reset()
            failed = tuple(FailedHunk(path, 0, 0, "", note) for path, note in moved)
            return missing.record_failure(builder, name, mail.diff, failed)
        commit = builder.commit_index(mail.message, author=mail, tree=tree)
        if commit is None:
            return PatchReport(name, PatchOutcome.EMPTY)
        notes = tuple(f"{path}: {note}" for path, note in moved)
        return PatchReport(name, PatchOutcome.APPLIED, commit, *diff_size(mail.diff), moved=notes)
    if is_applied_already(builder, mail):
        return PatchReport(name, PatchOutcome.MERGED)
    return missing.record_failure(builder, name, mail.diff, failed_hunks(builder, mail.diff))


def is_applied_already(builder: Builder, mail: Mail) -> bool:
    """Return True if a patch is in the tree already.

    It is in the tree if the reverse patch applies, and removes each hunk from the function that the patch file names.
    """
    builder.reset()
    if not builder.apply(mail.diff, "--reverse"):
        builder.reset()
        return False
    recorded, found = hunk_headings(mail.diff), hunk_headings(builder.diff_of(builder.write_tree(), builder.tree))
    builder.reset()
    return len(recorded) != len(found) or all(
        not was or was == now for (_, was), (_, now) in zip(recorded, found, strict=True)
    )


def failed_hunks(builder: Builder, diff: bytes) -> tuple[FailedHunk, ...]:
    """Return the hunks of a diff that do not apply. Each hunk is tried alone."""
    failed: list[FailedHunk] = []
    files = parse_diff(diff)
    for file in files:
        for hunk in file.hunks:
            if (said := builder.apply_error(file.head + hunk.text)) is not None:
                failed.append(FailedHunk.of(hunk, _translate_error(said)))
        if not file.hunks and (said := builder.apply_error(file.head)) is not None:
            failed.append(FailedHunk(file.path, 0, 0, "", _translate_error(said)))
    # Each hunk applies alone, but not all of them together. So report the patch's first file as a whole.
    return tuple(failed) or (FailedHunk(files[0].path, 0, 0, "", _translate_error(builder.apply_error(diff) or "")),)


def _translate_error(said: str) -> str:
    """Translate an error message of git apply into one for users."""
    if "does not exist in index" in said or "No such file" in said:
        return "upstream has no such file"
    if "already exists" in said:
        return "upstream has this file already"
    if "patch failed" in said:
        return "upstream's lines there differ from the patch's"
    return (said.strip().splitlines() or ["git gave no reason"])[-1].removeprefix("error: ")


def _moved(builder: Builder, mail: Mail, tree: str) -> list[tuple[str, str]]:
    """Return the hunks that landed in another function than the patch file names, as pairs of path and note.

    The function compares the hunks of the patch file with the hunks of git's diff of the result, one by one. With more
    than one line of context, the patch file can be divided into hunks differently. If the numbers of hunks differ,
    returns an empty list.
    """
    expected, actual = hunk_headings(mail.diff), hunk_headings(builder.diff_of(builder.tree, tree))
    return [
        (path, f"recorded in {was!r}, landed in {now!r}")
        for (path, was), (_, now) in zip(expected, actual, strict=False)
        if len(expected) == len(actual) and was and was != now
    ]


def conflict_error(reports: tuple[PatchReport, ...], label: str) -> KvtoolError | None:
    """Return the error of a series that did not apply completely, or None.

    The error names the first patch that needs the user, and lists all later patches that need the user.
    """
    bad = [report for report in reports if report.needs_user]
    if not bad:
        return None
    first, *others = bad
    also = f"; these fail, too: {_listed([report.id for report in others])}" if others else ""
    next_step = "correct the patch (docs/guides/follow-upstream.md: resolve a conflict); the tree is unchanged"
    if first.failed and first.failed[0].cause == "reordered series":
        next_step = (
            f"move the entry of {first.blocked_by!r} above {first.id!r} in patches/series.toml, then kvtool apply"
        )
    return ConflictError(
        f"patch {first.id!r} {f'loses {first.lost} on' if first.lost else 'does not apply to'} {label}",
        why=(_causes(first.failed) or "the merge or the resolution left them out") + also,
        next_step=next_step,
    )


def _causes(failed: Sequence[FailedHunk]) -> str:
    more = f"; and {len(failed) - 2} more hunks" if len(failed) > 2 else ""
    return "; ".join(map(str, failed[:2])) + more
