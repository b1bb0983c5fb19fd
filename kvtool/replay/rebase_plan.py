"""Rehearse a rebase: build the series on its own upstream, then move every patch onto another upstream.

Everything happens in a scratch repository that sees both trees. No checkout and no ref changes. A patch that cannot be
moved does not hide the others: each later patch is tried on the commits that could be built without it.

`head` is the result: its commits are equal to the commits that `kvtool apply` makes after the rebase. Every command
gets the series on an upstream from a SeriesContext.
"""

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Self

from kvtool.console import Console
from kvtool.errors import ConflictError, NetworkError, TreeError, UsageError
from kvtool.gitcmd import Scratch, folders
from kvtool.project import Project, place_of
from kvtool.replay.apply import (
    Builder,
    Commit,
    MissingLines,
    PatchReport,
    Replayed,
    commits_of,
    conflict_error,
    is_applied_already,
    replay,
    replay_patch,
)
from kvtool.replay.merge import cherry_pick, has_every_hunk, review_resolution
from kvtool.result import PatchOutcome
from kvtool.series.patchfile import count_runs, diff_size
from kvtool.series.series import LoadedPatch, Series, load_series, undecided_patches
from kvtool.upstream import sources
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Upstream, load_lock


@dataclass(frozen=True)
class Resolution:
    """A conflict that the user resolved."""

    patch: str  # id
    parent: str  # commit on which it was resolved
    tree: str  # tree id of the result


@dataclass(frozen=True)
class Choices:
    """The decisions of the user. Patches are named by id."""

    resolved: tuple[Resolution, ...] = ()
    skip: tuple[str, ...] = ()  # leave these out from this upstream on
    drop: tuple[str, ...] = ()  # remove these from the series
    accept: tuple[str, ...] = ()  # these may lose lines

    @property
    def named(self) -> tuple[str, ...]:
        """Return all patches that the user named."""
        return self.skip + self.drop + self.accept

    def merged_with(self, more: "Choices") -> "Choices":
        """Return the union of both decisions."""
        return replace(self, skip=self.skip + more.skip, drop=self.drop + more.drop, accept=self.accept + more.accept)


@dataclass(frozen=True)
class ConflictStop:
    """The first patch that needs the user."""

    id: str = ""
    parent: str = ""  # commit on which to resolve it
    origin: str = ""  # the patch as a commit on the old upstream, "" if there is none
    commit: str = ""  # the moved patch if it only lost lines, "" for a conflict


@dataclass(frozen=True)
class Rehearsal(Replayed):
    """The result of a trial rebase of the series onto `tag`.

    complete: every patch is placed or left out on purpose, and no patch lost lines without the user's consent
    tree, head: the result, with every patch that could be moved
    locked: the series on the old upstream
    stop: None if complete
    seconds: duration, including the locked base
    astray: a hint for each folder with files of cpp/ that upstream no longer has
    """

    tag: str
    locked: Replayed
    stop: ConflictStop | None
    seconds: float
    astray: tuple[str, ...] = ()


