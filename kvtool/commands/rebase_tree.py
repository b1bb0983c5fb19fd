"""A rebase in the patched tree: begin, stop for a person, go on, give up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.commands.rebase_results import RebaseResult, WrittenFile
from kvtool.console import Console
from kvtool.errors import KvtoolError, TreeError, UsageError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.tree import checkout, rebasing, relock
from kvtool.tree.apart import applied_there, locked_base
from kvtool.tree.checkout import base_ref, scratch_below, take_base
from kvtool.tree.rebasing import Journal
from kvtool.tree.rehearse import Based, Rehearsal, Stop, rehearse
from kvtool.tree.replay import PatchReport, conflict_error
from kvtool.tree.series import Series, load_patches, load_series
from kvtool.tree.worktree import branch_of, require_applied
from kvtool.upstream import discover
from kvtool.upstream.cache import Cache, guard, tree_lock
from kvtool.upstream.history import NONE, History
from kvtool.upstream.lock import Lock, load_lock
from kvtool.upstream.pin import with_upstream


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

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
    def named(self) -> tuple[str, ...]:
        return (*self.skip, *self.drop, *self.accept)


@dataclass(frozen=True)
class _Session:
    """A rebase in the patched tree: the series on both upstreams, and what was decided."""

    project: Project
    console: Console
    git: Git
    lock: Lock
    old: Based
    new: Based
    journal: Journal


def with_history(reports: tuple[PatchReport, ...], history: History | None) -> tuple[PatchReport, ...]:
    """Name upstream's commit behind each hunk that found no place."""

    def told(report: PatchReport) -> PatchReport:
        hunks = []
        for hunk in report.failed:
            gone = tuple(line for line in hunk.expected if line not in hunk.found) or hunk.expected
            hunks.append(replace(hunk, behind=history.behind(hunk.path, gone) if history else NONE))
        return replace(report, failed=tuple(hunks))

    return tuple(told(report) for report in reports)


def refuse_unknown(project: Project, names: tuple[str, ...]) -> None:
    """UsageError for a patch id that the series does not have."""
    known = [patch.id for patch in load_patches(project)]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no patch {name!r}", next_step=f"name one of: {', '.join(known)}")


def begin(project: Project, console: Console, options: Options, tag: str) -> RebaseResult:
    """A rebase from the beginning; the tree is first brought to the locked upstream, or made."""
    cache, lock = Cache(project.cache), load_lock(project.lock)
    refuse_unknown(project, options.named)
    if (project.tree / ".git").is_dir() and (under_way := rebasing.read_journal(project.tree)):
        raise TreeError(
            f"a rebase onto {under_way.tag} is under way",
            next_step="go on: kvtool rebase --continue; or give it up: kvtool rebase --abort",
        )
    lock, fetched = discover.ensure(cache, lock, tag, console, options.mirror)
    base = locked_base(cache, lock, console, options.mirror)
    series = load_series(project, lock, lock.upstream())
    outcome = checkout.bring(project, console, cache, base, series, pinned=False)
    if outcome.applied is None:
        assert outcome.replayed is not None
        raise conflict_error(outcome.replayed.reports, lock.current) or KvtoolError("the series does not apply")
    with guard(tree_lock(cache.root, project.tree), console, str(project.tree)):
        state = require_applied(project)
        git = Git(project.tree)
        take_base(git, cache, tag)
        journal = Journal(
            phase="begun",
            tag=tag,
            tree=fetched.upstream.tree,
            date=fetched.upstream.date,
            head=state.head,
            branch=state.branch,
            digest=series.digest,
            mirror=options.mirror or "",
            at=state.head,
            skip=options.skip,
            drop=options.drop,
            accept=options.accept,
        )
        if tag == lock.current:
            return _unchanged(project, lock, outcome.applied.patches, state.head)
        session = _open(project, console, lock, series, journal)
        checkout.keep_branch(git, branch_of(tag), (state.head,))
        return _advance(session)


def _unchanged(project: Project, lock: Lock, patches: tuple[PatchReport, ...], head: str) -> RebaseResult:
    return RebaseResult(lock.current, lock.current, project.tree, "unchanged", head, "", None, (), patches, 0.0)


def _open(project: Project, console: Console, lock: Lock, series: Series, journal: Journal) -> _Session:
    git = Git(project.tree)
    old, new = (git.line("rev-parse", f"{base_ref(tag)}^{{commit}}") for tag in (lock.current, journal.tag))
    target = Based(load_series(project, lock, lock.upstream(journal.tag)), new)
    known = Based(series, old, applied_there(project.tree, series, old))
    return _Session(project, console, git, lock, known, target, journal)


