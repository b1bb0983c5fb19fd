"""`kvtool rebase`: move the series to another upstream, and tell what becomes of each patch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvtool.commands.rebase_results import RebaseResult, SpanResult, SpanRow
from kvtool.compile import toolchain
from kvtool.console import Console
from kvtool.errors import KvtoolError, NetworkError, TreeError, UsageError
from kvtool.gitcmd import Git, scratch_repository
from kvtool.locks import hold_tree
from kvtool.options import Env, Mirror, refuse
from kvtool.project import Project
from kvtool.replay.apply import FailedHunk, conflict_error
from kvtool.replay.export import rebased
from kvtool.replay.rebase_plan import Choices, Rehearsal, Workshop
from kvtool.result import PatchOutcome, Result
from kvtool.series.series import load_patches, patch_named
from kvtool.upstream.history import NONE, History
from kvtool.upstream.lock import Upstream, load_lock, with_upstream
from kvtool.worktree import checkout, rebase_state, transaction
from kvtool.worktree.checkout import base_ref, branch_of, scratch_below, take_base
from kvtool.worktree.rebase_state import RebaseState, range_diff_path, write_range_diff
from kvtool.worktree.status import not_clean, require_applied, tree_state


@dataclass(frozen=True)
class Options:
    tag: Annotated[str | None, Argument(metavar="TAG", help="Where to; the lock need not know it.")] = None
    mirror: Mirror = None
    dry_run: Annotated[bool, Option("--dry-run", help="Change nothing, not even the tree.")] = False
    keep_going: Annotated[
        bool, Option("--keep-going", help="With --dry-run: try every patch, also behind a conflict.")
    ] = False
    all: Annotated[
        bool, Option("--all", help="With --dry-run: onto every upstream of the lock; fetches what the cache lacks.")
    ] = False
    markdown: Annotated[
        Path | None, Option("--markdown", metavar="FILE", help="With --all: write the table there as well.")
    ] = None
    go_on: Annotated[bool, Option("--continue", help="Take the tree as the resolution and go on.")] = False
    abort: Annotated[bool, Option("--abort", help="Give up; tree and project as they were.")] = False
    skip: Annotated[
        tuple[str, ...], Option("--skip", metavar="ID", help="Leave a patch out from this upstream on (sets `until`).")
    ] = ()
    drop: Annotated[tuple[str, ...], Option("--drop", metavar="ID", help="Take a patch out of the series.")] = ()
    accept: Annotated[
        tuple[str, ...],
        Option(
            "--accept-shrink", metavar="ID", help="A patch may have fewer changes than before, on older upstreams, too."
        ),
    ] = ()

    @property
    def choices(self) -> Choices:
        return Choices(skip=self.skip, drop=self.drop, accept=self.accept)


def _check(options: Options) -> None:
    dry = options.dry_run
    refuse(
        "rebase",
        (options.all and (options.tag or not dry), "--all takes no TAG and needs --dry-run"),
        (options.keep_going and not dry, "--keep-going needs --dry-run (a rebase tells of every patch, then stops)"),
        (options.markdown and not options.all, "--markdown needs --all"),
        (dry and (options.go_on or options.abort), "--dry-run begins anew"),
        (options.go_on and (options.abort or options.tag), "--continue stands alone"),
        (options.abort and (options.tag or options.choices.named), "--abort stands alone"),
        (dry and not options.tag and not options.all, "--dry-run needs a TAG or --all"),
        (not (options.tag or options.all or options.go_on or options.abort or options.choices.named), "name a TAG"),
    )


def _told(shop: Workshop, upstream: Upstream, done: Rehearsal, outcome: str) -> RebaseResult:
    """What became of each patch; behind each hunk that found no place stands upstream's commit."""
    locked, name = shop.lock.upstream(), done.stop.id if done.stop else ""
    history = History.between(shop.mirror, locked, upstream)

    def behind(hunk: FailedHunk) -> FailedHunk:
        gone = tuple(line for line in hunk.expected if line not in hunk.found) or hunk.expected
        return replace(hunk, behind=history.behind(hunk.path, gone) if history else NONE)

    patches = tuple(replace(report, failed=tuple(map(behind, report.failed))) for report in done.reports)
    told = RebaseResult(upstream.tag, locked.tag, shop.project.tree, outcome, stopped_at=name, patches=patches)
    told = replace(told, seconds=round(done.seconds, 3), mirror=shop.mirror or "")
    return replace(told, older=_older(shop, upstream, done), astray=done.astray)


