"""Implement `kvtool bisect`: find the upstream where a patch stops applying."""

import enum
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvtool.console import Console
from kvtool.errors import BisectAbort, BisectBad, BisectSkip, KvtoolError, UsageError
from kvtool.gitcmd import Git, scratch_repository
from kvtool.options import Context, env_of
from kvtool.project import Project, expanded
from kvtool.replay.apply import FailedHunk
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import PatchOutcome, Result
from kvtool.series.series import load_patches, patch_named
from kvtool.upstream.lock import load_lock, with_upstream


class Verdict(enum.StrEnum):
    """Name the verdicts of git bisect. SKIP means that this upstream cannot be judged."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True)
class Trial:
    """Hold the trial of a patch on one upstream tag.

    outcome: the outcome of applying the patch to this tag, "" if it is unknown
    why: the reason for the verdict "bad" or "skip"; "" for "good"
    failed: the hunks that do not apply
    """

    tag: str
    verdict: Verdict
    outcome: str
    why: str
    failed: tuple[FailedHunk, ...]
    seconds: float


_VERDICTS = {
    PatchOutcome.APPLIED: Verdict.GOOD,
    PatchOutcome.MERGED: Verdict.GOOD,
    PatchOutcome.CONFLICT: Verdict.BAD,
    PatchOutcome.EMPTY: Verdict.BAD,
}
_WHY = {
    PatchOutcome.SKIPPED: "from/until in series.toml exclude it",
    PatchOutcome.EMPTY: "it changes nothing there",
}


def attempt(context: SeriesContext, tag: str, patch: str, *clones: Path) -> Trial:
    """Try a patch on one upstream tag, without changing the project or the tree.

    The verdict is good if the patch applies or if upstream already contains it. It is bad if the patch has a conflict
    or loses lines. It is skip if an earlier patch blocks this patch, or if series.toml leaves it out at that tag.

    clones: repositories that have upstream's commit, in case the cache does not have it
    """
    with scratch_repository(context.cache.repo, *clones) as scratch:
        done = context.rehearse(scratch, context.lock.upstream(tag))
    report = next(report for report in done.reports if report.id == patch)
    verdict = Verdict.BAD if report.lost else _VERDICTS.get(report.outcome, Verdict.SKIP)
    why = f"it lost {report.lost}" if report.lost else "; ".join(map(str, report.failed))
    why = why or _WHY.get(report.outcome, "")
    if report.blocked_by:
        why = f"blocked by {report.blocked_by}: {why}"
    return Trial(tag, verdict, str(report.outcome), why, report.failed, done.seconds)


def search(
    tags: Sequence[str], there: Callable[[str], Trial], ends: tuple[Trial, Trial]
) -> tuple[int, int, tuple[Trial, ...]]:
    """Find two tags: the last good one and the first bad one.

    Returns the index of each in `tags`, and all trials. The first of `tags` must be good and the last one bad.

    Like git bisect, this assumes that every tag after a bad tag is bad. If a tag is skipped, one of its neighbours is
    tried instead. Skipped tags between the last good and the first bad tag may be the first bad one.

    there: tries one tag
    ends: the trials of the first and the last tag
    """
    trials = {ends[0].tag: ends[0], ends[1].tag: ends[1]}
    good, bad = 0, len(tags) - 1
    while untried := [n for n in range(good + 1, bad) if tags[n] not in trials]:
        middle = min(untried, key=lambda n: abs(2 * n - good - bad))
        trial = trials[tags[middle]] = there(tags[middle])
        if trial.verdict is Verdict.GOOD:
            good = middle
        elif trial.verdict is Verdict.BAD:
            bad = middle
    return good, bad, tuple(trials[tag] for tag in tags if tag in trials)


@dataclass(frozen=True)
class BisectResult(Result, command="bisect"):
    """Report where a patch stops applying.

    last_good: the last upstream tag where the patch applies
    first_bad: of the tried tags where the patch fails, the tag that is nearest to last_good
    suspects: the skipped tags between last_good and first_bad; any of these tags may be the first where the patch fails
    why: the reason for the failure at first_bad
    trials: one trial for each tried upstream, in the order of the tags
    """

    patch: str
    good: str
    bad: str
    last_good: str
    first_bad: str
    suspects: tuple[str, ...]
    why: str
    trials: tuple[Trial, ...]

    def render(self, console: Console) -> None:
        rows = [(t.tag, t.verdict, t.outcome, f"{t.seconds:.1f}") for t in self.trials]
        console.table(("upstream", "verdict", "patch", ">s"), rows)
        for trial in self.trials:
            if trial.verdict is Verdict.SKIP:
                console.line(f"  {trial.tag}: {trial.why}", "yellow")
        console.line(
            f"{self.first_bad} is the first where {self.patch} fails, {self.last_good} the last where it holds"
        )
        console.line(f"  why: {self.why}")
        if self.suspects:
            console.line(f"  or one of these, which were skipped: {', '.join(self.suspects)}", "yellow")


@dataclass(frozen=True)
class BisectAt(Result, command="bisect"):
    """Report the verdict on one commit of a clone with history.

    `git bisect run` reads the verdict from the exit code of kvtool.
    """

    patch: str
    commit: str
    verdict: Verdict
    outcome: str
    why: str
    seconds: float

    @property
    def failure(self) -> KvtoolError | None:
        """Return the error of a commit that cannot be judged."""
        if self.verdict is Verdict.GOOD:
            return None
        kind = BisectBad if self.verdict is Verdict.BAD else BisectSkip
        what = "fails at" if self.verdict is Verdict.BAD else "cannot be judged at"
        return kind(f"{self.patch} {what} {self.commit[:12]}", why=self.why)

    def render(self, console: Console) -> None:
        console.line(f"{self.commit[:12]}: {self.patch} is {self.outcome}: {self.verdict}")


def bisect_tags(
    project: Project, console: Console, patch: str, good: str, bad: str, mirror: str | None = None
) -> BisectResult:
    """Search for the tag where the patch stops applying, among the tags of upstream.lock between `good` and `bad`.

    `bad` may be older than `good`; then the search runs backwards.
    """
    context = SeriesContext(project, console, mirror)
    patch_named(load_patches(project), patch)
    ends = context.lock.upstream(good).order, context.lock.upstream(bad).order
    tags = list(context.lock.upstreams)[min(ends) : max(ends) + 1][:: 1 if ends[0] < ends[1] else -1]
    if len(tags) < 2:
        raise UsageError("--good and --bad are the same upstream", next_step="kvtool bisect --help")
    tried = itertools.count()
    with console.progress(f"looking for the upstream where {patch} fails", float(len(tags))) as bar:

        def there(tag: str) -> Trial:
            bar.update(next(tried), tag)
            try:
                return attempt(context, tag, patch)
            except KvtoolError as err:  # the tag cannot be fetched, or its tree cannot be read
                if tag == context.lock.current:
                    raise
                return Trial(tag, Verdict.SKIP, "", str(err), (), 0.0)

        first, last = there(good), there(bad)
        for trial, wanted in ((first, Verdict.GOOD), (last, Verdict.BAD)):
            if trial.verdict is not wanted:
                raise UsageError(
                    f"{patch} is not {wanted} on {trial.tag}",
                    why=f"it is {trial.outcome or 'not known'} there" + (f": {trial.why}" if trial.why else ""),
                    next_step="kvtool rebase --dry-run --all shows every upstream",
                )
        holds, fails, trials = search(tags, there, (first, last))
    why = next(trial.why for trial in trials if trial.tag == tags[fails])
    suspects = tuple(tags[holds + 1 : fails])
    return BisectResult(patch, good, bad, tags[holds], tags[fails], suspects, why, trials)


def judge_commit(project: Project, console: Console, patch: str, revision: str, mirror: Path) -> BisectAt:
    """Try the patch on one commit of a clone of upstream that has the history."""
    git = Git(expanded(mirror))
    if not git.repo.is_dir() or not git.ok("rev-parse", "--git-dir"):
        raise UsageError(
            f"{mirror} is not a git repository on this machine",
            next_step=f"run it inside a clone of {project.name}, or name one: --mirror PATH",
        )
    commit = git.resolve(f"{revision}^{{commit}}")
    if commit is None:
        raise UsageError(f"{mirror} has no commit {revision!r}")
    context, tag = SeriesContext(project, console), commit[:12]
    patch_named(load_patches(project), patch)
    tree, date = git.line("rev-parse", f"{commit}^{{tree}}"), git.line("log", "-1", "--format=%cs", commit)
    # from/until in series.toml refer to the order of the lock, so sort this commit into the lock by its date
    context.lock, context.known[tag] = with_upstream(context.lock, tag, tree, date), commit
    trial = attempt(context, tag, patch, git.repo)
    return BisectAt(patch, commit, trial.verdict, trial.outcome, trial.why, trial.seconds)


def command(
    ctx: Context,
    patch: Annotated[str, Argument(metavar="ID", help="Id of a patch in series.toml.")],
    good: Annotated[
        str, Option("--good", metavar="TAG", help="Tag where the patch applies [the current upstream].")
    ] = "",
    bad: Annotated[str, Option("--bad", metavar="TAG", help="Tag where the patch does not apply.")] = "",
    at: Annotated[
        str, Option("--at", metavar="REV", help="Try only this commit of the clone, for git bisect run.")
    ] = "",
    mirror: Annotated[
        str | None,
        Option(
            "--mirror",
            metavar="PATH|URL",
            help="Repository of upstream. With --at: a clone with history [this folder].",
        ),
    ] = None,
) -> BisectResult | BisectAt:
    """Find the upstream where a patch stops applying.

    Tries the patch on tags of upstream.lock between --good and --bad, as kvtool rebase --dry-run does. Nothing is
    changed. --bad may be older than --good. A tag is skipped if it cannot be fetched, or if an earlier patch fails
    there.

        kvtool bisect ID --good TAG --bad TAG

    With --at, kvtool tries the patch on one commit of a clone with history. The exit code is 0 if the patch applies, 1
    if it does not, 125 if the commit cannot be judged, and 128 for any other error. With these codes, git bisect can
    find the commit in a clone of llama.cpp:

        git bisect start BAD GOOD
        git bisect run kvtool bisect ID --at HEAD --project ~/kvtool

    Exit codes: 0 or, with --at, as above; 2 the patch does not apply at --good, or it does apply at --bad.
    """
    env = env_of(ctx)
    if at:
        if good or bad:
            raise BisectAbort("--at judges one commit, --good and --bad are two ends", next_step="kvtool bisect --help")
        try:  # git bisect reads 1 and 125 as verdicts, so any other error must exit with 128
            return judge_commit(
                env.project, env.console, patch, at, Path(mirror or os.environ.get("KVTOOL_UPSTREAM") or ".")
            )
        except KvtoolError as err:
            raise BisectAbort(err.what, why=err.why, next_step=err.next_step, output=err.output) from err
    if not bad:
        raise UsageError("--bad is missing", next_step="kvtool bisect ID --good TAG --bad TAG, or --at REV")
    return bisect_tags(env.project, env.console, patch, good or load_lock(env.project.lock).current, bad, mirror)