def resume(project: Project, console: Console, options: Options) -> RebaseResult:
    """--continue, --abort, --skip, --drop, --accept-shrink in a rebase that stopped or was killed."""
    tree = project.tree
    if not (tree / ".git").is_dir() or rebasing.read_journal(tree) is None:
        raise UsageError("no rebase is under way", next_step="begin one: kvtool rebase TAG")
    with guard(tree_lock(project.cache, tree), console, str(tree)):
        journal = rebasing.read_journal(tree)
        if journal is None:
            raise UsageError("no rebase is under way any more", next_step="kvtool status")
        git = Git(tree)
        if options.abort:
            return _abort(project, console, git, journal)
        if journal.phase == "writing":
            written = relock.carry_out(project, git, console)
            return _finished(project, written, written.applied.patches, 0.0)
        if journal.phase == "aborting":
            raise TreeError("the rebase was being given up", next_step="kvtool rebase --abort finishes that")
        lock = load_lock(project.lock)
        previous = lock.current
        if journal.tag not in lock.upstreams:
            lock = with_upstream(lock, journal.tag, journal.tree, journal.date)
        series = load_series(project, lock, lock.upstream(previous))
        if series.digest != journal.digest:
            raise TreeError(
                "patches/ or cpp/ changed since the rebase began",
                next_step="put them back with git; or kvtool rebase --abort and begin anew (rerere remembers what "
                "you resolved)",
            )
        journal = _decide(tree, git, journal, options)
        return _advance(_open(project, console, lock, series, journal))


def _abort(project: Project, console: Console, git: Git, journal: Journal) -> RebaseResult:
    if journal.phase == "writing":
        relock.take_back(project, git, console, journal)
    else:
        rebasing.abort(project.tree, git, console, journal)
    lock = load_lock(project.lock)
    return RebaseResult(journal.tag, lock.current, project.tree, "aborted", journal.head, "", None, (), (), 0.0)


def _decide(tree: Path, git: Git, journal: Journal, options: Options) -> Journal:
    """Take what the person did in the tree and what they said on the command line."""
    for name in options.named:
        if name != journal.patch:
            raise UsageError(
                f"the rebase stopped at patch {journal.patch!r}, not at {name!r}",
                next_step=f"name {journal.patch!r}; or kvtool rebase --abort, and name {name!r} from the beginning",
            )
    if journal.phase not in ("stopped", "taking"):
        return rebasing.recover(tree, git, journal)
    with rebasing.taking(tree, journal) as stopped:
        if options.skip or options.drop:
            left_out = replace(stopped, at=rebasing.keep(tree, git))
            return replace(left_out, skip=(*journal.skip, *options.skip), drop=(*journal.drop, *options.drop))
        taken = rebasing.take(tree, git, stopped)
        return replace(taken, accept=(*journal.accept, *options.accept))


def _advance(session: _Session) -> RebaseResult:
    """Move every patch; finish, or stop in the tree at the first one that needs a person."""
    project, journal = session.project, session.journal
    with scratch_below(project.tree) as scratch:
        for name in ("move", "plan"):
            (scratch / name).mkdir()
        with session.console.progress(f"moving the series to llama.cpp {journal.tag}"):
            done = rehearse(session.git, session.old, session.new, scratch / "move", choices=journal.choices)
        if done.stop is not None:
            return _stop(session, done, done.stop)
        todo = relock.plan(project, session.git, session.lock, session.new, done, scratch / "plan")
        relock.write_range_diff(project.tree, session.git, session.lock.current, done)
        written = relock.write(project, session.git, session.console, journal, todo)
    return _finished(project, written, done.reports, done.seconds)


def _finished(
    project: Project, written: relock.Written, reports: tuple[PatchReport, ...], seconds: float
) -> RebaseResult:
    return RebaseResult(
        tag=written.applied.tag,
        previous=written.previous,
        tree=project.tree,
        outcome="rebased",
        head=written.applied.head,
        stopped_at="",
        range_diff=relock.range_diff_path(project.tree, written.previous, written.applied.tag),
        files=tuple(WrittenFile(path, action) for path, action in written.files),
        patches=reports,
        seconds=round(seconds, 3),
    )


def _stop(session: _Session, done: Rehearsal, stop: Stop) -> RebaseResult:
    project, journal, lock = session.project, session.journal, session.lock
    rebasing.stop_at(project.tree, session.git, session.console, journal, stop)
    new = lock.upstream(journal.tag)
    return RebaseResult(
        tag=journal.tag,
        previous=lock.current,
        tree=project.tree,
        outcome="stopped",
        head="",
        stopped_at=stop.id,
        range_diff=None,
        files=(),
        patches=with_history(done.reports, History.between(journal.mirror or None, lock.upstream(), new)),
        seconds=round(done.seconds, 3),
        filled_in=rebasing.filled_in(project.tree, session.git),
    )
