"""Where a patch stops applying: judge one upstream by a rehearsal, and search a row of them. Pure but for the trial."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtool.result import PatchOutcome
from kvtool.tree.rehearse import Rehearsal
from kvtool.tree.replay import FailedHunk


class Verdict(enum.StrEnum):
    """As in git bisect. skip: this upstream cannot tell."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True)
class Trial:
    """One upstream tried. outcome: what became of the patch there, "" when that is not known; why: for bad and skip."""

    tag: str
    verdict: Verdict
    outcome: str
    why: str
    failed: tuple[FailedHunk, ...]
    seconds: float


@dataclass(frozen=True)
class Bisection:
    """What a search found, in the order from good to bad.

    first_bad: the first upstream where the patch fails, as far as those between could be tried; suspects: skipped ones
    between last_good and first_bad, each of which may be the first bad one instead.
    """

    last_good: str
    first_bad: str
    suspects: tuple[str, ...]
    trials: tuple[Trial, ...]


_VERDICTS = {
    PatchOutcome.APPLIED: Verdict.GOOD,
    PatchOutcome.MERGED: Verdict.GOOD,
    PatchOutcome.CONFLICT: Verdict.BAD,
    PatchOutcome.EMPTY: Verdict.BAD,
}


def judge(rehearsal: Rehearsal, patch: str) -> Trial:
    """good: it applies, or upstream has it; bad: a conflict, or it lost lines; skip: blocked, or not wanted there."""
    report = next(report for report in rehearsal.reports if report.id == patch)
    verdict = _VERDICTS.get(report.outcome, Verdict.SKIP)
    why = "; ".join(str(hunk) for hunk in report.failed)
    if report.lost:
        verdict, why = Verdict.BAD, f"it lost {report.lost}"
    elif report.outcome is PatchOutcome.BLOCKED:
        why = f"blocked by {report.blocked_by}: {why}"
    elif report.outcome is PatchOutcome.SKIPPED:
        why = "from/until in series.toml exclude it"
    elif report.outcome is PatchOutcome.EMPTY:
        why = "it changes nothing there"
    return Trial(rehearsal.tag, verdict, str(report.outcome), why, report.failed, rehearsal.seconds)


def search(tags: Sequence[str], attempt: Callable[[str], Trial], ends: tuple[Trial, Trial]) -> Bisection:
    """The first bad one of tags, whose first is good and whose last is bad; ends: their trials.

    As git bisect does it supposes that everything behind a bad one is bad. One that must be skipped gives way to its
    neighbours.
    """
    trials = {ends[0].tag: ends[0], ends[1].tag: ends[1]}
    good, bad = 0, len(tags) - 1
    while untried := [n for n in range(good + 1, bad) if tags[n] not in trials]:
        middle = min(untried, key=lambda n: abs(2 * n - good - bad))
        trial = trials[tags[middle]] = attempt(tags[middle])
        if trial.verdict is Verdict.GOOD:
            good = middle
        elif trial.verdict is Verdict.BAD:
            bad = middle
    ordered = tuple(trials[tag] for tag in tags if tag in trials)
    return Bisection(tags[good], tags[bad], tuple(tags[good + 1 : bad]), ordered)
