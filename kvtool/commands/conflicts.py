"""Print the outcome of the patches: one line of summary, then each conflict with its cause and a short diff."""

import itertools
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from kvtool.console import Console
from kvtool.replay.apply import FailedHunk, PatchReport
from kvtool.result import PatchOutcome
from kvtool.upstream.history import NONE

_LINES = 90  # most lines of output for all conflicts together, without --verbose
_HEAD = 3  # lines of text above the diff of each conflict
_LEAST, _MOST = 8, 24  # a diff gets at least 8 and at most 24 lines
_MOST_HUNKS = _LINES // (_HEAD + _LEAST)  # most hunks that are printed with a diff
_MOST_NOTES = 10
_MOST_NAMES = 4  # most patches that the summary names
_WIDTH = 100  # characters of a line of output
_RUN = 12  # most lines that a shortened diff shows of consecutive lines of one kind (removed, added or equal)
_HAS = re.compile(r"(.*) hunk (\d+): upstream already has it")


def summary(reports: Sequence[PatchReport]) -> str:
    """Return a sentence such as "41 of 43 patches apply, 1 is upstream now, 1 needs you: pool (2 hunks)"."""
    tried = [report for report in reports if report.outcome is not PatchOutcome.SKIPPED]
    counts = {outcome: sum(r.outcome is outcome and not r.lost for r in reports) for outcome in PatchOutcome}
    apply = "applies" if len(tried) == 1 else "apply"
    parts = [f"{counts[PatchOutcome.APPLIED]} of {_number(len(tried), 'patch', 'patches')} {apply}"]
    for outcome, one, many in (
        (PatchOutcome.MERGED, "is upstream now", "are upstream now"),
        (PatchOutcome.EMPTY, "changes nothing", "change nothing"),
        (PatchOutcome.SKIPPED, "is left out", "are left out"),
        (PatchOutcome.DROPPED, "is dropped", "are dropped"),
    ):
        if counts[outcome]:
            parts.append(f"{counts[outcome]} {one if counts[outcome] == 1 else many}")
    blocked = [report for report in reports if report.outcome is PatchOutcome.BLOCKED]
    if blocked:
        names = ", ".join(sorted({report.blocked_by for report in blocked}))
        if len({report.blocked_by for report in blocked}) > 1:
            names = "one of these"
        parts.append(f"{len(blocked)} {'needs' if len(blocked) == 1 else 'need'} {names} first")
    needy = [report for report in reports if report.needs_user and report not in blocked]
    if needy:
        shown = needy if len(needy) <= _MOST_NAMES else needy[: _MOST_NAMES - 1]
        names = ", ".join(f"{report.id} ({_trouble(report)})" for report in shown)
        if len(needy) > len(shown):
            names += f" and {len(needy) - len(shown)} more"
        parts.append(f"{len(needy)} {'needs' if len(needy) == 1 else 'need'} you: {names}")
    return ", ".join(parts)


