"""Compare two states of the series.

A state is the commits of the patches on an upstream tag. The user names it in one of these ways:

    TAG        patches/ and cpp/ as they are now, on this tag of upstream.lock
    .          patches/ and cpp/ as they are now, on the current tag of upstream.lock
    REV        patches/ and cpp/ at a revision of the project's git repository, on the tag that was current there
    REV:TAG    patches/ and cpp/ at a revision, on another tag
    tree       the commits of the patched tree

Commits are paired by the ids of their patches, and git range-diff compares one pair at a time. If git range-diff got
all commits at once, it would pair them by similarity. It would then report a small patch with one changed line as
removed and added.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.errors import UsageError
from kvtool.gitcmd import Git, Scratch
from kvtool.project import Project
from kvtool.replay.apply import Applied, PatchReport
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import PatchOutcome
from kvtool.series.patchfile import PLAIN_FLAGS

WORKING, TREE = ".", "tree"


@dataclass(frozen=True)
class Snapshot:
    """Hold a state of the series as the commits base..head.

    revision: the full id of the project's commit, "" for the files as they are now and for the tree
    missing: the patches that do not apply to the upstream of this state, as "id: outcome"
    ids: the id of each commit's patch, by commit id
    """

    name: str
    revision: str
    tag: str
    base: str
    head: str
    missing: tuple[str, ...]
    ids: dict[str, str]


def tree_snapshot(applied: Applied, head: str) -> Snapshot:
    """Return the state `tree`: the commits of the patched tree up to `head`."""
    return Snapshot(TREE, "", applied.tag, applied.base, head, (), _ids(applied.patches))


def snapshot(context: SeriesContext, name: str, scratch: Scratch) -> Snapshot:
    """Build the commits of a state in a temporary repository. Raise UsageError if `name` is not a state.

    The state `tree` is not built here; see tree_snapshot().
    """
    revision, colon, tag = name.rpartition(":")
    if not colon:
        revision, tag = ("", name) if name in context.lock.upstreams else (name, "")
    commit = ""
    if revision not in ("", WORKING):
        place = scratch.place()
        commit = _extract(context.project, revision, place)
        context = SeriesContext(replace(context.project, root=place), context.console, context.mirror)
    upstream = context.lock.upstream(tag or None)
    made = context.build(scratch, upstream)
    missing = tuple(f"{r.id}: {r.outcome}" for r in made.reports if r.outcome is not PatchOutcome.APPLIED)
    return Snapshot(name, commit, upstream.tag, made.base, made.head, missing, _ids(made.reports))


def _ids(reports: tuple[PatchReport, ...]) -> dict[str, str]:
    return {report.commit: report.id for report in reports if report.commit}


def _extract(project: Project, revision: str, place: Path) -> str:
    """Write patches/ and cpp/ of a revision into `place`, and return the full id of its commit."""
    git = Git(project.root)
    commit = git.resolve(f"{revision}^{{commit}}")
    if commit is None:
        inside = git.ok("rev-parse", "--git-dir")
        raise UsageError(
            f"{revision!r} is neither an upstream nor a revision",
            why="patches/upstream.lock does not know it"
            + (
                f", and {project.root} has no such commit"
                if inside
                else f", and {project.root} is not a git repository"
            ),
            next_step="name a tag of the lock, a commit of this repository, REV:TAG, `.` or `tree`",
        )
    prefix = git.line("rev-parse", "--show-prefix")
    # Use `place` as the work tree, so that the user's attributes and current directory have no effect.
    where = git.line("rev-parse", "--absolute-git-dir")
    env = {"GIT_DIR": where, "GIT_WORK_TREE": str(place), "GIT_INDEX_FILE": str(place / "index")}
    there = Git(place)
    for folder in ("patches", "cpp"):
        if git.resolve(f"{commit}:{prefix}{folder}"):
            there.run("read-tree", f"--prefix={folder}/", f"{commit}:{prefix}{folder}", env=env)
    if not git.resolve(f"{commit}:{prefix}patches/series.toml"):
        raise UsageError(f"{revision} has no patches/series.toml", why=f"commit {commit[:10]} is not a kvtool project")
    there.run("checkout-index", "--all", env=env)
    return commit


# --- two states --------------------------------------------------------------------------------------------------

_SIGNS = {"same": "=", "changed": "!", "removed": "<", "added": ">"}
# git would compare three lines of context, and report a patch as changed if upstream changed a line near it
_RANGE_DIFF = ("-c", "diff.context=1", "range-diff", "--no-color")


@dataclass(frozen=True)
class Pair:
    """Hold a commit of one state and its counterpart in the other.

    id: the id of the patch; "" for the commit with the files of cpp/, and for a commit that is not a patch yet
    change: "same", "changed", "removed" or "added"
    before: the id of the first state's commit, "" for none
    after: the id of the second state's commit, "" for none
    diff: for a changed commit, git's diff of the two diffs; "" otherwise
    """

    id: str
    subject: str
    change: str
    before: str
    after: str
    diff: str = ""


def range_diff(git: Git, before: Snapshot, after: Snapshot) -> tuple[Pair, ...]:
    """Pair the commits of two states by patch id. Commits that are not a patch yet are paired by their subject."""
    old, new = _commits(git, before), _commits(git, after)
    names = (*(name for name in old if name not in new), *new)
    return tuple(_pair(git, old.get(name), new.get(name)) for name in names)


def _commits(git: Git, state: Snapshot) -> dict[str, tuple[str, str, str]]:
    """Return the commits of a state in order, as tuples of patch id, commit id and subject.

    The key of a commit is equal in both states if the commits belong to the same patch.
    """
    log = git.entries("log", "-z", "--reverse", "--topo-order", "--format=%H %s", f"{state.base}..{state.head}")
    told = [(state.ids.get(entry[:40], ""), entry[:40], entry[41:]) for entry in log]
    found: dict[str, tuple[str, str, str]] = {}
    for patch, commit, subject in told:
        number = sum(known[2] == subject and not known[0] for known in found.values())
        found[patch or (f"{subject} ({number + 1})" if number else subject)] = (patch, commit, subject)
    return found


def _pair(git: Git, old: tuple[str, str, str] | None, new: tuple[str, str, str] | None) -> Pair:
    (_, before, _), (_, after, _) = old or ("", "", ""), new or ("", "", "")
    patch, _, subject = new or old or ("", "", "")
    if not (before and after):
        return Pair(patch, subject, "added" if after else "removed", before, after)
    # with such a high creation factor, git pairs the two commits however different they are
    done = git.run(*_RANGE_DIFF, "--creation-factor=100000", f"{before}^..{before}", f"{after}^..{after}")
    diff = done.stdout.partition("\n")[2].rstrip("\n")
    return Pair(patch, subject, "changed" if diff else "same", before, after, diff)


def text(pairs: tuple[Pair, ...]) -> str:
    """Format the pairs as git range-diff does: one line for each pair, then the changes of its patch."""
    lines: list[str] = []
    for pair in pairs:
        before, after = (commit[:10] or "-" * 10 for commit in (pair.before, pair.after))
        lines.append(f"{before} {_SIGNS[pair.change]} {after} {pair.subject}")
        if pair.diff:
            lines.append(pair.diff)
    return "\n".join(lines)


def code_diff(git: Git, before: Snapshot, after: Snapshot) -> str:
    """Return the diff of the files that a patch of either state changes.

    Files that only upstream changed are left out.
    """
    paths = {path for side in (before, after) for path in git.changed(side.base, side.head)}
    if not paths:
        return ""
    spec = [f":(literal){path}" for path in sorted(paths)]
    done = git.run("diff", *PLAIN_FLAGS, "--diff-algorithm=myers", before.head, after.head, "--", *spec)
    return done.stdout.rstrip("\n")
