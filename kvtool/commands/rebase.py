"""Implement `kvtool rebase`: move the series to another upstream tag, and report the outcome of each patch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvtool.commands.rebase_results import RebaseResult, SpanResult, SpanRow
from kvtool.compile import toolchain
from kvtool.console import Console
from kvtool.errors import KvtoolError, LintError, NetworkError, TreeError, UsageError
from kvtool.gitcmd import Git, Scratch, scratch_repository
from kvtool.lint.project import lint_project
from kvtool.locks import hold_tree
from kvtool.options import Context, Env, Mirror, env_of, reject
from kvtool.project import Project
from kvtool.replay.apply import FailedHunk, conflict_error
from kvtool.replay.export import plan_rebase
from kvtool.replay.rebase_plan import Choices, Rehearsal, SeriesContext
from kvtool.result import FileChange, PatchOutcome, Result
from kvtool.series.changes import Change, preview_project, put_file
from kvtool.series.series import load_patches, patch_named
from kvtool.upstream.history import NONE, History
from kvtool.upstream.lock import Upstream, load_lock, pin, with_upstream
from kvtool.verify.named import known_tests
from kvtool.worktree import checkout, rebase_state, transaction
from kvtool.worktree.checkout import base_ref, branch_of, fetch_base, scratch_below
from kvtool.worktree.rebase_state import RebaseState, range_diff_path, write_range_diff
from kvtool.worktree.status import dirty_tree_error, read_applied, require_applied, tree_state


@dataclass(frozen=True)
class Options:
    tag: str | None = None
    mirror: str | None = None
    dry_run: bool = False
    keep_going: bool = False
    all: bool = False
    markdown: Path | None = None
    go_on: bool = False
    abort: bool = False
    skip: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()

    @property
    def choices(self) -> Choices:
        """Return the patches that the user wants to skip, drop or accept with fewer changes."""
        return Choices(skip=self.skip, drop=self.drop, accept=self.accept)


def _check(options: Options) -> None:
    dry = options.dry_run
    reject(
        "rebase",
        (options.all and (options.tag or not dry), "--all accepts no TAG and needs --dry-run"),
        (options.keep_going and not dry, "--keep-going needs --dry-run (a rebase reports every patch, then stops)"),
        (options.markdown and not options.all, "--markdown needs --all"),
        (
            dry and (options.go_on or options.abort),
            "--dry-run is a new trial, and cannot be combined with --continue or --abort",
        ),
        (options.go_on and (options.abort or options.tag), "--continue accepts no other options"),
        (options.abort and (options.tag or options.choices.named), "--abort accepts no other options"),
        (dry and not options.tag and not options.all, "--dry-run needs a TAG or --all"),
        (not (options.tag or options.all or options.go_on or options.abort or options.choices.named), "name a TAG"),
    )


def _told(context: SeriesContext, upstream: Upstream, done: Rehearsal, outcome: str) -> RebaseResult:
    """Return the result of a rebase, with the upstream commit that caused each conflict."""
    locked, name = context.lock.upstream(), done.stop.id if done.stop else ""
    history = History.open(context.mirror, locked, upstream)

    def behind(hunk: FailedHunk) -> FailedHunk:
        gone = tuple(line for line in hunk.expected if line not in hunk.found) or hunk.expected
        return replace(hunk, behind=history.blame(hunk.path, gone) if history else NONE)

    patches = tuple(replace(report, failed=tuple(map(behind, report.failed))) for report in done.reports)
    told = RebaseResult(upstream.tag, locked.tag, context.project.tree, outcome, stopped_at=name, patches=patches)
    told = replace(told, upstream=context.lock.name)
    told = replace(told, seconds=round(done.seconds, 3), mirror=context.mirror or "")
    return replace(told, older=_older(context, upstream, done), astray=done.astray)


def _older(context: SeriesContext, upstream: Upstream, done: Rehearsal) -> str:
    """Explain why an upstream that is not in the lock counts as older than the lock's current upstream.

    The explanation names the patches that `from` or `until` therefore leaves out. Returns "" if the upstream is in the
    lock, if it counts as newer, or if no patch is left out.
    """
    locked = context.lock.upstream()
    here = {report.id for report in done.locked.reports if report.commit}
    gone = [report.id for report in done.reports if report.outcome == PatchOutcome.SKIPPED and report.id in here]
    if upstream.tag in context.listed or upstream.order > locked.order or not gone:
        return ""
    return (
        f"kvtool considers {upstream.tag} older than {locked.tag}, by its number or its date ({upstream.date}), so"
        f" from/until leave out {', '.join(gone)}. If it is newer, add it to patches/upstream.lock at its place"
    )


# --- rebase without changing anything ----------------------------------------------------------------------------


def _rehearse(context: SeriesContext, upstream: Upstream, options: Options) -> Rehearsal:
    keep_going = options.keep_going or options.all
    with scratch_repository(context.cache.repo) as scratch:
        return context.rehearse(scratch, upstream, choices=options.choices, keep_going=keep_going)


def _dry_run(project: Project, console: Console, options: Options) -> RebaseResult:
    context = SeriesContext(project, console, options.mirror)
    assert options.tag is not None
    upstream = context.find(options.tag)
    done = _rehearse(context, upstream, options)
    result = _told(context, upstream, done, "rehearsed")
    return replace(result, head=done.head if done.complete else "")


def _span(project: Project, console: Console, options: Options) -> SpanResult:
    """Try a rebase onto each tag of the lock. If a tag cannot be fetched, its row contains the error."""
    context = SeriesContext(project, console, options.mirror)
    context.base(context.lock.upstream())

    def row(upstream: Upstream) -> SpanRow:
        try:
            done = _rehearse(context, upstream, options)
        except KvtoolError as err:
            word = "unreachable" if isinstance(err, NetworkError) else "failed"
            return SpanRow(upstream.tag, upstream.date, word, error=str(err))
        word = "complete" if done.complete else "conflict"
        return SpanRow(upstream.tag, upstream.date, word, done.reports, round(done.seconds, 3))

    rows = console.each("rehearsing", [*context.lock.upstreams.values()], row, lambda upstream: upstream.tag)
    result = SpanResult(context.lock.current, tuple(patch.id for patch in load_patches(project)), tuple(rows))
    if options.markdown:
        result.write_markdown(options.markdown)
    return result


# --- rebase in the patched tree ----------------------------------------------------------------------------------


def begin(project: Project, console: Console, options: Options) -> RebaseResult:
    """Start a rebase.

    First update the tree to the locked upstream, or create the tree.
    """
    context = SeriesContext(project, console, options.mirror)
    if rebase_state.read_state(project.tree):
        raise dirty_tree_error(tree_state(project))
    assert options.tag is not None
    if not context.lock.current:
        return _choose_first(context, options.tag)
    upstream, locked, tag = context.find(options.tag), context.lock.upstream(), options.tag
    held = read_applied(project.tree)
    brought = checkout.ensure_tree(context.with_groups(held.groups if held else ()), locked, pinned=False)
    if brought.applied is None:
        raise conflict_error(brought.patches, locked.label) or KvtoolError("the series does not apply")
    with hold_tree(project, console):
        there = require_applied(project)
        if tag == locked.tag:
            return RebaseResult(tag, tag, project.tree, "unchanged", head=there.head, patches=brought.patches)
        git = Git(project.tree)
        fetch_base(git, context.cache, tag)
        checkout.check_branch_replaceable(git, branch_of(tag), (there.head,))
        state = RebaseState(
            phase="begun",
            tag=tag,
            tree=upstream.tree,
            date=upstream.date,
            head=there.head,
            branch=there.branch,
            digest=context.series(locked).digest,
            mirror=context.mirror or "",
            at=there.head,
            choices=options.choices,
        )
        return _advance(context, git, state)


def _choose_first(context: SeriesContext, tag: str) -> RebaseResult:
    """Pin the first upstream of a project that has none, and make its tree.

    If this fails, upstream.lock is restored.
    """
    project, upstream = context.project, context.find(tag)
    before = project.lock.read_bytes()
    change = Change("patches/upstream.lock", "change", pin(before.decode("utf-8"), context.lock, tag).encode())
    put_file(project.lock, change)
    try:
        done = checkout.ensure_tree(SeriesContext(project, context.console, context.mirror), upstream, pinned=False)
        if done.applied is None:
            raise conflict_error(done.patches, upstream.label) or KvtoolError("the series does not apply")
    except BaseException:
        put_file(project.lock, replace(change, content=before))
        raise
    files = (FileChange(change.path, change.action),)
    return RebaseResult(tag, "", project.tree, "rebased", done.applied.head, files=files, patches=done.patches)


def resume(project: Project, console: Console, options: Options) -> RebaseResult:
    """Run --continue, --abort, --skip, --drop or --accept-shrink after a rebase stopped or was killed."""
    with hold_tree(project, console):
        state = rebase_state.read_state(project.tree)
        if state is None:
            raise UsageError("no rebase is under way", next_step="begin one: kvtool rebase TAG")
        git = Git(project.tree)
        if options.abort:
            return _abort(project, console, git, state)
        if state.phase == "writing":
            return _finished(project, transaction.finish_rebase(project, git, console, state))
        if state.phase == "aborting":
            raise TreeError(
                "kvtool was killed while it cancelled the rebase", next_step="kvtool rebase --abort finishes it"
            )
        context = SeriesContext(project, console, state.mirror)
        if state.tag not in context.lock.upstreams:
            context.lock = with_upstream(context.lock, state.tag, state.tree, state.date)
        if context.series(context.lock.upstream()).digest != state.digest:
            if state.phase == "stopped":
                rebase_state.record_rerere(git)
            raise TreeError(
                "patches/ or cpp/ changed since the rebase began",
                next_step="restore them with git; or kvtool rebase --abort and start again (git rerere repeats what "
                "you resolved)",
            )
        decided = _decide(git, state, options)
        kept = rebase_state.stash_ref(git, state, decided.at) if options.skip or options.drop else ""
        return replace(_advance(context, git, decided), kept=kept)


def _abort(project: Project, console: Console, git: Git, state: RebaseState) -> RebaseResult:
    kept = ""
    if state.phase == "writing":
        transaction.roll_back(project, git, console, state)
    else:
        kept = rebase_state.abort(git, console, state)
    lock = load_lock(project.lock)
    return RebaseResult(state.tag, lock.current, project.tree, "aborted", head=state.head, kept=kept)


def _decide(git: Git, state: RebaseState, options: Options) -> RebaseState:
    """Return the state of the rebase with the user's edits in the tree and the decisions from the command line."""
    for name in options.choices.named:
        if name != state.stop.id:
            raise UsageError(
                f"the rebase stopped at patch {state.stop.id!r}, not at {name!r}",
                next_step=f"name {state.stop.id!r}; or kvtool rebase --abort, and name {name!r} from the beginning",
            )
    if state.phase not in ("stopped", "taking"):
        return rebase_state.recover(git, state)
    with rebase_state.resolving(git, state) as stopped:
        if options.skip or options.drop:
            decided = replace(stopped, at=rebase_state.stash_as_commit(git))
        else:
            decided = rebase_state.accept_resolution(git, stopped)
        return replace(decided, choices=decided.choices.merged_with(options.choices))


