"""Build the commits of a series on an upstream, in a temporary index: no checkout is touched, nothing is moved.

A conflict is an outcome, not an exception: every patch is tried, and each gets a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kvtool.errors import ConflictError, KvtoolError, UsageError
from kvtool.gitcmd import Git
from kvtool.result import PatchOutcome
from kvtool.tree.mailbox import DIFF_FLAGS, Hunk, Mail, changed_lines, parse_diff
from kvtool.tree.series import NewFile, Series, Step

NEW_FILES_SUBJECT = "kvtool: add the files of cpp/"


@dataclass(frozen=True)
class FailedHunk:
    """A hunk that found no place. header: "@@ -10,3 +10,5 @@ function"; line: where it was expected."""

    path: str
    number: int
    total: int
    header: str
    reason: str

    def __str__(self) -> str:
        hunk = f" hunk {self.number} of {self.total} ({self.header})" if self.number else ""
        return f"{self.path}{hunk}: {self.reason}"


@dataclass(frozen=True)
class PatchReport:
    """What became of one patch.

    commit: "" unless it was applied; hunks, added, removed: its size; failed: the hunks in the way (conflict, blocked);
    blocked_by: id of the patch it seems to need; moved: hunks that landed in another function than recorded.
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


@dataclass(frozen=True)
class Replayed:
    """The commits of a series. head is the last commit; complete: no conflict on the way."""

    base: str
    head: str
    tree: str
    reports: tuple[PatchReport, ...]

    @property
    def complete(self) -> bool:
        return not any(r.outcome in (PatchOutcome.CONFLICT, PatchOutcome.BLOCKED) for r in self.reports)

    @property
    def upstream_lines(self) -> int:
        """Changed lines in upstream's own files, all patches together."""
        return sum(r.added + r.removed for r in self.reports)


@dataclass
class Builder:
    """An index of its own and a growing chain of commits in one repository. scratch: a directory for the index."""

    git: Git
    scratch: Path
    commit: str
    tree: str = field(init=False)

    def __post_init__(self) -> None:
        self._env = {"GIT_INDEX_FILE": str(self.scratch / "index")}
        self.tree = self.git.line("rev-parse", f"{self.commit}^{{tree}}")
        self.git.run("read-tree", self.commit, env=self._env)

    def add_files(self, files: tuple[NewFile, ...]) -> None:
        """Put cpp/'s files into the index; UsageError when upstream has such a path, as a file or as a folder."""
        if not files:
            return
        listed = self.git.run("ls-tree", "-r", "-z", "--name-only", self.tree).stdout.split("\0")
        theirs = set(listed)
        folders = {str(parent) for path in listed for parent in PurePosixPath(path).parents}
        for file in files:
            parents = {str(parent) for parent in PurePosixPath(file.path).parents}
            if file.path in theirs or file.path in folders or parents & theirs:
                raise UsageError(
                    f"upstream has {file.path} already",
                    why=f"{file.source} would replace it, and cpp/ holds new files only",
                    next_step="change upstream's file with a patch, or choose another name",
                )
        if odd := next((f for f in files if "\n" in f.path), None):
            raise UsageError(f"{odd.source} has a line break in its name")
        names = "".join(f"{file.source.absolute()}\n" for file in files)
        ids = self.git.run("hash-object", "-w", "--no-filters", "--stdin-paths", input=names).stdout.split()
        modes = ("100755" if file.executable else "100644" for file in files)
        self.add_blobs([(mode, blob, file.path) for mode, blob, file in zip(modes, ids, files, strict=True)])

    def add_blobs(self, blobs: Sequence[tuple[str, str, str]]) -> None:
        """Put (mode, blob id, path) entries into the index."""
        lines = "".join(f"{mode} {blob}\t{path}\0" for mode, blob, path in blobs)
        if lines:
            self.git.run("update-index", "-z", "--index-info", input=lines, env=self._env)

    def fits(self, diff: bytes, *flags: str) -> tuple[bool, str]:
        """Whether a diff applies to the index as it is; what git said otherwise."""
        done = self.git.run("apply", "--cached", "--check", "-C1", *flags, "-", input=diff, env=self._env, check=False)
        return done.returncode == 0, done.stderr

    def apply(self, diff: bytes, *flags: str) -> bool:
        """Apply a diff to the index, whole or not at all (with --3way a failure leaves the index unmerged)."""
        done = self.git.run("apply", "--cached", "-C1", *flags, "-", input=diff, env=self._env, check=False)
        return done.returncode == 0

    def reset(self) -> None:
        """The index back to the last commit."""
        self.git.run("read-tree", self.commit, env=self._env)

    def commit_index(self, message: str, *, mail: Mail | None = None) -> str | None:
        """Commit the index with the mail's author (or kvtool's); None when it changes nothing."""
        tree = self.git.line("write-tree", env=self._env)
        if tree == self.tree:
            return None
        env: dict[str, str] = {}
        if mail is not None:
            env = {"GIT_AUTHOR_NAME": mail.name, "GIT_AUTHOR_EMAIL": mail.email, "GIT_AUTHOR_DATE": mail.date}
        self.commit = self.git.line("commit-tree", tree, "-p", self.commit, env=env, input=message)
        self.tree = tree
        return self.commit