def _older(shop: Workshop, upstream: Upstream, done: Rehearsal) -> str:
    """Why an upstream that the lock does not have is taken for older than the locked one, if patches go for that."""
    locked = shop.lock.upstream()
    here = {report.id for report in done.locked.reports if report.commit}
    gone = [report.id for report in done.reports if report.outcome == PatchOutcome.SKIPPED and report.id in here]
    if upstream.tag in shop.listed or upstream.order > locked.order or not gone:
        return ""
    return (
        f"by its number or its date ({upstream.date}), {upstream.tag} is taken for older than {locked.tag}, and"
        f" from/until leave out {', '.join(gone)}. If it is not: enter it in patches/upstream.lock, at its place"
    )


# --- without touching anything -----------------------------------------------------------------------------------


def _rehearse(shop: Workshop, upstream: Upstream, options: Options) -> Rehearsal:
    keep_going = options.keep_going or options.all
    with scratch_repository(shop.cache.repo) as scratch:
        return shop.rehearse(scratch, upstream, choices=options.choices, keep_going=keep_going)


def _dry_run(project: Project, console: Console, options: Options) -> RebaseResult:
    shop = Workshop(project, console, options.mirror)
    assert options.tag is not None
    upstream = shop.find(options.tag)
    done = _rehearse(shop, upstream, options)
    result = _told(shop, upstream, done, "rehearsed")
    return replace(result, head=done.head if done.complete else "")


def _span(project: Project, console: Console, options: Options) -> SpanResult:
    """A dry run onto every tag of the lock; one that cannot be had is a row that says so."""
    shop = Workshop(project, console, options.mirror)
    shop.base(shop.lock.upstream())

    def row(upstream: Upstream) -> SpanRow:
        try:
            done = _rehearse(shop, upstream, options)
        except KvtoolError as err:
            word = "unreachable" if isinstance(err, NetworkError) else "failed"
            return SpanRow(upstream.tag, upstream.date, word, error=str(err))
        word = "complete" if done.complete else "conflict"
        return SpanRow(upstream.tag, upstream.date, word, done.reports, round(done.seconds, 3))

    rows = console.each("rehearsing", [*shop.lock.upstreams.values()], row, lambda upstream: upstream.tag)
    result = SpanResult(shop.lock.current, tuple(patch.id for patch in load_patches(project)), tuple(rows))
    if options.markdown:
        result.write_markdown(options.markdown)
    return result


# --- in the patched tree -----------------------------------------------------------------------------------------


def begin(project: Project, console: Console, options: Options) -> RebaseResult:
    """A rebase from the beginning; the tree is first brought to the locked upstream, or made."""
    shop = Workshop(project, console, options.mirror)
    if rebase_state.read_state(project.tree):
        raise not_clean(tree_state(project))
    assert options.tag is not None
    upstream, locked, tag = shop.find(options.tag), shop.lock.upstream(), options.tag
    brought = checkout.bring(shop, locked, pinned=False)
    if brought.applied is None:
        raise conflict_error(brought.patches, locked.tag) or KvtoolError("the series does not apply")
    with hold_tree(project, console):
        there = require_applied(project)
        if tag == locked.tag:
            return RebaseResult(tag, tag, project.tree, "unchanged", head=there.head, patches=brought.patches)
        git = Git(project.tree)
        take_base(git, shop.cache, tag)
        checkout.keep_branch(git, branch_of(tag), (there.head,))
        state = RebaseState(
            phase="begun",
            tag=tag,
            tree=upstream.tree,
            date=upstream.date,
            head=there.head,
            branch=there.branch,
            digest=brought.applied.digest,
            mirror=shop.mirror or "",
            at=there.head,
            choices=options.choices,
        )
        return _advance(shop, git, state)


def resume(project: Project, console: Console, options: Options) -> RebaseResult:
    """--continue, --abort, --skip, --drop, --accept-shrink in a rebase that stopped or was killed."""
    with hold_tree(project, console):
        state = rebase_state.read_state(project.tree)
        if state is None:
            raise UsageError("no rebase is under way", next_step="begin one: kvtool rebase TAG")
        git = Git(project.tree)
        if options.abort:
            return _abort(project, console, git, state)
        if state.phase == "writing":
            return _finished(project, transaction.carry_out(project, git, console, state))
        if state.phase == "aborting":
            raise TreeError("the rebase was being given up", next_step="kvtool rebase --abort finishes that")
        shop = Workshop(project, console, state.mirror)
        if state.tag not in shop.lock.upstreams:
            shop.lock = with_upstream(shop.lock, state.tag, state.tree, state.date)
        if shop.series(shop.lock.upstream()).digest != state.digest:
            if state.phase == "stopped":
                rebase_state.remember(git)
            raise TreeError(
                "patches/ or cpp/ changed since the rebase began",
                next_step="put them back with git; or kvtool rebase --abort and begin anew (rerere remembers what "
                "you resolved)",
            )
        decided = _decide(git, state, options)
        kept = rebase_state.kept_since(git, state, decided.at) if options.skip or options.drop else ""
        return replace(_advance(shop, git, decided), kept=kept)


