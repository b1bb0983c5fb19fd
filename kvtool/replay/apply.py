"""Build the commits of a series on an upstream, in a temporary index: no checkout is touched, nothing is moved.

A conflict is an outcome, not an exception: every patch is tried, and each gets a report.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from kvtool.errors import ConflictError, KvtoolError, UsageError
from kvtool.gitcmd import Git, Scratch, folders
from kvtool.result import PatchOutcome
from kvtool.series.patchfile import DIFF_FLAGS, Authored, Hunk, Mail, diff_size, hunk_headings, parse_diff, pieces_of
from kvtool.series.series import NewFile, Series, Step
from kvtool.series.source import split_lines

_NEW_FILES_SUBJECT = "kvtool: add the files of cpp/"


@dataclass(frozen=True)
class FailedHunk:
    """A hunk that found no place, or a wrong one. header: "@@ -10,3 +10,5 @@ function"; number 0: the whole file.

    Where the tree that the patch was made on is at hand: expected, the lines it stands on; wanted, what it makes of
    them; found, what the new upstream has in their place. behind: upstream's commit, where its history is at hand.
    """

    path: str
    number: int
    total: int
    header: str
    reason: str
    expected: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    behind: str = ""

    @classmethod
    def of(cls, hunk: Hunk, reason: str) -> Self:
        return cls(hunk.path, hunk.number, hunk.total, f"{hunk.header} {hunk.function}".strip(), reason)

    def __str__(self) -> str:
        hunk = f" hunk {self.number} of {self.total} ({self.header})" if self.number else ""
        return f"{self.path}{hunk}: {self.reason}"


@dataclass(frozen=True)
class PatchReport:
    """What became of one patch.

    commit: "" unless it was applied; hunks, added, removed: its size; failed: the hunks in the way (conflict, blocked);
    blocked_by: id of the patch it seems to need; moved: hunks whose place is worth a look, such as one that landed in
    another function than recorded; lost: how much of the patch is gone, "" for nothing; seconds: what it took.
    """

    id: str
    outcome: PatchOutcome
    commit: str = ""
    hunks: int = 0
    added: int = 0
    removed: int = 0
    failed: tuple[FailedHunk, ...] = ()
    blocked_by: str = ""
    moved: tuple[str, ...] = ()
    lost: str = ""
    seconds: float = 0.0

    @property
    def in_the_way(self) -> bool:
        """Whether it keeps the series from being whole."""
        return bool(self.failed or self.lost)


class Blob(NamedTuple):
    """A file of a git tree. mode: "100644" or "100755"."""

    mode: str
    id: str
    path: str


def blobs_of(git: Git, files: Sequence[NewFile]) -> list[Blob]:
    """The files of cpp/, written into a repository."""
    names = "".join(f"{file.source.absolute()}\n" for file in files)
    ids = git.run("hash-object", "-w", "--no-filters", "--stdin-paths", input=names).stdout.split()
    modes = ("100755" if file.executable else "100644" for file in files)
    return [Blob(mode, blob, file.path) for mode, blob, file in zip(modes, ids, files, strict=True)]


@dataclass(frozen=True)
class Commit(Authored):
    """A commit of a patched tree, its diff as DIFF_FLAGS write it. parents: more than one for a merge."""

    id: str
    parents: tuple[str, ...]

    @property
    def parent(self) -> str:
        return next(iter(self.parents), "")


def commits_of(git: Git, base: str, head: str) -> tuple[Commit, ...]:
    """The commits that are in head and not in base, oldest first; one git call for all."""
    flags = ("--reverse", "--topo-order", "--date=raw", "-p", *DIFF_FLAGS)
    log = git.raw("log", *flags, "--format=%x00%x00%H%n%P%n%an%n%ae%n%ad%n%B%x00", f"{base}..{head}")
    commits = []
    for entry in re.split(rb"\0\0(?=[0-9a-f]{40}\n)", log)[1:]:  # a file that git takes for text may have NULs, too
        said, _, diff = entry.partition(b"\0")
        commit, parents, name, email, date, message = said.decode("utf-8", "surrogateescape").split("\n", 5)
        commits.append(Commit(name, email, date, message, diff.lstrip(b"\n"), commit, tuple(parents.split())))
    return tuple(commits)


def upstream_lines(reports: Sequence[PatchReport]) -> int:
    """Changed lines in upstream's own files, all patches together."""
    return sum(report.added + report.removed for report in reports)


@dataclass(frozen=True)
class Replayed:
    """The commits of a series. head is the last commit; complete: no conflict on the way."""

    base: str
    head: str
    tree: str
    reports: tuple[PatchReport, ...]

    @property
    def complete(self) -> bool:
        return not any(report.in_the_way for report in self.reports)


