"""Hold the results of `kvtool rebase`: of one rebase, or of a trial on every tag of upstream.lock."""

from dataclasses import dataclass
from pathlib import Path

from kvtool import markdown
from kvtool.commands.apply import render_patches
from kvtool.commands.conflicts import render_reports
from kvtool.console import Console
from kvtool.errors import ConflictError, KvtoolError, NetworkError, writing
from kvtool.process import quote, redact_urls
from kvtool.project import LLAMA_CPP, PROOF
from kvtool.replay.apply import PatchReport, conflict_error
from kvtool.result import FileChange, PatchOutcome, Result


@dataclass(frozen=True)
class RebaseResult(Result, command="rebase"):
    """Report a rebase.

    outcome: "rebased", "rehearsed" (a dry run), "stopped" (a patch needs the user), "aborted" or "unchanged"
    previous: the tag that was locked before
    head: the id of the series' last commit on the new upstream, "" if there is none yet
    stopped_at: the id of the patch that the user must resolve, "" if there is none
    range_diff: the path of a report with the changes of each patch
    files: the files written in the project
    patches: one report for each patch, in the order of the series
    seconds: the time that merging the patches needed
    filled_in: the files whose conflict git rerere resolved with the recorded resolution of an equal, earlier conflict
    mirror: the repository that upstream was fetched from, "" if the user named none
    older: the reason why an upstream outside of the lock counts as older than the lock's current upstream, and the
        patches that are therefore left out; "" if there are none
    astray: a note for each folder that has files of cpp/ and that upstream no longer has
    kept: the git ref with the edits and conflict markers that --abort, --skip or --drop removed from the tree, or ""
    """

    tag: str
    previous: str
    tree: Path
    outcome: str
    head: str = ""
    stopped_at: str = ""
    range_diff: Path | None = None
    files: tuple[FileChange, ...] = ()
    patches: tuple[PatchReport, ...] = ()
    seconds: float = 0.0
    filled_in: tuple[str, ...] = ()
    mirror: str = ""
    older: str = ""
    astray: tuple[str, ...] = ()
    kept: str = ""
    upstream: str = "llama.cpp"  # name of the upstream project

    def __post_init__(self) -> None:
        object.__setattr__(self, "mirror", redact_urls(self.mirror))

    @property
    def failure(self) -> KvtoolError | None:
        error = conflict_error(self.patches, f"{self.upstream} {self.tag}") if self.stopped_at else None
        if error is not None:
            lost = next(report for report in self.patches if report.needs_user).lost
            error.next_step = self._next_after_loss() if lost else self._next_after_conflict()
        return error

    @property
    def _again(self) -> str:
        return f"kvtool rebase {self.tag}" + (f" --mirror {quote([self.mirror])}" if self.mirror else "")

    def _next_after_conflict(self) -> str:
        if self.outcome == "rehearsed":
            return f"{self._again} stops there with the conflict in the files"
        before = f"git resolved these as before, check them: {', '.join(self.filled_in)}\n" if self.filled_in else ""
        status = quote(["git", "-C", self.tree, "status"])
        return before + (
            f"1. {status} lists the files: resolve each conflict, and move lines that are in the wrong place\n"
            "2. kvtool rebase --continue accepts the files as the resolution, and continues with the next patch\n"
            + self._ways_out
        )

    @property
    def _ways_out(self) -> str:
        name = self.stopped_at
        return (
            f"or kvtool rebase --skip {name} leaves the patch out from {self.tag} on\n"
            f"or kvtool rebase --drop {name} removes the patch from the series\n"
            "or kvtool rebase --abort restores the tree and the project"
        )

    def _next_after_loss(self) -> str:
        name = self.stopped_at
        if self.outcome == "rehearsed":
            return f"look at it: {self._again}; if it is right: {self._again} --accept-shrink {name}"
        show = quote(["git", "-C", self.tree, "show"])
        return (
            f"1. {show} shows the patch as it is now\n"
            f"2. kvtool rebase --accept-shrink {name} accepts it\n"
            "or restore the missing lines, then kvtool rebase --continue\n" + self._ways_out
        )

    def render(self, console: Console) -> None:
        if console.verbose:
            render_patches(console, self.patches)
        render_reports(console, self.patches)
        for note in filter(None, (self.older, *self.astray)):
            console.line(f"  look at it: {note}", "yellow")
        if self.kept:
            console.line(f"the tree's edits are kept: {quote(['git', '-C', self.tree, 'show', self.kept])}")
        if self.outcome == "aborted":
            console.line(f"the rebase onto {self.tag} is cancelled; the tree and the project are as before")
        elif self.outcome == "unchanged":
            console.line(f"the series is on {console.upstream} {self.tag} already")
        elif self.outcome == "rehearsed" and not self.stopped_at:
            console.line(
                f"every patch applies to {console.upstream} {self.tag} ({self.seconds:.1f} s); nothing was changed"
            )
        elif self.outcome == "rebased":
            for file in self.files if console.verbose else ():
                console.line(f"  {file.action:<7} {file.path}")
            before = f" (it was on {self.previous})" if self.previous else ""
            console.line(f"the series is on {console.upstream} {self.tag} now{before}; tree: {self.tree}")
            if self.range_diff:
                console.line(f"how each patch changed: {self.range_diff}")
            proof = " && kvtool verify" if (self.tree / PROOF).is_dir() else ""
            build = f"kvtool build{proof}, then " if console.upstream == LLAMA_CPP else ""
            console.line(console.again(f"next: {build}commit patches/"))


