"""Try a rebase: apply the series to its own upstream, then move every patch to another upstream.

Everything happens in a temporary repository that has both trees. No checkout and no ref changes. If a patch cannot be
moved, the later patches are still tried, on the commits that could be made without it.

The result is the commit `head`. It and the commits below it are equal to those that `kvtool apply` makes after the
rebase. Every command gets its series from a SeriesContext.
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
    """Hold a resolution of a conflict by the user."""

    patch: str  # id of the patch
    parent: str  # id of the commit on which it was resolved
    tree: str  # id of the resulting git tree


@dataclass(frozen=True)
class Choices:
    """Hold the decisions of the user. Patches are named by their ids."""

    resolved: tuple[Resolution, ...] = ()
    skip: tuple[str, ...] = ()  # patches to leave out from the new upstream on
    drop: tuple[str, ...] = ()  # patches to remove from the series
    accept: tuple[str, ...] = ()  # patches that may lose changed lines in the rebase

    @property
    def named(self) -> tuple[str, ...]:
        """Return all patches that the user named."""
        return self.skip + self.drop + self.accept

    def merged_with(self, more: "Choices") -> "Choices":
        """Return the decisions of both objects together."""
        return replace(self, skip=self.skip + more.skip, drop=self.drop + more.drop, accept=self.accept + more.accept)


@dataclass(frozen=True)
class ConflictStop:
    """Describe the first patch that needs the user."""

    id: str = ""
    parent: str = ""  # id of the commit on which the user must resolve it
    origin: str = ""  # id of the patch's commit on the old upstream, "" if there is none
    commit: str = ""  # id of the moved patch if it only lost lines, "" for a conflict


@dataclass(frozen=True)
class Rehearsal(Replayed):
    """Hold the result of a trial rebase of the series to `tag`.

    `complete` is True if every patch was moved or left out on purpose, and none lost lines without the user's consent.
    `head` and `tree` have every patch that could be moved.

    locked: the series on the old upstream
    stop: the first patch that needs the user, None if the rebase is complete
    seconds: the duration, including the time for the old upstream
    astray: a note for each folder that has files of cpp/ and that upstream no longer has
    """

    tag: str
    locked: Replayed
    stop: ConflictStop | None
    seconds: float
    astray: tuple[str, ...] = ()


class SeriesContext:
    """Load the series of a project, apply it to the locked upstream, or move it to another upstream.

    lock: the project's upstream.lock, to which more tags can be added in memory
    known: the ids of commits of unpatched upstream, by tag, for the tags that were fetched so far
    listed: the tags of the project's upstream.lock
    groups: the groups of the series that are used; empty for all
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
        """Return a context with only some groups of the series."""
        other = copy.copy(self)
        other.groups = tuple(groups)
        return other

    def find(self, tag: str) -> Upstream:
        """Fetch an upstream tag, which need not be in the lock."""
        self.lock, fetched = sources.ensure_tag(self.cache, self.lock, tag, self.console, self.mirror)
        self.known[tag] = fetched.commit
        return self.lock.upstream(tag)

    def base(self, upstream: Upstream) -> str:
        """Return the commit of an unpatched upstream. Fetch it if it is not known yet."""
        if upstream.tag not in self.known:
            self.known[upstream.tag] = self._fetch(upstream)
        return self.known[upstream.tag]

    def _fetch(self, upstream: Upstream) -> str:
        """Fetch an upstream.

        The locked upstream is fetched from the usual sources first, because the mirror may not have it.
        """
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
        """Move every patch to another upstream.

        Raises ConflictError if the series does not apply to the upstream to start from. Raises UsageError if the new
        upstream has the path of a file of cpp/. Raises TreeError if a resolution was made for another state of the
        patches.

        choices: the decisions of the user in a rebase. With None, from/until alone decide which patches are tried. A
            bisection needs None.
        keep_going: False stops at the first patch that cannot be moved
        made: the series on the upstream to start from; None for the locked upstream
        """
        old = self.lock.upstream()
        here, there = self.base(old), self.base(upstream)
        start, series = time.monotonic(), self.series(upstream)
        builder = Builder(scratch, there)
        builder.commit_files(series.files)  # if upstream has the path of a file of cpp/, this fails within a second
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
        """Apply the series to an upstream in a temporary repository."""
        if upstream.tree != self.lock.upstream().tree:
            return self.rehearse(scratch, upstream)
        return replay(scratch, self.base(upstream), self.series(upstream))