def _advance(context: SeriesContext, git: Git, state: RebaseState) -> RebaseResult:
    """Move the patches to the new upstream.

    If a patch needs the user, stop and leave its conflict in the tree. Otherwise finish the rebase.
    """
    project, upstream = context.project, context.lock.upstream(state.tag)
    stage = transaction.Stage(project, "rebase")
    for tag in (context.lock.current, state.tag):
        context.known[tag] = git.line("rev-parse", f"{base_ref(tag)}^{{commit}}")
    with scratch_below(project.tree, project.tree) as scratch:
        with context.console.progress(f"moving the series to {context.lock.name} {state.tag}"):
            done = context.rehearse(scratch, upstream, choices=state.choices)
        if stop := done.stop:
            git.fetch(scratch.repo, *filter(None, (stop.parent, stop.commit, stop.origin)))
            state = rebase_state.stop_at(git, context.console, state, stop)
            result = _told(context, upstream, done, "stopped")
            return replace(result, filled_in=rebase_state.rerere_resolved(state))
        held = read_applied(project.tree)
        changes, applied = plan_rebase(context, scratch, upstream, done, held.groups if held else ())
        _check_lint(project, changes, scratch)
        write_range_diff(project.tree, scratch, context.lock.current, done)
        git.fetch(scratch.repo, applied.head)
    # the user may have created the branch since the rebase began
    checkout.check_branch_replaceable(git, branch_of(state.tag), (state.head, state.at, applied.head))
    written = transaction.commit_rebase(stage, git, context.console, state, changes, applied)
    finished = replace(_finished(project, written), patches=done.reports, seconds=round(done.seconds, 3))
    return replace(finished, older=_older(context, upstream, done), astray=done.astray)


