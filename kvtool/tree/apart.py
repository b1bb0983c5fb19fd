"""Try a series beside everything: in the cache's repository, with a place of its own for every new object."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import NetworkError, TreeError, UsageError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.result import PatchOutcome
from kvtool.tree.merge import misplaced
from kvtool.tree.rehearse import Based, Choices, Rehearsal, origins, rehearse
from kvtool.tree.replay import PatchReport, Replayed, replay
from kvtool.tree.series import Series, load_series
from kvtool.tree.worktree import read_applied
from kvtool.upstream import sources
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock
from kvtool.upstream.sources import Fetched


def locked_base(cache: Cache, lock: Lock, console: Console, mirror: str | None = None) -> str:
    """The commit of the locked upstream in the cache; the mirror is asked last, it may have another tag only."""
    try:
        return sources.ensure(cache, lock, lock.upstream(), console).commit
    except (NetworkError, UsageError):
        if mirror is None:
            raise
        return sources.ensure(cache, lock, lock.upstream(), console, mirror).commit


def rehearse_apart(
    project: Project,
    cache: Cache,
    lock: Lock,
    base: str,
    fetched: Fetched,
    *,
    choices: Choices | None = None,
    keep_going: bool = True,
) -> Rehearsal:
    """What a rebase of the project's series onto a fetched upstream would do; nothing is left of it but this.

    base: the commit of the locked upstream in the cache; lock: one that knows the fetched upstream.
    """
    series = load_series(project, lock, lock.upstream())
    made = applied_there(project.tree, series, base)
    old = Based(series, base, made)
    new = Based(load_series(project, lock, fetched.upstream), fetched.commit)
    with tempfile.TemporaryDirectory(prefix="kvtool-rebase-") as name:
        scratch = Path(name)
        git = cache.git.quarantined(scratch, *([project.tree / ".git" / "objects"] if made else []))
        return rehearse(git, old, new, scratch, choices=choices, keep_going=keep_going)


def applied_there(tree: Path, series: Series, base: str) -> Replayed | None:
    """The series' commits in a patched tree, which need not be made again; None when it has not exactly these."""
    with contextlib.suppress(TreeError):
        applied = read_applied(tree)
        if applied and (applied.digest, applied.base) == (series.digest, base):
            made = Git(tree).resolve(f"{applied.head}^{{tree}}")
            return Replayed(base, applied.head, made, applied.patches) if made else None
    return None


def placed_wrong(project: Project, cache: Cache, lock: Lock, base: str, fetched: Fetched) -> tuple[PatchReport, ...]:
    """What plain `kvtool apply` of another upstream than the locked one would do wrong: all its reports, or ().

    base: the commit of the locked upstream in the cache. () too when the series does not apply: that shows by itself.
    """
    with tempfile.TemporaryDirectory(prefix="kvtool-apply-") as name:
        scratch = Path(name)
        git = cache.git.quarantined(scratch)
        done = []
        for upstream, commit in ((lock.upstream(), base), (fetched.upstream, fetched.commit)):
            place = scratch / commit
            place.mkdir()
            done.append(replay(git, commit, load_series(project, lock, upstream), place))
        locked, plain = done
        if not (locked.complete and plain.complete):
            return ()
        known, reports = origins(git, locked), []
        for report in plain.reports:
            origin = known.get(report.id) if report.commit else None
            wrong = misplaced(git, origin, f"{report.commit}^", report.commit) if origin else ()
            reports.append(replace(report, outcome=PatchOutcome.CONFLICT, commit="", failed=wrong) if wrong else report)
    return tuple(reports) if any(report.failed for report in reports) else ()