def _orphaned_folders(git: Scratch, series: Series, here: str, there: str) -> tuple[str, ...]:
    """Return a note for each folder that has files of cpp/ and that upstream no longer has."""
    ours = {_folder(file.path) for file in series.files}
    gone = sorted(ours & folders(git.paths(here)) - folders(git.paths(there)))
    renamed = git.renamed(here, there) if gone else {}
    found = []
    for folder in gone:
        names = Counter(_folder(new) for old, new in renamed.items() if _folder(old) == folder)
        most = f" (most of its files are in {names.most_common(1)[0][0]})" if names else ""
        found.append(f"upstream has no {folder} any more{most}; only the files of cpp/{folder} would be in this folder")
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
        self._to_merge: dict[str, str] = {}  # by patch id, the commit that the user has to merge by hand

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
        """Return a note if upstream seems to have reverted a patch that it once had.

        The patch has `until`, because the old upstream contains its change. If the new upstream does not contain the
        change, upstream has reverted it. Without the note, nobody would notice that the effect of the patch is lost.
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
            f"look at it: upstream had this patch from {until} on, but has reverted it; to apply it again, remove its "
            "until from series.toml, then kvtool apply",
        )

    def _try(self, loaded: LoadedPatch, origin: Commit | None) -> PatchReport:
        """Try a patch for which from/until do not say whether the new upstream needs it. Keep it if it applies."""
        name, before, missing = loaded.patch.id, (self.builder.commit, self.builder.tree), self._missing
        # if this patch fails, no later patch must be reported as blocked by this patch
        self._missing = MissingLines()
        report = self._place(replace(loaded, wanted=True), origin)
        self._missing = missing
        here = report.commit and not report.needs_user
        if not here:
            self.builder.commit, self.builder.tree = before
            report = PatchReport(name, PatchOutcome.SKIPPED)
            if not loaded.wanted:
                return report
        needed = "not needed" if loaded.wanted else "needed"
        place = "it applies here" if here else "it does not apply here"
        note = f"look at it: this patch is {needed} from {self._unsure[name]} on, the next tag of the lock, and {place}"
        return replace(report, moved=(*report.moved, note))

    def _place(self, loaded: LoadedPatch, origin: Commit | None) -> PatchReport:
        name = loaded.patch.id
        if made := next((made for made in self._choices.resolved if made.patch == name), None):
            if made.parent != self.builder.commit:
                raise TreeError(
                    f"the resolution of patch {name!r} was made on another tree",
                    why="the patches before it were moved in another way then, perhaps by another version of kvtool or "
                    "git",
                    next_step="kvtool rebase --abort, then start again; git rerere repeats your resolutions",
                )
            notes = review_resolution(self.builder, origin, made.tree) if origin else ()
            return self._take(loaded, made.tree, notes, origin)
        self.builder.reset()
        if origin is None:  # the patch is not applied to the locked upstream, so there is no commit to merge from
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
    """Return how many hunks or lines a patch has lost in a move, as text; "" if the patch has lost nothing.

    A hunk is here a run of adjacent changed lines.

    was: the diff of the patch before the move
    now: the diff of the patch after the move
    """
    hunks, hunks_now = count_runs(was), count_runs(now)
    lines, lines_now = (sum(diff_size(diff)[1:]) for diff in (was, now))
    if was and not now and not hunks:
        return "all that it changes"  # a change of the mode, or a binary file
    if hunks_now >= hunks and lines_now >= lines:
        return ""
    return f"{max(hunks - hunks_now, 0)} of {hunks} hunks, {max(lines - lines_now, 0)} of {lines} lines"