class SeriesContext:
    """The series of a project, its lock and cache: build it on the locked upstream, or move it to another upstream.

    lock: the project's lock, which may learn more tags
    known: base commits by tag, fetched on demand
    listed: the tags of the project's lock
    groups: groups of every series here, empty for all
    """

    def __init__(
        self, project: Project, console: Console, mirror: str | None = None, groups: Sequence[str] = ()
    ) -> None:
        self.project, self.console, self.mirror = project, console, mirror and place_of(mirror)
        self.groups = tuple(groups)
        self.lock, self.cache = load_lock(project.lock), Cache(project.cache)
        self.known: dict[str, str] = {}
        self.listed = frozenset(self.lock.upstreams)

    def with_project(self, project: Project) -> Self:
        """Return a context for another copy of the project."""
        other = copy.copy(self)
        other.project = project
        return other

    def with_groups(self, groups: Sequence[str]) -> Self:
        """Return the same for some groups of the series."""
        other = copy.copy(self)
        other.groups = tuple(groups)
        return other

    def find(self, tag: str) -> Upstream:
        """Fetch an upstream that need not be in the lock."""
        self.lock, fetched = sources.ensure_tag(self.cache, self.lock, tag, self.console, self.mirror)
        self.known[tag] = fetched.commit
        return self.lock.upstream(tag)

    def base(self, upstream: Upstream) -> str:
        """Return the base commit of an upstream, fetching it if necessary."""
        if upstream.tag not in self.known:
            self.known[upstream.tag] = self._fetch(upstream)
        return self.known[upstream.tag]

    def _fetch(self, upstream: Upstream) -> str:
        """Fetch an upstream. Try the mirror last for the locked upstream, because the mirror may not have it."""
        if self.mirror and upstream.tag == self.lock.current:
            with contextlib.suppress(NetworkError, UsageError):
                return sources.ensure(self.cache, self.lock, upstream, self.console).commit
        return sources.ensure(self.cache, self.lock, upstream, self.console, self.mirror).commit

    def series(self, upstream: Upstream) -> Series:
        """Load the series for an upstream."""
        return load_series(self.project, self.lock, upstream, self.groups)

    def rehearse(
        self,
        scratch: Scratch,
        upstream: Upstream,
        *,
        choices: Choices | None = None,
        keep_going: bool = True,
        made: Replayed | None = None,
    ) -> Rehearsal:
        """Move every patch to another upstream, from the locked one or from the one where it was `made`.

        choices: of a rebase; None follows from/until literally (a bisection asks about one patch)
        keep_going: if False, end with the first patch that cannot be moved

        ConflictError: the series does not apply to its own upstream. UsageError: the new upstream has a file of cpp/.
        TreeError: a resolution was made for another state.
        """
        old = self.lock.upstream()
        here, there = self.base(old), self.base(upstream)
        start, series = time.monotonic(), self.series(upstream)
        builder = Builder(scratch, there)
        builder.commit_files(series.files)  # fails within a second if upstream has such a file
        locked = made or replay(scratch, here, self.series(old))
        if error := conflict_error(locked.reports, old.label):
            raise ConflictError(
                f"the series does not apply to the upstream it is locked to: {error.what}",
                why=error.why,
                next_step="kvtool apply prints the details; correct it before moving to another upstream",
            )
        commits = {commit.id: commit for commit in commits_of(scratch, locked.base, locked.head)}
        origins = {report.id: commits[report.commit] for report in locked.reports if report.commit}
        told = choices is None or upstream.tag in self.listed
        unsure = {} if told else undecided_patches(series, self.lock, upstream)
        mover = _PatchMover(builder, origins, choices or Choices(), unsure, locked)
        for loaded in series.patches:
            mover.move(loaded)
            if mover.stop and not keep_going:
                break
        result = (there, mover.builder.commit, mover.builder.tree, tuple(mover.reports))
        astray = _orphaned_folders(scratch, series, here, there)
        return Rehearsal(*result, upstream.tag, locked, mover.stop, time.monotonic() - start, astray)

    def build(self, scratch: Scratch, upstream: Upstream) -> Replayed:
        """Build the series on an upstream in a scratch repository."""
        if upstream.tree != self.lock.upstream().tree:
            return self.rehearse(scratch, upstream)
        return replay(scratch, self.base(upstream), self.series(upstream))


def _orphaned_folders(git: Scratch, series: Series, here: str, there: str) -> tuple[str, ...]:
    """Return a note for each folder that has files of cpp/ but no longer exists in upstream."""
    ours = {_folder(file.path) for file in series.files}
    gone = sorted(ours & folders(git.paths(here)) - folders(git.paths(there)))
    renamed = git.renamed(here, there) if gone else {}
    found = []
    for folder in gone:
        names = Counter(_folder(new) for old, new in renamed.items() if _folder(old) == folder)
        most = f" (most of its files are in {names.most_common(1)[0][0]})" if names else ""
        found.append(f"upstream has no {folder} any more{most}; only the files of cpp/{folder} are left there")
    return tuple(found)


def _folder(path: str) -> str:
    return str(PurePosixPath(path).parent)


