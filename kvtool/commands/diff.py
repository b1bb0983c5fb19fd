"""`kvtool diff`: what became of the series between two states of it."""

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
    """same: nothing changed; patches: each commit and its counterpart; diff: git's text, a diff of diffs or of code."""

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
    """Build the state that the user named. TreeError for `tree` if nothing is applied there."""
    if name != compare.TREE:
        return compare.snapshot(context, name, scratch)
    state = tree_state(context.project)
    if state.applied is None:
        raise dirty_tree_error(state)
    return compare.tree_snapshot(state.applied, state.head)


def command(
    ctx: Context,
    before: Annotated[str, Argument(metavar="A", help="State, as above.")] = "HEAD",
    after: Annotated[str, Argument(metavar="B", help="Another state.")] = compare.WORKING,
    code: Annotated[bool, Option("--code", help="The patched files themselves, instead of the patches.")] = False,
    mirror: Mirror = None,
) -> DiffResult:
    """Compare two states of the series, patch by patch (git range-diff).

    A state is a TAG of the lock (the current patches/ and cpp/, on that upstream), a revision REV of this repository
    (on the current upstream of that revision), REV:TAG, `.` (the current files, on the current upstream) or `tree`
    (the commits of the patched tree). Without arguments, shows the changes since the last commit.

        kvtool diff HEAD~1 HEAD           # the series before and after a rebase that was committed
        kvtool diff v0.4.0 v0.5.0         # the same patches on two upstreams: where do they differ?
        kvtool diff . tree                # what export would write
        kvtool diff HEAD~1 HEAD --code    # the code of the files that the series touches

    Exit code 0 also if they differ; scripts read `same` and `patches` in --json.
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
