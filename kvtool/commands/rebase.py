"""`kvtool rebase`: move the series to another upstream, and tell what becomes of each patch."""

from kvtool.build import toolchain
from kvtool.commands.rebase_results import RebaseResult, SpanResult, span_row
from kvtool.commands.rebase_tree import RebaseOptions, begin, refuse_unknown, resume, with_history
from kvtool.console import Console
from kvtool.env import Env
from kvtool.errors import KvtoolError
from kvtool.gitcmd import scratch_repository
from kvtool.options import refuse
from kvtool.project import Project
from kvtool.result import Result
from kvtool.tree.rebase_plan import Choices, Rehearsal, Workshop
from kvtool.tree.series import load_patches
from kvtool.upstream.history import History
from kvtool.upstream.lock import Upstream


def _check(options: RebaseOptions) -> None:
    dry = options.dry_run
    refuse(
        "rebase",
        (options.all and (options.tag or not dry), "--all takes no TAG and needs --dry-run"),
        (options.keep_going and not dry, "--keep-going needs --dry-run (a rebase tells of every patch, then stops)"),
        (options.markdown and not options.all, "--markdown needs --all"),
        (dry and (options.go_on or options.abort), "--dry-run begins anew"),
        (options.go_on and (options.abort or options.tag), "--continue stands alone"),
        (options.abort and (options.tag or options.named), "--abort stands alone"),
        (dry and not options.tag and not options.all, "--dry-run needs a TAG or --all"),
        (not (options.tag or options.all or options.go_on or options.abort or options.named), "name a TAG"),
    )


# --- without touching anything -----------------------------------------------------------------------------------


def _rehearse(shop: Workshop, upstream: Upstream, options: RebaseOptions) -> Rehearsal:
    choices = Choices({}, *(frozenset(names) for names in (options.skip, options.drop, options.accept)))
    with scratch_repository(shop.cache.repo) as scratch:
        return shop.rehearse(scratch, upstream, choices=choices, keep_going=options.keep_going or options.all)


def _dry_run(project: Project, console: Console, options: RebaseOptions, tag: str) -> RebaseResult:
    shop = Workshop(project, console, options.mirror)
    refuse_unknown(project, options.named)
    upstream, locked = shop.find(tag), shop.lock.upstream()
    done = _rehearse(shop, upstream, options)
    history = History.between(options.mirror, locked, upstream)
    return RebaseResult(
        tag=tag,
        previous=locked.tag,
        tree=project.tree,
        outcome="rehearsed",
        head=done.head if done.complete else "",
        stopped_at=done.stop.id if done.stop else "",
        patches=with_history(done.reports, history),
        seconds=round(done.seconds, 3),
    )


def _span(project: Project, console: Console, options: RebaseOptions) -> SpanResult:
    """A dry run onto every tag of the lock; one that cannot be had is a row that says so."""
    shop, rows = Workshop(project, console, options.mirror), []
    lock = shop.lock
    shop.base(lock.upstream())
    with console.progress("rehearsing", len(lock.upstreams)) as bar:
        for number, (tag, upstream) in enumerate(lock.upstreams.items()):
            bar.update(number, tag)
            try:
                rows.append(span_row(upstream, _rehearse(shop, upstream, options)))
            except KvtoolError as err:
                rows.append(span_row(upstream, err))
    ids = tuple(patch.id for patch in load_patches(project))
    result = SpanResult(lock.current, ids, tuple(rows))
    if options.markdown:
        result.write_markdown(options.markdown)
    return result


def command(env: Env, options: RebaseOptions) -> Result:
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
    if options.all:
        return _span(project, console, options)
    if options.dry_run:
        assert options.tag is not None
        return _dry_run(project, console, options, options.tag)
    if options.tag is not None:
        return begin(project, console, options, options.tag)
    return resume(project, console, options)