def replay(git: Git, base: str, series: Series, scratch: Path) -> Replayed:
    """Base + cpp/'s files + each wanted patch. Same input, same commit ids, on every machine."""
    builder = Builder(git, scratch, base)
    builder.add_files(series.files)
    builder.commit_index(f"{NEW_FILES_SUBJECT}\n")
    reports: list[PatchReport] = []
    trouble: dict[str, str] = {}  # path -> id of the first patch that left it unpatched
    for step in series.steps:
        report = _step(builder, step, trouble)
        reports.append(report)
        if report.failed:
            for file in parse_diff(step.mail.diff):
                trouble.setdefault(file.path, step.patch.id)
    return Replayed(base, builder.commit, builder.tree, tuple(reports))


def _step(builder: Builder, step: Step, trouble: dict[str, str]) -> PatchReport:
    patch, mail = step.patch, step.mail
    files = parse_diff(mail.diff)
    if not step.wanted:
        return PatchReport(patch.id, PatchOutcome.SKIPPED)
    added, removed = changed_lines(mail.diff)
    hunks = sum(len(f.hunks) for f in files)
    if not files:
        return PatchReport(patch.id, PatchOutcome.EMPTY)
    if builder.apply(mail.diff):
        commit = builder.commit_index(mail.message, mail=mail)
        if commit is None:
            return PatchReport(patch.id, PatchOutcome.EMPTY)
        return PatchReport(patch.id, PatchOutcome.APPLIED, commit, hunks, added, removed, moved=_moved(builder, mail))
    if builder.fits(mail.diff, "--reverse")[0]:
        return PatchReport(patch.id, PatchOutcome.MERGED)
    failed = failed_hunks(builder, mail.diff)
    blocker = next((trouble[hunk.path] for hunk in failed if hunk.path in trouble), "")
    outcome = PatchOutcome.BLOCKED if blocker else PatchOutcome.CONFLICT
    return PatchReport(patch.id, outcome, "", hunks, added, removed, failed, blocker)


def failed_hunks(builder: Builder, diff: bytes) -> tuple[FailedHunk, ...]:
    """Which hunks of a diff that does not apply are in the way: each is tried alone."""
    failed: list[FailedHunk] = []
    for file in parse_diff(diff):
        for hunk in file.hunks:
            fits, said = builder.fits(file.head + hunk.text)
            if not fits:
                header = f"{hunk.header} {hunk.heading}".strip()
                failed.append(FailedHunk(file.path, hunk.number, hunk.total, header, _reason(said)))
        if not file.hunks:
            fits, said = builder.fits(file.head)
            if not fits:
                failed.append(FailedHunk(file.path, 0, 0, "", _reason(said)))
    if not failed:  # each fits alone, together they do not
        said = builder.fits(diff)[1]
        failed.append(FailedHunk(parse_diff(diff)[0].path, 0, 0, "", _reason(said)))
    return tuple(failed)


def _reason(said: str) -> str:
    """git's words, in ours."""
    if "does not exist in index" in said or "No such file" in said:
        return "upstream has no such file"
    if "already exists" in said:
        return "upstream has this file already"
    if "patch failed" in said:
        return "upstream's lines there are not what the patch expects"
    return (said.strip().splitlines() or ["git gave no reason"])[-1].removeprefix("error: ")


def _moved(builder: Builder, mail: Mail) -> tuple[str, ...]:
    """Hunks that landed in another function than the patch recorded: with one line of context, worth a look."""

    def hunks(diff: bytes) -> list[Hunk]:
        return [hunk for file in parse_diff(diff) for hunk in file.hunks]

    expected = hunks(mail.diff)
    done = builder.git.run("diff-tree", "-p", "--no-commit-id", *DIFF_FLAGS, builder.commit)
    actual = hunks(done.stdout.encode("utf-8", "surrogateescape"))
    if len(expected) != len(actual):  # written with more context, so its hunks are cut differently
        return ()
    return tuple(
        f"{was.path}: recorded in {was.heading!r}, landed in {now.heading!r}"
        for was, now in zip(expected, actual, strict=True)
        if was.heading and was.heading != now.heading
    )


def conflict_error(reports: tuple[PatchReport, ...], tag: str) -> KvtoolError | None:
    """The error that a replay amounts to, or None: the first patch that conflicts, and how the others fared."""
    bad = [r for r in reports if r.outcome in (PatchOutcome.CONFLICT, PatchOutcome.BLOCKED)]
    if not bad:
        return None
    others = "" if len(bad) == 1 else f"; {len(bad) - 1} more do not apply: {', '.join(r.id for r in bad[1:])}"
    return ConflictError(
        f"patch {bad[0].id!r} does not apply to llama.cpp {tag}",
        why="; ".join(str(hunk) for hunk in bad[0].failed) + others,
        next_step="correct the patch (patches/README.md: resolve a conflict); the tree is as it was",
    )