def _number(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _trouble(report: PatchReport) -> str:
    return f"loses {report.lost}" if report.lost else _number(len(report.failed), "hunk", "hunks")


def render_reports(console: Console, reports: Sequence[PatchReport]) -> None:
    """Print the summary, the notes on the patches, and each conflict.

    Blocked patches are printed only with --verbose.
    """
    if not reports:
        return
    console.line(summary(reports))
    notes = [
        f"  {report.id}: {note}"
        for report in reports
        for note in (report.moved if console.verbose else _join_notes(report.moved))
    ]
    shown = notes if console.verbose else notes[:_MOST_NOTES]
    for note in shown:
        console.line(note, "yellow")
    if len(notes) > len(shown):
        console.line(f"  and {len(notes) - len(shown)} more notes: --verbose", "yellow")
    for report in reports:
        if report.lost:
            console.line(f"  {report.id}: loses {report.lost}", "red")
    _render_conflicts(console, reports)


def _join_notes(notes: Sequence[str]) -> list[str]:
    """Return the notes of a patch, with all notes "upstream already has it" joined to one."""
    had = [found for note in notes if (found := _HAS.fullmatch(note))]
    if len(had) < 2:
        return list(notes)
    hunks: dict[str, list[str]] = {}
    for found in had:
        hunks.setdefault(found[1], []).append(found[2])
    places = [f"{path} ({', '.join(numbers)})" for path, numbers in hunks.items()]
    more = f" and {len(places) - 2} more files" if len(places) > 2 else ""
    joined = f"upstream already has {len(had)} of its hunks: {', '.join(places[:2])}{more}"
    return [joined, *(note for note in notes if not _HAS.fullmatch(note))]


def _render_conflicts(console: Console, reports: Sequence[PatchReport]) -> None:
    """Print the conflicts in the order of the series.

    Without --verbose, the first conflicts are printed with a short diff. The conflicts that follow are printed as one
    line per patch.
    """
    wanted = [r for r in reports if console.verbose or r.outcome is not PatchOutcome.BLOCKED]
    hunks = [(report.id, hunk) for report in wanted for hunk in report.failed]
    if console.verbose:
        for patch, hunk in hunks:
            _render_hunk(console, patch, hunk, 0)
        return
    shown, later = hunks[:_MOST_HUNKS], hunks[_MOST_HUNKS:]
    left = {patch: [hunk for name, hunk in later if name == patch] for patch, _ in later}
    for (patch, hunk), room in zip(shown, _rooms(shown, _LINES - len(left)), strict=True):
        _render_hunk(console, patch, hunk, room)
    named = list(left.items())[: _LINES // 6]
    for patch, others in named:
        more = "more " if patch == shown[-1][0] else ""
        count = _number(len(others), f"{more}hunk", f"{more}hunks")
        file = PurePosixPath(others[0].path).name
        console.line(_short(f"{patch} ({count}): {file}: {others[0].reason}"), "bold")
    if later:
        unnamed = len(left) - len(named)
        start = f"{_number(unnamed, 'more patch', 'more patches')}, and " if unnamed else ""
        console.line(f"{start}all hunks with their lines: --verbose")


def _rooms(hunks: Sequence[tuple[str, FailedHunk]], lines: int) -> list[int]:
    """Divide `lines` lines of output among the diffs of the hunks. Return the number of lines for each diff.

    A short diff gets only the lines that it needs, so that the long diffs get more.
    """
    room = max(lines - _HEAD * len(hunks), 0)
    sizes = [min(len(_rows(hunk)), _MOST) for _, hunk in hunks]
    found = [0] * len(hunks)
    for done, number in enumerate(sorted(range(len(hunks)), key=sizes.__getitem__)):
        found[number] = min(sizes[number], room // (len(hunks) - done))
        room -= found[number]
    return [max(each, _LEAST) for each in found]


def _render_hunk(console: Console, patch: str, hunk: FailedHunk, room: int) -> None:
    """Print one conflict.

    room: the maximum number of lines of the diff; 0 prints the whole diff, and also the lines that the patch adds
    """
    at = f" hunk {hunk.number} of {hunk.total}" if hunk.number else ""
    function = hunk.header.partition(" @@ ")[2]
    name = re.search(r"([\w:~]+)\(", function)
    where = f"{name[1]}()" if name and not console.verbose else function.rstrip(" {(")
    console.line(_short(f"{patch}: {hunk.path}{at}"), "bold")
    console.line(_short(f"  {f'in {where}: ' if where else ''}{hunk.reason}"), "red")
    if hunk.behind and hunk.behind != NONE:
        console.line(_short(f"  upstream's commit: {hunk.behind}"))
    rows = _rows(hunk)
    for row in _fit(rows, room) if room else rows:
        console.line(_short(f"    {row}"), {"-": "red", "+": "green"}.get(row[:1]))
    if not room:
        for row in hunk.wanted:
            console.line(_short(f"    the patch wants | {row}"))


def _rows(hunk: FailedHunk) -> tuple[str, ...]:
    """Return a hunk's diff from the lines that the patch expects to the lines that upstream has."""
    if not hunk.diff and hunk.cause == "submodule":
        return (*(f"-{row}" for row in hunk.expected), *(f"+{row}" for row in hunk.found))
    return hunk.diff


def _fit(rows: Sequence[str], room: int) -> list[str]:
    """Shorten a diff to `room` lines.

    First drops the lines that are not next to a change. If that is not enough, cuts long runs of removed or added
    lines.
    """
    changed = [n for n, row in enumerate(rows) if row[:1] in ("-", "+")]
    near = [row for n, row in enumerate(rows) if any(abs(n - at) <= 1 for at in changed)]
    for kept in (rows, near) if changed else (rows,):
        if len(kept) <= room:
            return list(kept)
    for most in range(_RUN, 0, -1):
        shorter = [row for run in _runs(near or rows) for row in _cut(run, most)]
        if len(shorter) <= room:
            return shorter
    return _cut(near or rows, room - 1)


def _runs(rows: Sequence[str]) -> list[list[str]]:
    """Divide a diff into runs of removed, added or equal lines."""
    return [list(run) for _, run in itertools.groupby(rows, key=lambda row: row[:1])]


def _cut(rows: Sequence[str], most: int) -> list[str]:
    """Shorten a diff to its first `most` rows, and add a row with the number of rows that were left out.

    If there are at most `most` + 1 rows, return all rows, because the added row would not make the diff shorter.
    """
    if len(rows) <= most + 1:
        return list(rows)
    return [*rows[:most], f"… {len(rows) - most} more lines: --verbose"]


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