class _PatchMover:
    """Move the patches one after the other, and collect their reports."""

    def __init__(
        self,
        builder: Builder,
        origins: Mapping[str, Commit],
        choices: Choices,
        unsure: Mapping[str, str],
        locked: Replayed,
    ) -> None:
        self.builder, self._unsure, self._locked = builder, unsure, locked
        self.reports: list[PatchReport] = []
        self.stop: ConflictStop | None = None
        self._origins, self._choices, self._missing = origins, choices, MissingLines()
        self._to_merge: dict[str, str] = {}  # by patch, the commit that a person has to merge

    def move(self, loaded: LoadedPatch) -> None:
        start, parent = time.monotonic(), self.builder.commit
        origin = self._origins.get(loaded.patch.id)
        report = self._move(loaded, origin)
        self.reports.append(replace(report, seconds=round(time.monotonic() - start, 3)))
        if self.stop is None and report.needs_user:
            commit = report.commit or (parent if report.lost else "")  # a patch that lost everything has no commit
            merge = self._to_merge.get(loaded.patch.id) or (origin.id if origin else "")
            self.stop = ConflictStop(loaded.patch.id, parent, merge, commit)

    def _move(self, loaded: LoadedPatch, origin: Commit | None) -> PatchReport:
        name = loaded.patch.id
        if name in self._choices.drop:
            return PatchReport(name, PatchOutcome.DROPPED)
        if name in self._choices.skip or not (loaded.wanted or name in self._unsure):
            return PatchReport(name, PatchOutcome.SKIPPED, moved=self._note_if_reverted(loaded))
        return (self._try if name in self._unsure else self._place)(loaded, origin)

    def _note_if_reverted(self, loaded: LoadedPatch) -> tuple[str, ...]:
        """Return a note if the old upstream has a patch that ended with `until`, and the new upstream does not.

        Then upstream has reverted the patch, and the series would lose its effect without a word.
        """
        until, name = loaded.patch.until, loaded.patch.id
        was_skipped = any(r.id == name and r.outcome is PatchOutcome.SKIPPED for r in self._locked.reports)
        if not (until and was_skipped and loaded.mail.diff) or name in self._choices.named:
            return ()
        if not is_applied_already(Builder(self.builder.git, self._locked.head), loaded.mail):
            return ()
        before = self.builder.commit, self.builder.tree
        self.builder.reset()
        report = replay_patch(self.builder, replace(loaded, wanted=True), MissingLines(), strict=True)
        self.builder.commit, self.builder.tree = before
        if report.outcome is not PatchOutcome.APPLIED:
            return ()
        return (
            f"look at it: upstream had it from {until} on, and has it no longer; to carry it again, remove its until "
            "from series.toml, then kvtool apply",
        )

    def _try(self, loaded: LoadedPatch, origin: Commit | None) -> PatchReport:
        """Try a patch whose need the lock does not decide: apply it if it has a place."""
        name, before, missing = loaded.patch.id, (self.builder.commit, self.builder.tree), self._missing
        self._missing = MissingLines()  # an optional patch blocks no later patch
        report = self._place(replace(loaded, wanted=True), origin)
        self._missing = missing
        here = report.commit and not report.needs_user
        if not here:
            self.builder.commit, self.builder.tree = before
            report = PatchReport(name, PatchOutcome.SKIPPED)
            if not loaded.wanted:
                return report
        needed = "not needed" if loaded.wanted else "needed"
        place = "its place is here" if here else "it has no place here"
        note = f"look at it: it is {needed} from {self._unsure[name]} on, the lock's next one, and {place}"
        return replace(report, moved=(*report.moved, note))

    def _place(self, loaded: LoadedPatch, origin: Commit | None) -> PatchReport:
        name = loaded.patch.id
        if made := next((made for made in self._choices.resolved if made.patch == name), None):
            if made.parent != self.builder.commit:
                raise TreeError(
                    f"the resolution of patch {name!r} was made on another tree",
                    why="the patches before it are moved otherwise than then, as another version of kvtool or git does",
                    next_step="kvtool rebase --abort, then start again; rerere remembers the resolutions",
                )
            notes = review_resolution(self.builder, origin, made.tree) if origin else ()
            return self._take(loaded, made.tree, notes, origin)
        self.builder.reset()
        if origin is None:  # the locked upstream does not want it, or has it: there is nothing to merge from
            return replay_patch(self.builder, loaded, self._missing, strict=True)
        attempt = cherry_pick(self.builder, origin)
        if attempt.tree is None:
            self._to_merge[name] = attempt.commit
            report = self._missing.record_failure(self.builder, name, origin.diff, attempt.failed)
            return replace(report, moved=attempt.notes)
        if attempt.tree == self.builder.tree:
            return PatchReport(name, PatchOutcome.MERGED)
        return self._take(loaded, attempt.tree, attempt.notes, origin)

    def _take(self, loaded: LoadedPatch, tree: str, notes: tuple[str, ...], origin: Commit | None) -> PatchReport:
        before = self.builder.tree
        commit = self.builder.commit_index(loaded.mail.message, author=loaded.mail, tree=tree)
        diff = self.builder.diff_of(before, tree) if commit else b""
        lost = lost_changes(origin.diff if origin else loaded.mail.diff, diff)
        if lost and origin and has_every_hunk(self.builder.git, origin, before, tree):
            notes, lost = notes or ("upstream already has a part of it",), ""
        if lost and loaded.patch.id in self._choices.accept:
            notes, lost = (*notes, f"accepted: it lost {lost}"), ""
        outcome = PatchOutcome.APPLIED if commit else PatchOutcome.EMPTY
        return PatchReport(loaded.patch.id, outcome, commit or "", *diff_size(diff), moved=notes, lost=lost)


def lost_changes(was: bytes, now: bytes) -> str:
    """Describe how much of a patch was lost, "" for nothing. Hunks are counted as runs of changed lines."""
    hunks, hunks_now = count_runs(was), count_runs(now)
    lines, lines_now = (sum(diff_size(diff)[1:]) for diff in (was, now))
    if was and not now and not hunks:
        return "all that it changes"  # a mode change or a binary file
    if hunks_now >= hunks and lines_now >= lines:
        return ""
    return f"{max(hunks - hunks_now, 0)} of {hunks} hunks, {max(lines - lines_now, 0)} of {lines} lines"