def _check_lint(project: Project, changes: tuple[Change, ...], scratch: Scratch) -> None:
    """Raise LintError if lint finds a fault in a patch file of the rebased series that the old series did not have."""
    after = preview_project(project, changes, scratch.place())
    faults = [lint_project(each, known_tests(each.cpp)) for each in (project, after)]
    known = {(fault.file, fault.rule) for fault in faults[0]}
    fresh = [fault for fault in faults[1] if fault.file.endswith(".patch") and (fault.file, fault.rule) not in known]
    if fresh:
        raise LintError(
            f"the rebased series would not pass kvtool lint: {fresh[0]}",
            why="; ".join(map(str, fresh[1:4])) or "the resolution of the patch adds it",
            next_step="correct it in the tree, then kvtool rebase --continue; or cancel: kvtool rebase --abort",
        )


def _finished(project: Project, written: transaction.CommittedRebase) -> RebaseResult:
    previous, applied = written.previous, written.applied
    result = RebaseResult(applied.tag, previous, project.tree, "rebased", applied.head, patches=applied.patches)
    return replace(result, files=written.files, range_diff=range_diff_path(project.tree, previous, applied.tag))


def run_rebase(env: Env, options: Options) -> Result:
    """Run the kind of rebase that the options choose: a trial, a new rebase, or --continue, --abort and the like."""
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