@dataclass(frozen=True)
class Applied:
    """What kvtool put into a tree: `.git/kvtool/state.json`.

    base, head: commits; patches: a report each, in order; pinned: the tag was named, so a new `current` in the lock
    does not make the tree stale.
    """

    tag: str
    tree: str
    digest: str
    base: str
    head: str
    pinned: bool = False
    patches: tuple[PatchReport, ...] = ()


def applied_of(series: Series, replayed: Replayed, *, pinned: bool) -> Applied:
    up = series.upstream
    return Applied(up.tag, up.tree, series.digest, replayed.base, replayed.head, pinned, replayed.reports)


class Builder:
    """A growing chain of commits, and an index of its own. commit, tree: the last one."""

    def __init__(self, scratch: Scratch, commit: str) -> None:
        self.git, self.commit = scratch, commit
        self._env = {"GIT_INDEX_FILE": str(scratch.place() / "index")}
        self.tree = self.git.line("rev-parse", f"{commit}^{{tree}}")
        self.reset()

    def commit_files(self, files: tuple[NewFile, ...]) -> None:
        """Commit cpp/'s files, if any; UsageError when upstream has such a path, as a file or as a folder."""
        theirs = self.git.paths(self.tree)
        taken = theirs | folders(theirs)
        for file in files:
            if file.path in taken or folders([file.path]) & theirs:
                raise UsageError(
                    f"upstream has {file.path} already",
                    why=f"{file.source} would replace it, and cpp/ holds new files only",
                    next_step="change upstream's file with a patch, or choose another name",
                )
        if odd := next((f for f in files if "\n" in f.path), None):
            raise UsageError(f"{odd.source} has a line break in its name")
        self.commit_blobs(blobs_of(self.git, files))

    def commit_blobs(self, blobs: Sequence[Blob]) -> None:
        """Commit new files, if any."""
        self.add_blobs(blobs)
        self.commit_index(f"{_NEW_FILES_SUBJECT}\n")

    def add_blobs(self, blobs: Sequence[Blob]) -> None:
        if lines := "".join(f"{mode} {blob}\t{path}\0" for mode, blob, path in blobs):
            self.git.run("update-index", "-z", "--index-info", input=lines, env=self._env)

    def refusal(self, diff: bytes, *flags: str) -> str | None:
        """What git says of a diff that does not apply to the index as it is; None when it does."""
        done = self.git.run("apply", "--cached", "--check", "-C1", *flags, "-", input=diff, env=self._env, check=False)
        return done.stderr if done.returncode != 0 else None

    def apply(self, diff: bytes, *flags: str) -> bool:
        """Apply a diff to the index, whole or not at all (with --3way a failure leaves the index unmerged)."""
        done = self.git.run("apply", "--cached", "-C1", *flags, "-", input=diff, env=self._env, check=False)
        return done.returncode == 0

    def diff_of(self, before: str, after: str) -> bytes:
        """The difference of two trees as a patch has it."""
        return self.git.raw("diff-tree", "-p", *DIFF_FLAGS, before, after)

    def reset(self, tree: str = "") -> None:
        """The index to a tree, or back to the last commit."""
        self.git.run("read-tree", tree or self.tree, env=self._env)

    def write_tree(self) -> str:
        """The index as a tree."""
        return self.git.line("write-tree", env=self._env)

    def commit_index(self, message: str, *, author: Authored | None = None, tree: str = "") -> str | None:
        """Commit the index (or a tree that is it) as an author's or kvtool's; None when it changes nothing."""
        tree = tree or self.write_tree()
        if tree == self.tree:
            return None
        env: dict[str, str] = {}
        if author is not None:
            env = {"GIT_AUTHOR_NAME": author.name, "GIT_AUTHOR_EMAIL": author.email, "GIT_AUTHOR_DATE": author.date}
        try:
            self.commit = self.git.line("commit-tree", tree, "-p", self.commit, env=env, input=message)
        except KvtoolError as err:
            if author is None or "invalid date format" not in err.output:
                raise
            raise UsageError(
                f"git takes {author.date!r} for no date",
                why=f"it is that of {message.partition(chr(10))[0]!r}",
                next_step="correct the Date: line of its file in patches/",
            ) from err
        self.tree = tree
        return self.commit


def replay(scratch: Scratch, base: str, series: Series) -> Replayed:
    """Base + cpp/'s files + each wanted patch. Same input, same commit ids, on every machine."""
    builder = Builder(scratch, base)
    builder.commit_files(series.files)
    missing = MissingLines()
    reports = tuple(replay_step(builder, step, missing) for step in series.steps)
    return Replayed(base, builder.commit, builder.tree, reports)


