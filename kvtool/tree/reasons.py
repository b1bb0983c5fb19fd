"""Why each patch is what it is: in the tree as the project says it, left out, or not the same any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtool.gitcmd import Git
from kvtool.result import PatchOutcome
from kvtool.tree.mailbox import DIFF_FLAGS, parse_diff
from kvtool.tree.replay import PatchReport
from kvtool.tree.series import Patch, Series, Step
from kvtool.tree.worktree import Applied

_DONE = {
    PatchOutcome.MERGED: "upstream has it",
    PatchOutcome.EMPTY: "it changes nothing there",
    PatchOutcome.DROPPED: "it was dropped from the series",
}


@dataclass(frozen=True)
class PatchReason:
    """state: applied | left-out | changed | new | gone; why: in a sentence."""

    id: str
    state: str
    why: str


def reasons(git: Git, applied: Applied, series: Series) -> tuple[PatchReason, ...]:
    """One for each patch of the project, in order, then those that only the tree has."""
    reports = {report.id: report for report in applied.patches}
    changed = _changed_lines(git, applied)
    found = [_reason(step, reports.get(step.patch.id), changed, applied.tag) for step in series.steps]
    there = {step.patch.id for step in series.steps}
    gone = "series.toml does not list it any more; kvtool apply takes it out of the tree"
    return (*found, *(PatchReason(name, "gone", gone) for name, r in reports.items() if name not in there and r.commit))


def _reason(step: Step, report: PatchReport | None, changed: Mapping[str, object], tag: str) -> PatchReason:
    name = step.patch.id
    if not step.wanted:
        return PatchReason(name, "left-out", _span(step.patch, tag))
    if report is None or (report.outcome is PatchOutcome.SKIPPED and not report.commit):
        return PatchReason(name, "new", "it was added since; kvtool apply puts it into the tree")
    if not report.commit:
        return PatchReason(name, "left-out", _DONE.get(report.outcome, str(report.outcome)))
    if changed.get(report.commit) != _lines(step.mail.diff):
        return PatchReason(
            name, "changed", f"patches/{step.patch.file} is another than the commit {report.commit[:10]}"
        )
    note = f"; {report.moved[0]}" if report.moved else ""
    return PatchReason(name, "applied", f"commit {report.commit[:10]}{note}")


def _span(patch: Patch, tag: str) -> str:
    limits = [f"{key} {limit}" for key, limit in (("from", patch.since), ("until", patch.until)) if limit]
    return f"series.toml has it {' '.join(limits)}, and this is {tag}"


def _changed_lines(git: Git, applied: Applied) -> dict[str, object]:
    """What each commit of the series changes, without line numbers and context; one git call for all."""
    done = git.run("log", "-p", "--format=%x00%x00%H%x00", *DIFF_FLAGS, f"{applied.base}..{applied.head}", check=False)
    entries = (entry.partition("\0") for entry in done.stdout.split("\0\0")[1:])
    return {commit: _lines(diff.lstrip("\n").encode("utf-8", "surrogateescape")) for commit, _, diff in entries}


def _lines(diff: bytes) -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    return tuple(
        (file.path, tuple(row for h in file.hunks for row in h.text.split(b"\n")[1:] if row[:1] in (b"+", b"-")))
        for file in parse_diff(diff)
    )