def command(
    ctx: Context,
    tag: Annotated[
        str | None, Argument(metavar="TAG", help="Upstream tag to rebase onto. It need not be in upstream.lock.")
    ] = None,
    mirror: Mirror = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Change nothing, not even the tree.")] = False,
    keep_going: Annotated[
        bool, Option("--keep-going", help="With --dry-run: continue after a conflict and try every patch.")
    ] = False,
    all: Annotated[
        bool,
        Option("--all", help="With --dry-run: try every tag of upstream.lock. Missing tags are fetched."),
    ] = False,
    markdown: Annotated[
        Path | None, Option("--markdown", metavar="FILE", help="With --all: also write the table to this file.")
    ] = None,
    go_on: Annotated[
        bool, Option("--continue", help="Accept the files of the tree as the resolution, and continue.")
    ] = False,
    abort: Annotated[bool, Option("--abort", help="Cancel the rebase; restore the tree and the project.")] = False,
    skip: Annotated[
        list[str] | None,
        Option("--skip", metavar="ID", help="Leave this patch out from the new tag on. This sets its `until`."),
    ] = None,
    drop: Annotated[list[str] | None, Option("--drop", metavar="ID", help="Remove this patch from the series.")] = None,
    accept: Annotated[
        list[str] | None,
        Option(
            "--accept-shrink",
            metavar="ID",
            help="Accept that this patch has fewer changes than before, also on older tags.",
        ),
    ] = None,
) -> Result:
    """Move the series to another upstream: patches/, upstream.lock and the patched tree.

    Applies the patches to the locked upstream, merges each of them into the new upstream, and checks the place of each
    hunk. At a conflict, the rebase stops with exit code 3. The patched tree then contains the conflict markers, and the
    output names the patch, its hunks, and the later patches that apply. Resolve the conflict and run --continue, or
    choose --skip, --drop or --abort. The rebase also stops at a patch that would lose changes; --accept-shrink accepts
    the loss.

    upstream.lock and patches/ change only at the end, after every patch was merged. If kvtool is killed, --continue
    completes the rebase and --abort cancels it. All groups of the series move together, because they share one
    upstream.lock. A tree that has only some groups has the same groups after the rebase.

        kvtool rebase b11063
        kvtool rebase b12000 --mirror ~/src/llama.cpp --dry-run --keep-going
        kvtool rebase --dry-run --keep-going --all --markdown span.md

    Exit codes: 3 a patch has a conflict or would lose changes, 4 the tree contains work that would be lost, 5 and 9 as
    in kvtool fetch.
    """
    options = Options(
        tag=tag,
        mirror=mirror,
        dry_run=dry_run,
        keep_going=keep_going,
        all=all,
        markdown=markdown,
        go_on=go_on,
        abort=abort,
        skip=tuple(skip or ()),
        drop=tuple(drop or ()),
        accept=tuple(accept or ()),
    )
    return run_rebase(env_of(ctx), options)