class MissingLines:
    """The lines that patches which failed did not bring: a later patch that stands on one of them is blocked."""

    def __init__(self) -> None:
        self._missing: list[tuple[str, str, frozenset[bytes]]] = []  # patch, path, lines

    def report(self, builder: Builder, patch: str, diff: bytes, failed: tuple[FailedHunk, ...]) -> PatchReport:
        """What became of a patch that does not apply; takes note of what it did not bring."""
        blocker = self._blocker(builder.git, builder.tree, diff, failed)
        for file in parse_diff(diff):
            brought = frozenset(line for piece in pieces_of(file) for line in set(piece.after) - set(piece.before))
            self._missing.append((patch, file.path, brought))
        outcome = PatchOutcome.BLOCKED if blocker else PatchOutcome.CONFLICT
        return PatchReport(patch, outcome, "", *diff_size(diff), failed, blocker)

    def _blocker(self, git: Git, tree: str, diff: bytes, failed: tuple[FailedHunk, ...]) -> str:
        """The id of the patch that a hunk in the way seems to need, or ""."""
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


def replay_step(builder: Builder, step: Step, missing: MissingLines, *, strict: bool = False) -> PatchReport:
    """Apply one patch by its context, and commit it. strict: a hunk in another function than recorded is a conflict."""
    name, mail = step.patch.id, step.mail
    if not step.wanted:
        return PatchReport(name, PatchOutcome.SKIPPED)
    if not mail.diff:
        return PatchReport(name, PatchOutcome.EMPTY)
    if builder.apply(mail.diff):
        tree = builder.write_tree()
        moved = _moved(builder, mail, tree)
        if moved and strict:
            builder.reset()
            failed = tuple(FailedHunk(path, 0, 0, "", note) for path, note in moved)
            return missing.report(builder, name, mail.diff, failed)
        commit = builder.commit_index(mail.message, author=mail, tree=tree)
        if commit is None:
            return PatchReport(name, PatchOutcome.EMPTY)
        notes = tuple(f"{path}: {note}" for path, note in moved)
        return PatchReport(name, PatchOutcome.APPLIED, commit, *diff_size(mail.diff), moved=notes)
    if builder.refusal(mail.diff, "--reverse") is None:
        return PatchReport(name, PatchOutcome.MERGED)
    return missing.report(builder, name, mail.diff, failed_hunks(builder, mail.diff))


def failed_hunks(builder: Builder, diff: bytes) -> tuple[FailedHunk, ...]:
    """Which hunks of a diff that does not apply are in the way: each is tried alone."""
    failed: list[FailedHunk] = []
    files = parse_diff(diff)
    for file in files:
        for hunk in file.hunks:
            if (said := builder.refusal(file.head + hunk.text)) is not None:
                failed.append(FailedHunk.of(hunk, _translate_error(said)))
        if not file.hunks and (said := builder.refusal(file.head)) is not None:
            failed.append(FailedHunk(file.path, 0, 0, "", _translate_error(said)))
    # or each fits alone, and together they do not
    return tuple(failed) or (FailedHunk(files[0].path, 0, 0, "", _translate_error(builder.refusal(diff) or "")),)


def _translate_error(said: str) -> str:
    """git's words, in ours."""
    if "does not exist in index" in said or "No such file" in said:
        return "upstream has no such file"
    if "already exists" in said:
        return "upstream has this file already"
    if "patch failed" in said:
        return "upstream's lines there are not what the patch expects"
    return (said.strip().splitlines() or ["git gave no reason"])[-1].removeprefix("error: ")


def _moved(builder: Builder, mail: Mail, tree: str) -> list[tuple[str, str]]:
    """Hunks that landed in another function than the patch recorded (path, note): with one line of context, worth a
    look. Nothing for a patch with more context: its hunks are cut differently."""
    expected, actual = hunk_headings(mail.diff), hunk_headings(builder.diff_of(builder.tree, tree))
    return [
        (path, f"recorded in {was!r}, landed in {now!r}")
        for (path, was), (_, now) in zip(expected, actual, strict=False)
        if len(expected) == len(actual) and was and was != now
    ]


def conflict_error(reports: tuple[PatchReport, ...], tag: str) -> KvtoolError | None:
    """The error that a replay amounts to, or None: the first patch that conflicts, and how the others fared."""
    bad = [report for report in reports if report.in_the_way]
    if not bad:
        return None
    first, *others = bad
    also = f"; also in the way: {', '.join(report.id for report in others)}" if others else ""
    return ConflictError(
        f"patch {first.id!r} {f'loses {first.lost} on' if first.lost else 'does not go onto'} llama.cpp {tag}",
        why=("; ".join(map(str, first.failed)) or "the merge or the resolution left them out") + also,
        next_step="correct the patch (patches/README.md: resolve a conflict); the tree is as it was",
    )