# --- the trial on every tag --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanRow:
    """Hold the outcome of a trial on one upstream tag.

    outcome: "complete", "conflict", "unreachable" (the tag could not be fetched) or "failed"
    error: the reason, if the outcome is "unreachable" or "failed"
    """

    tag: str
    date: str
    outcome: str
    patches: tuple[PatchReport, ...] = ()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class SpanResult(Result, command="rebase"):
    """Hold the trials on all tags of upstream.lock.

    current: the tag that the series is locked to
    ids: the ids of the patches, in the order of the series
    rows: the trials, the oldest upstream first
    """

    current: str
    ids: tuple[str, ...]
    rows: tuple[SpanRow, ...]

    @property
    def failure(self) -> KvtoolError | None:
        bad = [row.tag for row in self.rows if row.outcome in ("conflict", "failed")]
        missing = [row.tag for row in self.rows if row.outcome == "unreachable"]
        if bad:
            return ConflictError(
                f"the series does not apply to {len(bad)} of {len(self.rows)} upstreams",
                why=", ".join(bad),
                next_step=f"kvtool rebase {bad[-1]} --dry-run --keep-going shows each hunk that is in the way",
            )
        if missing:
            return NetworkError(
                f"{len(missing)} of {len(self.rows)} upstreams could not be fetched",
                why=", ".join(missing),
                next_step="kvtool fetch TAG explains the reason",
            )
        return None

    def render(self, console: Console) -> None:
        """Print one row for each upstream tag, then the conflicts.

        --markdown and --json also have the number of hunks of each patch.
        """
        title = f"the series of {self.current} ({len(self.ids)} patches) applied to each upstream tag"
        columns = ("upstream", "date", "outcome", ">applied", ">left out", ">failed", ">hunks", ">s")
        console.table(columns, [_counts(row) for row in self.rows], title=title)
        for row in self.rows:
            for report in row.patches:
                for hunk in report.failed:
                    console.line(f"  {row.tag} {report.id}: {hunk}", "red")
            if row.error:
                console.line(f"  {row.tag}: {row.error}", "red")

    def _cells(self, row: SpanRow) -> list[str]:
        if row.error:
            return [row.outcome, *("" for _ in self.ids[1:])]
        by_id = {report.id: report for report in row.patches}
        return [_cell(by_id[name]) if name in by_id else "" for name in self.ids]

    def write_markdown(self, path: Path) -> None:
        """Write the table as Markdown. Raise DiskError if the file cannot be written."""
        title = _TITLE.format(current=self.current)
        rows = [[row.tag, row.date, *self._cells(row), f"{row.seconds:.1f}"] for row in self.rows]
        with writing(str(path)):
            table = markdown.table(("upstream", "date", *self.ids, ">seconds"), rows)
            path.write_text(f"{title}\n\n{table}", encoding="utf-8")


_TITLE = """\
# Patches on each upstream tag

`kvtool rebase --dry-run --keep-going --all` tried the series of {current} on each tag of `upstream.lock`. Each
column is a patch. A number is the number of hunks that were applied. *skipped* means that `from` or `until` in
`series.toml` leaves the patch out on this tag."""


def _counts(row: SpanRow) -> tuple[str, ...]:
    """Return the row of the table for one upstream tag: the tag, its date, the outcome, four numbers and the seconds.

    The four numbers are: the patches that apply, the patches that from/until leave out, the patches that fail or lose
    changes, and the hunks of the patches that apply.
    """
    applied = [p for p in row.patches if p.outcome == PatchOutcome.APPLIED and not p.lost]
    left_out = sum(p.outcome == PatchOutcome.SKIPPED for p in row.patches)
    other = len(row.patches) - len(applied) - left_out
    counts = (len(applied), left_out, other, sum(p.hunks for p in applied))
    return (row.tag, row.date, row.outcome, *map(str, counts), f"{row.seconds:.1f}")


def _cell(report: PatchReport) -> str:
    """Return the outcome of one patch on one upstream as a word."""
    if report.blocked_by:
        return f"blocked by {report.blocked_by}"
    if report.outcome == PatchOutcome.APPLIED:
        return f"{report.hunks}, loses {report.lost}" if report.lost else str(report.hunks)
    if report.outcome == PatchOutcome.CONFLICT:
        return f"conflict ({len(report.failed)} of {report.hunks})"
    return str(report.outcome)
