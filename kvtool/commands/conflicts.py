"""Show a person what became of the patches: one line of summary, then each conflict with its cause and a short diff."""

from collections.abc import Iterator, Sequence

from kvtool.console import Console
from kvtool.replay.apply import FailedHunk, PatchReport
from kvtool.result import PatchOutcome
from kvtool.upstream.history import NONE

_LINES = 90  # of all conflicts together, without --verbose
_MOST_HUNKS = 10
_MOST_NOTES = 10
_LEAST, _MOST = 5, 24  # lines of one diff
_WIDTH = 100  # characters of a line


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
        parts.append(f"{len(blocked)} {'needs' if len(blocked) == 1 else 'need'} {names} first")
    needy = [report for report in reports if report.needs_user and report not in blocked]
    if needy:
        names = ", ".join(f"{report.id} ({_trouble(report)})" for report in needy)
        parts.append(f"{len(needy)} {'needs' if len(needy) == 1 else 'need'} you: {names}")
    return ", ".join(parts)


def _number(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _trouble(report: PatchReport) -> str:
    return f"loses {report.lost}" if report.lost else _number(len(report.failed), "hunk", "hunks")


def render_reports(console: Console, reports: Sequence[PatchReport]) -> None:
    """Print the summary, what deserves a look, and each conflict. A blocked patch is shown only with --verbose."""
    if not reports:
        return
    console.line(summary(reports))
    notes = [f"  {report.id}: {note}" for report in reports for note in report.moved]
    shown = notes if console.verbose else notes[:_MOST_NOTES]
    for note in shown:
        console.line(note, "yellow")
    if len(notes) > len(shown):
        console.line(f"  and {len(notes) - len(shown)} more notes: --verbose", "yellow")
    for report in reports:
        if report.lost:
            console.line(f"  {report.id}: loses {report.lost}", "red")
    _render_conflicts(console, reports)


def _render_conflicts(console: Console, reports: Sequence[PatchReport]) -> None:
    wanted = [r for r in reports if console.verbose or r.outcome is not PatchOutcome.BLOCKED]
    hunks = [(report.id, hunk) for report in wanted for hunk in report.failed]
    shown = hunks if console.verbose else hunks[:_MOST_HUNKS]
    room = min(max(_LINES // max(len(shown), 1) - 3, _LEAST), _MOST)
    for patch, hunk in shown:
        _render_hunk(console, patch, hunk, 0 if console.verbose else room)
    if len(hunks) > len(shown):
        more = sorted({patch for patch, _ in hunks[len(shown) :]})
        console.line(
            f"and {_number(len(hunks) - len(shown), 'hunk', 'hunks')} more of {', '.join(more)}: --verbose", "bold"
        )


def _render_hunk(console: Console, patch: str, hunk: FailedHunk, room: int) -> None:
    """Print a conflict; room: the most lines of its diff, 0 for all lines and for the lines that the patch adds."""
    at = f" hunk {hunk.number} of {hunk.total}" if hunk.number else ""
    function = hunk.header.partition(" @@ ")[2]
    console.line(_short(f"{patch}: {hunk.path}{at}{f', in {function}' if function else ''}"), "bold")
    console.line(_short(f"  {hunk.reason}"), "red")
    if hunk.behind and hunk.behind != NONE:
        console.line(_short(f"  upstream's commit: {hunk.behind}"))
    for row in _rows(hunk, room):
        console.line(_short(f"    {row}"), {"-": "red", "+": "green"}.get(row[:1]))
    if not room:
        for row in hunk.wanted:
            console.line(_short(f"    the patch wants | {row}"))


def _rows(hunk: FailedHunk, room: int) -> Iterator[str]:
    """Yield the diff from the expected lines to upstream's lines, cut to the room."""
    rows = hunk.diff
    if not rows and hunk.cause == "submodule":
        rows = (*(f"-{row}" for row in hunk.expected), *(f"+{row}" for row in hunk.found))
    yield from rows[: room - 1] if room and len(rows) > room else rows
    if room and len(rows) > room:
        yield f"… {len(rows) - room + 1} more lines: --verbose"


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
