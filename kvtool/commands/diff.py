"""Implement `kvtool diff`: compare two states of the series."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from kvtool.console import Console
from kvtool.gitcmd import Scratch, scratch_repository
from kvtool.options import Context, Mirror, env_of
from kvtool.replay import compare
from kvtool.replay.compare import Pair, Snapshot
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import Result
from kvtool.worktree.status import dirty_tree_error, tree_state


@dataclass(frozen=True)
class DiffResult(Result, command="diff"):
    """Report the difference between two states of the series.

    same: True if every patch is equal in both states
    patches: pairs of a commit of the first state and the commit of the same patch in the second state
    diff: the text of git range-diff; with --code, a diff of the patched files
    """

    before: Snapshot
    after: Snapshot
    same: bool
    patches: tuple[Pair, ...]
    diff: str

    def render(self, console: Console) -> None:
        for side in (self.before, self.after):
            for missing in side.missing:
                console.line(f"{side.name}: {missing}")
        if self.diff:
            console.line(self.diff)
        else:
            console.line(f"{_title(self.before)} and {_title(self.after)}: no difference")


def _title(state: Snapshot) -> str:
    at = f"{state.revision[:10]} on " if state.revision else ""
    return f"{state.name} ({at}{state.tag})"


def _snapshot(context: SeriesContext, name: str, scratch: Scratch) -> Snapshot:
    """Return the state that the user named: TAG, REV, REV:TAG, "." or "tree" (the help text explains these names).

    Raise TreeError for "tree" if no series is applied to the patched tree.
    """
    if name != compare.TREE:
        return compare.snapshot(context, name, scratch)
    state = tree_state(context.project)
    if state.applied is None:
        raise dirty_tree_error(state)
    return compare.tree_snapshot(state.applied, state.head)


def command(
    ctx: Context,
    before: Annotated[str, Argument(metavar="A", help="First state; the text above lists the forms.")] = "HEAD",
    after: Annotated[str, Argument(metavar="B", help="Second state.")] = compare.WORKING,
    code: Annotated[bool, Option("--code", help="Compare the patched files instead of the patches.")] = False,
    mirror: Mirror = None,
) -> DiffResult:
    """Compare two states of the series, patch by patch (git range-diff).

    A state is one of these:

        TAG       the files of patches/ and cpp/ as they are now, on this tag of upstream.lock
        REV       patches/ and cpp/ of this git revision of the project, on the tag that was current in that revision
        REV:TAG   patches/ and cpp/ of this git revision, on another tag
        .         the files of patches/ and cpp/ as they are now, on the current tag
        tree      the commits of the patched tree

    Without arguments, shows the changes since the last commit.

        kvtool diff HEAD~1 HEAD           # before and after the last commit, for example a rebase
        kvtool diff v0.4.0 v0.5.0         # the differences of the same patches on two upstreams
        kvtool diff . tree                # what export would write
        kvtool diff HEAD~1 HEAD --code    # the files that the series changes

    The exit code is 0 even if the states differ. A script can read `same` and `patches` in the output of --json.
    """
    env = env_of(ctx)
    project, console = env.project, env.console
    context, names = SeriesContext(project, console, mirror), (before, after)
    repositories = [context.cache.repo]
    if compare.TREE in names and (project.tree / ".git").exists():
        repositories.append(project.tree)
    with scratch_repository(*repositories) as scratch:
        old, new = (_snapshot(context, name, scratch) for name in names)
        pairs = compare.range_diff(scratch, old, new)
        same = all(pair.change == "same" for pair in pairs)
        text = compare.code_diff(scratch, old, new) if code else "" if same else compare.text(pairs)
    return DiffResult(old, new, same, pairs, text)
