"""Rehearse a rebase: the series on the upstream it was made on, then every patch moved onto another one.

Everything happens in temporary indexes of one repository that has both trees; no checkout is touched, no ref is moved.
Give it `git.quarantined(scratch)` and not even an object stays. A patch that cannot be moved does not hide the others:
each later one is tried on what could be built without it.

    rehearsal = rehearse(git, Based(series_old, commit_old), Based(series_new, commit_new), scratch)

The two series are the same files, loaded for two upstreams (from/until differ). Whoever wants the result as it will be
applied takes `head`: its commits are those that `kvtool apply` makes after the rebase.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtool.errors import ConflictError, TreeError
from kvtool.gitcmd import Git
from kvtool.result import PatchOutcome
from kvtool.tree.mailbox import changed_lines, parse_diff
from kvtool.tree.merge import Origin, Picked, changes, cherry_pick, diff_of
from kvtool.tree.placement import runs
from kvtool.tree.replay import (
    NEW_FILES_SUBJECT,
    Builder,
    PatchReport,
    Replayed,
    Trouble,
    conflict_error,
    replay,
    replay_step,
)
from kvtool.tree.series import Series, Step


@dataclass(frozen=True)
class Based:
    """A series and the base commit of its upstream, which the repository has. made: the commits, if it has them too."""

    series: Series
    commit: str
    made: Replayed | None = None


@dataclass(frozen=True)
class Resolution:
    """A conflict that a person resolved. parent: the commit it was resolved on; tree: the result."""

    parent: str
    tree: str


@dataclass(frozen=True)
class Choices:
    """What a person decided, by patch id.

    skip: leave it out for this upstream; drop: for good; accept: it may lose lines.
    """

    resolved: Mapping[str, Resolution] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    drop: frozenset[str] = frozenset()
    accept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stop:
    """The first patch that needs a person. parent: the commit to resolve it on; origin: the patch as a commit.

    commit: the moved patch when it only lost lines, "" for a conflict.
    """

    id: str
    parent: str
    origin: Origin | None
    commit: str = ""


@dataclass(frozen=True)
class Rehearsal:
    """What a rebase of the series onto `tag` would do.

    tree, head: the result, with whatever could be moved; base: the commit it stands on; locked: the series on the old
    upstream; stop: None when complete; seconds: all of it, the locked base included.
    """

    tag: str
    tree: str
    head: str
    base: str
    locked: Replayed
    reports: tuple[PatchReport, ...]
    stop: Stop | None
    seconds: float

    @property
    def complete(self) -> bool:
        """Every patch has its place (or is left out on purpose), and none lost lines that nobody accepted."""
        return self.stop is None


def rehearse(
    git: Git, old: Based, new: Based, scratch: Path, *, choices: Choices | None = None, keep_going: bool = True
) -> Rehearsal:
    """Move every patch. keep_going False: end with the first that cannot be moved.

    ConflictError when the series does not even apply to its own upstream; UsageError when the new one has a file of
    cpp/; TreeError when a resolution was made for another state.
    """
    start = time.monotonic()
    for name in ("old", "new"):
        (scratch / name).mkdir()
    locked = old.made or replay(git, old.commit, old.series, scratch / "old")
    if error := conflict_error(locked.reports, old.series.upstream.tag):
        raise ConflictError(
            f"the series does not apply to the upstream it is locked to: {error.what}",
            why=error.why,
            next_step="kvtool apply says more; correct it before moving to another upstream",
        )
    mover = _Mover(Builder(git, scratch / "new", new.commit), origins(git, locked), choices or Choices())
    mover.builder.add_files(new.series.files)
    mover.builder.commit_index(f"{NEW_FILES_SUBJECT}\n")
    for step in new.series.steps:
        mover.step(step)
        if mover.stop and not keep_going:
            break
    return Rehearsal(
        new.series.upstream.tag,
        mover.builder.tree,
        mover.builder.commit,
        new.commit,
        locked,
        tuple(mover.reports),
        mover.stop,
        time.monotonic() - start,
    )


def origins(git: Git, locked: Replayed) -> dict[str, Origin]:
    """Each patch that the locked base has, as a commit with its parent and diff; one git call for all."""
    found = changes(git, locked.base, locked.head)
    return {report.id: found[report.commit] for report in locked.reports if report.commit}


class _Mover:
    """The new chain of commits as it grows, and what became of each patch."""

    def __init__(self, builder: Builder, origins: Mapping[str, Origin], choices: Choices) -> None:
        self.builder = builder
        self.reports: list[PatchReport] = []
        self.stop: Stop | None = None
        self._origins, self._choices, self._trouble = origins, choices, Trouble()

    def step(self, step: Step) -> None:
        """Move one patch and take note of it."""
        start, parent = time.monotonic(), self.builder.commit
        origin = self._origins.get(step.patch.id)
        report = self._move(step, origin)
        self.reports.append(replace(report, seconds=round(time.monotonic() - start, 3)))
        if report.failed:
            self._trouble.add(step.patch.id, origin.diff if origin else step.mail.diff)
        if self.stop is None and (report.failed or report.lost):
            self.stop = Stop(step.patch.id, parent, origin, report.commit)

    def _move(self, step: Step, origin: Origin | None) -> PatchReport:
        name = step.patch.id
        if name in self._choices.drop:
            return PatchReport(name, PatchOutcome.DROPPED)
        if name in self._choices.skip or not step.wanted:
            return PatchReport(name, PatchOutcome.SKIPPED)
        if name in self._choices.resolved:
            return self._take(step, self._resolution(name), origin)
        self.builder.reset()
        if origin is None:  # the locked upstream does not want it, or has it: there is nothing to merge from
            return replay_step(self.builder, step, self._trouble, strict=True)
        attempt = cherry_pick(self.builder, origin)
        if attempt.tree is None:
            hunks, added, removed = _size(origin.diff)
            blocker = self._trouble.blocker(self.builder.git, self.builder.tree, origin.diff, attempt.failed)
            outcome = PatchOutcome.BLOCKED if blocker else PatchOutcome.CONFLICT
            return PatchReport(name, outcome, "", hunks, added, removed, attempt.failed, blocker)
        if attempt.tree == self.builder.tree:
            return PatchReport(name, PatchOutcome.MERGED)
        return self._take(step, attempt, origin)

    def _take(self, step: Step, attempt: Picked | Resolution, origin: Origin | None) -> PatchReport:
        assert attempt.tree is not None
        before = self.builder.tree
        self.builder.reset(attempt.tree)
        commit = self.builder.commit_index(step.mail.message, mail=step.mail, tree=attempt.tree)
        diff = diff_of(self.builder.git, before, attempt.tree) if commit else b""
        lost = _lost(origin.diff if origin else step.mail.diff, diff)
        notes = attempt.notes if isinstance(attempt, Picked) else ()
        if lost and step.patch.id in self._choices.accept:
            notes, lost = (*notes, f"accepted: it lost {lost}"), ""
        outcome = PatchOutcome.APPLIED if commit else PatchOutcome.EMPTY
        return PatchReport(step.patch.id, outcome, commit or "", *_size(diff), moved=notes, lost=lost)

    def _resolution(self, name: str) -> Resolution:
        made = self._choices.resolved[name]
        if made.parent != self.builder.commit:
            raise TreeError(
                f"the resolution of patch {name!r} was made on another tree",
                why="patches/ or cpp/ changed since, or an earlier patch is now left out",
                next_step="kvtool rebase --abort, then begin anew; rerere remembers the resolutions",
            )
        return made


def _size(diff: bytes) -> tuple[int, int, int]:
    """Hunks, added and removed lines."""
    return (sum(len(file.hunks) for file in parse_diff(diff)), *changed_lines(diff))


def _lost(was: bytes, now: bytes) -> str:
    """What a patch has less of than before; "" for nothing. Hunks are counted as runs of changed lines."""
    counts = []
    for diff in (was, now):
        _, added, removed = _size(diff)
        counts.append((sum(runs(file) for file in parse_diff(diff)), added + removed))
    (hunks, lines), (hunks_now, lines_now) = counts
    if hunks_now >= hunks and lines_now >= lines:
        return ""
    return f"{max(hunks - hunks_now, 0)} of {hunks} hunks, {max(lines - lines_now, 0)} of {lines} lines"
