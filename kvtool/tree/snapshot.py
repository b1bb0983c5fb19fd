"""A state of the series, as `kvtool diff` names it: which patches, on which upstream, as commits.

TAG        patches/ and cpp/ as they are, on that upstream of the lock
.          the same, on the lock's current upstream
REV        patches/ and cpp/ at a revision of the project's git repository, on the upstream its lock has as current
REV:TAG    the same, on another upstream
tree       the commits of the patched tree as it is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.errors import UsageError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.result import PatchOutcome
from kvtool.tree.borrow import Borrowed
from kvtool.tree.replay import PatchReport, replay
from kvtool.tree.series import load_series
from kvtool.tree.worktree import not_clean, tree_state
from kvtool.upstream.lock import Lock, Upstream, load_lock

WORKING, TREE = ".", "tree"
Ensure = Callable[[Lock, Upstream], str]  # has an upstream in the cache; its base commit


@dataclass(frozen=True)
class Spec:
    """A parsed name. revision: "" for the working files; tag: "" for the lock's current one."""

    revision: str
    tag: str
    tree: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A state of the series as commits base..head. revision: the full commit id, "" for working files or the tree.

    missing: patches that do not apply there, "id: outcome"; ids: patch id by commit.
    """

    name: str
    revision: str
    tag: str
    base: str
    head: str
    missing: tuple[str, ...]
    ids: dict[str, str]


def parse_spec(name: str, lock: Lock) -> Spec:
    """Take a name apart; whether a revision exists is not looked at."""
    if name == TREE:
        return Spec("", "", tree=True)
    revision, colon, tag = name.rpartition(":")
    if colon:
        return Spec("" if revision == WORKING else revision, tag)
    if name == WORKING or name in lock.upstreams:
        return Spec("", "" if name == WORKING else name)
    return Spec(name, "")


def take(project: Project, name: str, borrowed: Borrowed, ensure: Ensure) -> Snapshot:
    """Build the commits of a state in a throw-away repository. UsageError for a name that means nothing here."""
    spec = parse_spec(name, load_lock(project.lock))
    if spec.tree:
        return _tree(project, name)
    place = borrowed.place(f"state-{len(list(borrowed.scratch.iterdir()))}")
    commit = ""
    if spec.revision:
        commit = _extract(project, spec.revision, place)
        project = replace(project, root=place, patches=place / "patches", cpp=place / "cpp")
    lock = load_lock(project.lock)
    upstream = lock.upstream(spec.tag or None)
    series = load_series(project, lock, upstream)
    base = ensure(lock, upstream)
    replayed = replay(borrowed.git, base, series, borrowed.place(f"{place.name}-index"))
    return Snapshot(name, commit, upstream.tag, base, replayed.head, _missing(replayed.reports), _ids(replayed.reports))


def _tree(project: Project, name: str) -> Snapshot:
    state = tree_state(project)
    if state.applied is None:
        raise not_clean(state)
    applied = state.applied
    return Snapshot(name, "", applied.tag, applied.base, state.head, (), _ids(applied.patches))


def _ids(reports: tuple[PatchReport, ...]) -> dict[str, str]:
    return {report.commit: report.id for report in reports if report.commit}


def _missing(reports: tuple[PatchReport, ...]) -> tuple[str, ...]:
    return tuple(f"{report.id}: {report.outcome}" for report in reports if report.outcome is not PatchOutcome.APPLIED)


def _extract(project: Project, revision: str, place: Path) -> str:
    """Write patches/ and cpp/ of a revision into `place`; the revision's commit id."""
    git = Git(project.root)
    commit = git.resolve(f"{revision}^{{commit}}")
    if commit is None:
        inside = git.ok("rev-parse", "--git-dir")
        raise UsageError(
            f"{revision!r} is neither an upstream nor a revision",
            why="patches/upstream.lock does not know it"
            + (f", and {project.root} has no such commit" if inside else f", and {project.root} is no git repository"),
            next_step="name a tag of the lock, a commit of this repository, REV:TAG, `.` or `tree`",
        )
    prefix = git.line("rev-parse", "--show-prefix")
    # `place` as the work tree: nothing of the user's (attributes, the directory they stand in) then has a say.
    where = git.line("rev-parse", "--absolute-git-dir")
    env = {"GIT_DIR": where, "GIT_WORK_TREE": str(place), "GIT_INDEX_FILE": str(place / "index")}
    there = Git(place)
    for folder in ("patches", "cpp"):
        if git.resolve(f"{commit}:{prefix}{folder}"):
            there.run("read-tree", f"--prefix={folder}/", f"{commit}:{prefix}{folder}", env=env)
    if not git.resolve(f"{commit}:{prefix}patches/series.toml"):
        raise UsageError(f"{revision} has no patches/series.toml", why=f"commit {commit[:10]} is no kvtool project")
    there.run("checkout-index", "--all", env=env)
    return commit