def _abort(project: Project, console: Console, git: Git, state: RebaseState) -> RebaseResult:
    kept = ""
    if state.phase == "writing":
        transaction.take_back(project, git, console, state)
    else:
        kept = rebase_state.abort(git, console, state)
    lock = load_lock(project.lock)
    return RebaseResult(state.tag, lock.current, project.tree, "aborted", head=state.head, kept=kept)


def _decide(git: Git, state: RebaseState, options: Options) -> RebaseState:
    """Take what the person did in the tree and what they said on the command line."""
    for name in options.choices.named:
        if name != state.stop.id:
            raise UsageError(
                f"the rebase stopped at patch {state.stop.id!r}, not at {name!r}",
                next_step=f"name {state.stop.id!r}; or kvtool rebase --abort, and name {name!r} from the beginning",
            )
    if state.phase not in ("stopped", "taking"):
        return rebase_state.recover(git, state)
    with rebase_state.taking(git, state) as stopped:
        left_out = options.skip or options.drop
        at = replace(stopped, at=rebase_state.keep(git)) if left_out else rebase_state.take(git, stopped)
        return replace(at, choices=at.choices.plus(options.choices))


def _advance(shop: Workshop, git: Git, state: RebaseState) -> RebaseResult:
    """Move every patch; finish, or stop in the tree at the first one that needs a person."""
    project, upstream = shop.project, shop.lock.upstream(state.tag)
    stage = transaction.Stage(project, "rebase")
    for tag in (shop.lock.current, state.tag):
        shop.known[tag] = git.line("rev-parse", f"{base_ref(tag)}^{{commit}}")
    with scratch_below(project.tree, project.tree) as scratch:
        with shop.console.progress(f"moving the series to llama.cpp {state.tag}"):
            done = shop.rehearse(scratch, upstream, choices=state.choices)
        if stop := done.stop:
            git.fetch(scratch.repo, *filter(None, (stop.parent, stop.commit, stop.origin)))
            rebase_state.stop_at(git, shop.console, state, stop)
            result = _told(shop, upstream, done, "stopped")
            return replace(result, filled_in=rebase_state.filled_in(git))
        changes, applied = rebased(shop, scratch, upstream, done)
        write_range_diff(project.tree, scratch, shop.lock.current, done)
        git.fetch(scratch.repo, applied.head)
    checkout.keep_branch(git, branch_of(state.tag), (state.head, state.at, applied.head))  # made since it began
    written = transaction.write(stage, git, shop.console, state, changes, applied)
    finished = replace(_finished(project, written), patches=done.reports, seconds=round(done.seconds, 3))
    return replace(finished, older=_older(shop, upstream, done), astray=done.astray)


def _finished(project: Project, written: transaction.Written) -> RebaseResult:
    previous, applied = written.previous, written.applied
    result = RebaseResult(applied.tag, previous, project.tree, "rebased", applied.head, patches=applied.patches)
    return replace(result, files=written.files, range_diff=range_diff_path(project.tree, previous, applied.tag))


def command(env: Env, options: Options) -> Result:
    """Move the series to another upstream: patches/, upstream.lock and the patched tree.

    The series is first replayed on the locked upstream, then each patch is merged onto the new one; where it landed is
    checked against what became of the lines around it. A conflict (exit 3) stops in the patched tree with the markers
    in the files, and names patch, file and hunk, and how every later patch fares. Resolve it there, and --continue;
    or --skip, --drop, --abort. A patch that lost changes stops it too, until --accept-shrink. The lock moves only when
    everything has its place; a kill at any moment is finished, or undone, by --continue or --abort.

        kvtool rebase b11063
        kvtool rebase b12000 --mirror ~/src/llama.cpp --dry-run --keep-going
        kvtool rebase --dry-run --keep-going --all --markdown span.md

    Exit codes: 3 a patch needs a person, 4 the tree holds work of yours, 5 and 9 as in kvtool fetch.
    """
    project, console = env.project, env.console
    _check(options)
    toolchain.require_git()
    if not options.dry_run:
        project.refuse_packaged()
    for name in options.choices.named if options.tag else ():
        patch_named(load_patches(project), name)
    if options.all:
        return _span(project, console, options)
    if options.dry_run:
        return _dry_run(project, console, options)
    return (begin if options.tag else resume)(project, console, options)
