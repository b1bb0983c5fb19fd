"""Implement `kvtool export`: write the commits of the patched tree to patches/ and cpp/."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from kvtool.commands.apply import choose_groups
from kvtool.console import Console
from kvtool.errors import ConflictError, DriftError, KvtoolError, TreeError, UsageError, writing
from kvtool.gitcmd import Git, Scratch
from kvtool.locks import hold_tree
from kvtool.options import Context, Env, Groups, env_of, reject
from kvtool.process import quote
from kvtool.project import Project, read_text
from kvtool.replay.apply import Applied, Replayed, applied_of, commits_of, conflict_error, replay
from kvtool.replay.export import (
    ExportChoices,
    FoldedSeries,
    PatchChange,
    only_drops_patches,
    patch_changes,
    plan_export,
    squash_fixups,
)
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import FileChange, Result
from kvtool.series.changes import Change, preview_project
from kvtool.series.patchfile import DIFF_FLAGS, MAIL_FLAGS
from kvtool.series.series import Series
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Upstream
from kvtool.worktree.checkout import finish_interrupted, scratch_below
from kvtool.worktree.status import TreeState, apply_command, dirty_tree_error, tree_state, write_applied
from kvtool.worktree.transaction import Stage

_MAIL = re.compile(r"\d{4}-.*\.patch")  # names of files that git format-patch writes


@dataclass(frozen=True)
class ExportResult(Result, command="export"):
    """Report an export.

    head: the id of the tree's last commit, after the fixups were folded into their patches
    check: True if nothing was written because of --check
    files: the written files; with check, the files that an export would write
    mailbox: the paths of the written mails, in order
    patches: what the export did to each patch
    losses: notes about parts of the commits that a patch file cannot hold
    """

    tag: str
    tree: Path
    head: str
    check: bool
    files: tuple[FileChange, ...]
    mailbox: tuple[Path, ...]
    patches: tuple[PatchChange, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def failure(self) -> KvtoolError | None:
        if not self.check or not self.files:
            return None
        listed = ", ".join(f"{file.path} ({file.action})" for file in self.files)
        return DriftError(
            "the patched tree and the project differ",
            why=f"export would write {listed}",
            next_step="kvtool export, then commit the written files",
        )

    def render(self, console: Console) -> None:
        for loss in self.losses:
            console.line(f"  note: {loss}", "yellow")
        if self.mailbox:
            folder = quote([self.mailbox[0].parent])
            console.line(
                f"{len(self.mailbox)} mails in {folder}: git am --keep --keep-cr --no-scissors {folder}/*.patch"
            )
        elif not self.files:
            console.line(f"patches/ and cpp/ are equal to the tree ({console.upstream} {self.tag})")
        elif not self.check:
            self._render_changes(console)

    def _render_changes(self, console: Console) -> None:
        unchanged = [patch.id for patch in self.patches if patch.state == "unchanged"]
        for patch in self.patches:
            if patch.state != "unchanged" or patch.note:
                note = f": {patch.note}" if patch.note else ""
                console.line(f"  {patch.state:<9} patch {patch.id}{note}")
                for commit in patch.commits:
                    console.line(f"            from {commit}")
        if unchanged:
            listed = f": {', '.join(unchanged)}" if console.verbose else ""
            console.line(f"  unchanged {len(unchanged)} other patches{listed}")
        for file in self.files:
            if console.verbose or not file.path.startswith("patches/"):
                console.line(f"  {file.action:<9} {file.path}")
        console.line(f"{len(self.files)} files written; check them with git diff, then commit")


@dataclass(frozen=True)
class _Source:
    """Hold what an export reads: the tree, the series, and the change that is being written.

    was: the diff of each patch as kvtool applied it to the tree, by patch id; empty if the tree is on the lock's
        current tag. On another tag, the commit of a patch can have other lines than the patch file. So an export
        compares the commit with this diff, and not with the patch file, to find whether the user edited the patch.
    """

    state: TreeState
    applied: Applied
    context: SeriesContext
    series: Series
    stage: Stage
    was: Mapping[str, bytes]


def _open(project: Project, console: Console, scratch: Scratch) -> _Source:
    """Open the tree for an export.

    Raise an error if the tree has uncommitted changes or an unfinished operation, or if patches/ or cpp/ changed after
    the tree was made.
    """
    finish_interrupted(Git(project.tree))
    state = tree_state(project)
    applied = state.applied
    if state.interrupted == "rebase":
        raise dirty_tree_error(state)
    if applied is None or state.operation or state.dirty:
        # An unfinished export is not the reason for this error, because this run can finish that export. So report
        # only the other reasons.
        raise dirty_tree_error(replace(state, interrupted=""))
    stage, context = Stage(project, "export"), SeriesContext(project, console, groups=applied.groups)
    upstream = context.lock.upstream(applied.tag)
    context.known[upstream.tag] = applied.base
    series = context.series(upstream)
    stage.refuse_edited()
    explained = series.digest == applied.digest or stage.path.exists()
    moved = commits_of(scratch, applied.base, applied.head) if applied.tree != context.lock.upstream().tree else ()
    diffs = {commit.id: commit.diff for commit in moved}
    was = {report.id: diffs[report.commit] for report in applied.patches if report.commit in diffs}
    if not explained and not only_drops_patches(scratch, project, applied, state.head, series, was):
        replayed = context.build(scratch, upstream)
        if not replayed.complete or replayed.tree != scratch.resolve(f"{state.head}^{{tree}}"):
            raise _both_changed(state, applied)
    return _Source(state, applied, context, series, stage, was)


def _both_changed(state: TreeState, applied: Applied) -> TreeError:
    git, again = f"git -C {state.path}", apply_command(applied.groups)
    redo = (
        again
        if state.head == applied.head
        else f"{git} branch mine && {git} reset --hard {applied.head[:10]} && {again} && "
        f"{git} cherry-pick {applied.head[:10]}..mine, then kvtool export"
    )
    what = "patches/ or cpp/ changed since the tree was made"
    return TreeError(what, why="an export would undo that", next_step=redo)


def _write(project: Project, source: _Source, folded: FoldedSeries, todo: tuple[Change, ...], scratch: Scratch) -> str:
    """Write the export.

    Before anything is written, the new series is applied to check that it reproduces the tree. After the files are
    written, the branch of the tree moves to the new commits, and the recorded state is updated. The files of the tree
    stay as they are, because the new commits contain the same files.
    """
    context = source.context.with_project(preview_project(project, todo, scratch.place()))
    series, replayed = context.series(source.series.upstream), context.build(scratch, source.series.upstream)
    if not replayed.complete or replayed.tree != folded.tree:
        raise KvtoolError("the exported series does not reproduce the tree", why="this is a bug; nothing was written")
    if context.groups:
        _require_whole(context.with_groups(()), source.series.upstream, scratch)
    git = Git(project.tree)
    git.fetch(scratch.repo, replayed.head)
    source.stage.save(todo)
    try:
        source.stage.restore("new")
    except BaseException:
        source.stage.restore("old")
        source.stage.clear()
        raise
    if replayed.head != source.state.head:
        git.run("update-ref", "-m", "kvtool export", "HEAD", replayed.head, source.state.head)
    write_applied(project.tree, applied_of(series, replayed, pinned=source.applied.pinned))
    source.stage.clear()
    return replayed.head


def _require_whole(context: SeriesContext, upstream: Upstream, scratch: Scratch) -> None:
    """Check that the whole series still applies, if the tree contains only some groups of the series.

    A change in such a tree can conflict with a patch of a group that is not in the tree. Raise ConflictError for such a
    conflict.
    """
    if error := conflict_error(context.build(scratch, upstream).reports, upstream.tag):
        raise ConflictError(
            f"after this change, {error.what}",
            why=f"the patch is of a group that the tree does not have; {error.why}",
            next_step="make the change in a tree with the whole series: kvtool apply --tree DIR",
        )


def _group_commits(source: _Source, todo: tuple[Change, ...], groups: tuple[str, ...], scratch: Scratch) -> Replayed:
    """Build the commits of some groups without the rest of the series, for a reviewer who reads only these groups.

    The first commit adds the files of cpp/. Its message is the first section of the page patches/GROUP.md, where GROUP
    is the last of the groups.
    """
    project, applied = source.context.project, source.applied
    if missing := [group for group in groups if applied.groups and group not in applied.groups]:
        raise UsageError(
            f"{project.tree} does not have the group {missing[0]!r}",
            next_step=apply_command((*applied.groups, *missing)),
        )
    if applied.tree != source.context.lock.upstream().tree:
        raise UsageError(f"--group needs a tree on llama.cpp {source.context.lock.current}", next_step="kvtool apply")
    context = source.context.with_project(preview_project(project, todo, scratch.place())).with_groups(groups)
    series = context.series(source.series.upstream)
    done = replay(scratch, applied.base, series, _message_of(project, groups))
    if error := conflict_error(done.reports, applied.tag):
        raise error
    return done


def _message_of(project: Project, groups: tuple[str, ...]) -> str:
    """Return the message of the commit that adds the files of cpp/ of some groups."""
    page = project.patches / f"{groups[-1]}.md"
    text = read_text(page) if page.is_file() else ""
    section = re.search(r"\A#[^\n]*\n+(.*?)(?=^#|^\||\Z)", text, re.DOTALL | re.MULTILINE)
    return f"{', '.join(groups)}: add the new files\n\n{section[1].strip() if section else ''}".rstrip() + "\n"


def _write_mailbox(git: Git, base: str, head: str, folder: Path) -> tuple[Path, ...]:
    """Write the commits base..head as numbered mails for `git am`.

    Replaces an earlier mailbox in the folder. Raise UsageError if the folder holds anything else.
    """

    def is_ours(mail: Path) -> bool:  # --zero-commit writes this id, which no commit has
        named = _MAIL.fullmatch(mail.name) and mail.is_file()
        return bool(named) and mail.read_bytes().startswith(b"From " + b"0" * 40)

    if folder.exists() and (not folder.is_dir() or not all(map(is_ours, folder.iterdir()))):
        raise UsageError(
            f"{folder} contains other files than the mails of a mailbox",
            next_step="name a directory that is empty or not there yet",
        )
    with writing(str(folder), "name another place"):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            left.unlink()
    git.run("format-patch", "--quiet", "-o", folder.absolute(), *MAIL_FLAGS, *DIFF_FLAGS, f"{base}..{head}")
    return tuple(sorted(folder.iterdir()))


def export_series(
    env: Env,
    *,
    check: bool = False,
    mailbox: Path | None = None,
    groups: tuple[str, ...] = (),
    choices: ExportChoices | None = None,
) -> ExportResult:
    """Write the commits of the tree to patches/ and cpp/ or, if `mailbox` is a folder, as mails into that folder."""
    project, console = env.project, env.console
    reject(
        "export",
        (check and mailbox, "--check and --mailbox exclude each other"),
        (groups and not mailbox, "--group needs --mailbox: export without --mailbox writes all groups of the tree"),
    )
    if not (check or mailbox):
        project.refuse_packaged()
    if not (project.tree / ".git").is_dir():
        raise dirty_tree_error(tree_state(project))
    cache = Cache(project.cache)
    with (
        hold_tree(project, console),
        # a repository of its own, so that .git/config and .git/info/attributes of the tree do not change the patches
        scratch_below(project.tree, project.tree, cache.repo) as scratch,
    ):
        source = _open(project, console, scratch)
        applied, head = source.applied, source.state.head
        folded = squash_fixups(scratch, project.tree, applied, head, source.series, choices)
        chosen = choose_groups(project, console, groups)
        todo = () if mailbox and not chosen else plan_export(project, scratch, folded, source.series, source.was)
        if mailbox:
            last = _group_commits(source, todo, chosen, scratch).head if chosen else folded.head
            mails = _write_mailbox(scratch, applied.base, last, mailbox)
            return ExportResult(applied.tag, project.tree, last, False, (), mails, losses=folded.losses)
        files = tuple(FileChange(change.path, change.action) for change in todo)
        head = head if check else _write(project, source, folded, todo, scratch)
        patches = patch_changes(folded, source.series, todo)
        return ExportResult(applied.tag, project.tree, head, check, files, (), patches, folded.losses)


def command(
    ctx: Context,
    check: Annotated[
        bool, Option("--check", help="Write nothing. Exit with 6 if an export would write something.")
    ] = False,
    mailbox: Annotated[
        Path | None,
        Option("--mailbox", metavar="DIR", help="Write mails for git am instead, for people who do not use kvtool."),
    ] = None,
    groups: Groups = None,
    assign: Annotated[
        list[str] | None,
        Option("--assign", metavar="COMMIT=ID", help="Assign a commit of the tree to this patch of the series."),
    ] = None,
    drop: Annotated[
        list[str] | None, Option("--drop", metavar="ID", help="Remove a patch whose commit is no longer in the tree.")
    ] = None,
) -> ExportResult:
    """Write the commits of the patched tree to patches/ and cpp/.

    A change of a file of upstream is put into a patch. Any other file is put into cpp/. To change a patch, commit in
    the tree with `git commit --fixup=<commit of the patch>`. kvtool finds the patch of an amended, reworded, moved or
    squashed commit by its subject or by its changed lines. Every other commit becomes a new patch.

    After the export, kvtool folds the fixups into the commits of their patches in the tree. The files of the tree stay
    unchanged. A patch file changes only if the patch does. Its bytes do not depend on your git configuration.

        kvtool export
        kvtool export --check
        kvtool export --mailbox ~/series
        kvtool export --mailbox ~/core --group core    # for a review by upstream
        kvtool export --assign 1a2b3c4d=my-patch

    Exit codes: 3 a fixup does not apply to its patch, 4 the tree has uncommitted changes or does not match patches/
    and cpp/, 6 the tree and the files differ (with --check).
    """
    choices = ExportChoices(tuple(assign or ()), tuple(drop or ()))
    return export_series(env_of(ctx), check=check, mailbox=mailbox, groups=tuple(groups or ()), choices=choices)
