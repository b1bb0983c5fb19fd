"""Turn the commits of a patched tree into patches/ and cpp/.

The functions here find the patch of each commit, and plan which files change. The path of a changed file decides where
its change goes. If upstream has the path, the change is put into a patch. If upstream does not have the path, the new
file is put into cpp/. A new file that cpp/ cannot hold is put into a patch (see paths.py).

identity.py finds the patch of each commit that is not a fixup. A fixup has a subject such as `fixup! <subject, id or
commit>` (also squash! and amend!). A fixup is folded into the patch that its subject names. If another commit changes
files of upstream and has no patch, the commit becomes a new patch. The new patch is put at the commit's place in the
order of the commits.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path

from kvtool.errors import ConflictError, KvtoolError, TreeError, UsageError
from kvtool.gitcmd import IDENTITY, Git, Scratch
from kvtool.project import Project, read_text
from kvtool.replay.apply import (
    Applied,
    Blob,
    Builder,
    Commit,
    applied_of,
    blobs_of,
    commits_of,
    conflict_error,
    replay,
)
from kvtool.replay.identity import Candidate, contains_patch, match_patches, parse_assignments
from kvtool.replay.paths import patch_paths, read_tree
from kvtool.replay.rebase_plan import Rehearsal, SeriesContext
from kvtool.result import PatchOutcome
from kvtool.series.changes import Change, preview_project
from kvtool.series.groups import Group, last_of, owners_of
from kvtool.series.patchfile import (
    DIFF_FLAGS,
    MAIL_FLAGS,
    Mail,
    changed_rows,
    clean_message,
    hunk_headings,
    mail_extras,
    mail_message,
    parse_diff,
    parse_mail,
    with_extras,
)
from kvtool.series.series import LoadedPatch, Series, files_of_groups, load_groups, new_id
from kvtool.series.series_toml import edit_series, set_limits
from kvtool.upstream.lock import Upstream, pin

_FIXUP = re.compile(r"^(fixup|squash|amend)! ")


@dataclass
class PatchCommits:
    """Hold a patch and the commits that it is made of."""

    id: str  # "" for a new patch
    # the commits with their diffs; the first one is the patch, the others are fixups
    commits: list[tuple[Commit, bytes]]
    message: str
    made: str = ""  # id of the squashed commit, "" if the fixups removed every change
    absorbed: list[str] = field(default_factory=list)  # ids of other patches whose changes these commits contain
    name: str = ""  # id of a new patch; plan_export() sets it

    @property
    def first(self) -> Commit:
        """Return the first commit of the patch. The exported patch has the author and the message of this commit."""
        return self.commits[0][0]


@dataclass(frozen=True)
class FoldedSeries:
    """Hold the commits of a tree as a series.

    files: the files of cpp/
    patches: the patches in order
    head: the id of the last commit
    tree: the id of the last commit's tree
    """

    files: tuple[Blob, ...]
    patches: tuple[PatchCommits, ...]
    head: str
    tree: str
    # ids of patches that have no commit: they were squashed into others, or the user dropped them
    dropped: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()  # one sentence for each author, message, header or note that is changed or dropped


@dataclass(frozen=True)
class ExportChoices:
    """Hold the user's decisions.

    assign: texts COMMIT=ID, which say that this commit is that patch
    drop: ids of patches to remove from the series
    """

    assign: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


def squash_fixups(
    scratch: Scratch,
    tree: Path,
    applied: Applied,
    head: str,
    series: Series,
    choices: ExportChoices | None = None,
) -> FoldedSeries:
    """Fold the fixups among the commits from `applied.base` to `head` into their patches.

    The series produces the same git tree as the commit `head`. Raises TreeError if a commit is a merge, if a patch has
    no commit any more, or if a fixup names no patch. Raises ConflictError if a fixup does not apply to its patch
    because the fixup changes lines of a later patch.
    """
    choices = choices or ExportChoices()
    if not scratch.ok("merge-base", "--is-ancestor", applied.base, head):
        raise TreeError(f"{tree}: HEAD is not based on {series.upstream.label}", next_step="kvtool status")
    of_patches = patch_paths(scratch.paths(applied.base), read_tree(scratch, head))
    blobs = _new_blobs(scratch, applied.base, head)
    commits = commits_of(scratch, applied.base, head)
    groups, losses = _group_commits(scratch, tree, commits, applied, series, of_patches, choices)
    before = commits_of(scratch, applied.base, applied.head) if scratch.resolve(f"{applied.head}^{{commit}}") else ()
    dropped = _find_missing(groups, applied, series, before, choices)
    losses += [
        f"{group.first.id[:10]} ({group.first.subject}): a blank is put in front of some lines of its message, because "
        "git "
        "am would take them for the beginning of a diff"
        for group in groups
        if mail_message(group.message) != group.message
    ]
    builder = Builder(scratch, applied.base)
    builder.commit_blobs(blobs)
    for group in groups:
        group.made = _commit_patch(builder, tree, group)
    wanted = scratch.line("rev-parse", f"{head}^{{tree}}")
    if builder.tree != wanted:
        raise ConflictError(
            "the commits cannot be folded into a series with the same result",
            why=f"these files would differ: {', '.join(scratch.changed(builder.tree, wanted))}",
            next_step=f"fold them by hand: git -C {tree} rebase -i --autosquash {applied.base[:10]}",
        )
    losses += _lost_extras(series, {*dropped, *(group.id for group in groups if group.id and not group.made)})
    return FoldedSeries(
        blobs, tuple(groups), builder.commit, builder.tree, tuple(dropped), tuple(map(_printable, losses))
    )


def only_drops_patches(
    scratch: Scratch, project: Project, applied: Applied, head: str, series: Series, was: Mapping[str, bytes]
) -> bool:
    """Return True if the only change of the project since the last apply is the removal of patches.

    Returns False if the patched tree still contains a commit of a removed patch, because an export would make a patch
    of that commit again.
    """
    wanted = {loaded.patch.id: loaded for loaded in series.patches if loaded.wanted}
    tried = (report for report in applied.patches if report.outcome is not PatchOutcome.SKIPPED)
    made = {report.id: report.commit for report in tried if report.id in wanted}
    gone = {report.commit for report in applied.patches if report.id not in wanted}
    before = [commit for commit in commits_of(scratch, applied.base, applied.head) if commit.id in gone]
    subjects, rows = {commit.subject for commit in before}, [changed_rows(commit.diff) for commit in before]
    return (
        list(made) == list(wanted)
        and not any(
            commit.subject in subjects or changed_rows(commit.diff) in rows
            for commit in commits_of(scratch, applied.base, head)
        )
        and not _cpp_changes(project, scratch, _new_blobs(scratch, applied.base, applied.head), series.groups)
        and not _mail_changes(scratch, wanted, {name: commit for name, commit in made.items() if commit}, (), was)
    )


def _new_blobs(git: Git, base: str, head: str) -> tuple[Blob, ...]:
    """Return the files of the commit `head` that an export stores in cpp/."""
    final = read_tree(git, head)
    of_patches = patch_paths(git.paths(base), final)
    return tuple(Blob(entry.mode, entry.id, path) for path, entry in final.items() if path not in of_patches)


def _patch_diff(git: Git, commit: Commit, of_patches: frozenset[str]) -> bytes:
    """Return the changes of a commit that an export stores in a patch, as a diff with three lines of context."""
    files = parse_diff(git.raw("diff-tree", "-p", "--no-commit-id", *DIFF_FLAGS, "-U3", commit.parent, commit.id))
    return b"".join(file.head + b"".join(h.text for h in file.hunks) for file in files if file.path in of_patches)


def _group_commits(
    git: Git,
    tree: Path,
    commits: tuple[Commit, ...],
    applied: Applied,
    series: Series,
    of_patches: frozenset[str],
    choices: ExportChoices,
) -> tuple[list[PatchCommits], list[str]]:
    """Return the patches with their commits, and a sentence for each author or message that is not kept."""
    if merge := next((commit for commit in commits if len(commit.parents) > 1), None):
        raise TreeError(
            f"commit {merge.id[:10]} ({merge.subject}) is a merge",
            why="a series is a line of commits",
            next_step=f"git -C {tree} rebase {applied.base[:10]}",
        )
    ids = [loaded.patch.id for loaded in series.patches if loaded.wanted]
    assigned = parse_assignments(choices.assign, commits, ids)
    diffs = {commit.id: _patch_diff(git, commit, of_patches) for commit in commits}
    own = [commit for commit in commits if not _FIXUP.match(commit.subject) or commit.id in assigned]
    known = match_patches([Candidate(commit, diffs[commit.id]) for commit in own], series.patches, applied, assigned)
    groups: list[PatchCommits] = []
    others: list[Commit] = []
    losses: list[str] = []
    for commit in commits:
        diff, patch = diffs[commit.id], known.get(commit.id, "")
        if commit in own:
            if patch or diff:
                groups.append(PatchCommits(patch, [(commit, diff)], _message_of(commit, applied)))
            else:
                others.append(commit)
                losses += _loss_of_new_files(commit)
            continue
        target, kind = commit.subject, ""
        while found := _FIXUP.match(target):
            target, kind = target[found.end() :], kind or found[1]
        losses += _add_fixup(_fixup_target(groups, target, tree), others, commit, diff, kind, target)
    return groups, losses


def _message_of(commit: Commit, applied: Applied) -> str:
    """Return the message of a patch. A message that kvtool did not write is cleaned up as git commit does it."""
    if commit.id in {report.commit for report in applied.patches}:
        return commit.message
    return clean_message(commit.message)


def _loss_of_new_files(commit: Commit) -> list[str]:
    """Return the sentence that reports that the author and the message of a commit are lost.

    The caller passes a commit that changes only files of cpp/, and cpp/ stores no author and no message. Returns an
    empty list for a commit that kvtool itself made, because such a commit has no message of a user.
    """
    if not commit.diff or commit.email == IDENTITY["EMAIL"]:
        return []
    who = f"{commit.id[:10]} {commit.subject!r} by {commit.name} <{commit.email}>"
    return [f"{who}: it changes only files of cpp/, and cpp/ stores no author and no message"]


def _fixup_target(groups: Sequence[PatchCommits], target: str, tree: Path) -> PatchCommits | None:
    """Return the patch that a fixup names by id, subject or commit. Raise TreeError if several have that subject."""
    named = [group for group in groups if target in (group.id, group.first.subject)]
    is_commit = re.fullmatch(r"[0-9a-f]{7,40}", target)
    named = named or [group for group in groups if is_commit and group.first.id.startswith(target)]
    if len(named) > 1:
        commits = ", ".join(f"{group.first.id[:10]} {group.id}".strip() for group in named)
        raise TreeError(
            f"several patches have the subject {target!r}",
            why=f"the fixup may belong to any of these commits: {commits}",
            next_step=f"name the commit: git -C {tree} commit --amend -m 'fixup! {named[0].first.id[:10]}'",
        )
    return named[0] if named else None


def _add_fixup(
    group: PatchCommits | None, others: Sequence[Commit], commit: Commit, diff: bytes, kind: str, target: str
) -> list[str]:
    """Add a fixup to its patch. Return a sentence for its message and for its author if the patch does not keep them.

    group: the patch that the fixup names; None if there is no such patch
    others: the earlier commits that became no patch
    target: the subject, id or commit that the fixup names
    """
    rest = commit.message.partition("\n")[2].strip()
    if group:
        group.commits.append((commit, diff))
        if kind == "amend" and rest:
            group.message = clean_message(rest)
        losses = [f"the message of {commit.id[:10]} ({commit.subject})"] if kind == "squash" and rest else []
        first = group.first
        if (commit.name, commit.email) != (first.name, first.email):
            losses.append(f"the author of {commit.id[:10]} ({commit.subject}): {commit.name} <{commit.email}>")
        return [f"{loss} is not kept: the patch has only those of {first.id[:10]}" for loss in losses]
    if any(other.subject == target for other in others) and not diff:
        return []  # the commit that the fixup names has only new files, which are put into cpp/ anyway
    if diff or not commit.diff or kind == "amend":
        raise TreeError(
            f"commit {commit.id[:10]} ({commit.subject}) is a fixup, but its patch was not found",
            why=f"no patch before it has the subject or id {target!r}",
            next_step="give it the subject of a patch (kvtool status lists them), or a new subject",
        )
    return []  # the fixup changes only new files, and their paths decide where they are put


def _find_missing(
    groups: Sequence[PatchCommits],
    applied: Applied,
    series: Series,
    before: Sequence[Commit],
    choices: ExportChoices,
) -> list[str]:
    """Return the patches whose commits the user removed on purpose.

    The user named such a patch with --drop, or squashed it into another patch. Raise TreeError for any other patch
    without a commit, so that no patch is dropped by accident.
    """
    there = {group.id for group in groups}
    was = {report.id: report.commit for report in applied.patches if report.commit}
    diffs = {commit.id: commit.diff for commit in before}
    changed = [group for group in groups if group.first.id not in was.values()]
    dropped: list[str] = []
    missing: list[LoadedPatch] = []
    for loaded in series.patches:
        name = loaded.patch.id
        if name not in was or name in there or not loaded.wanted:
            continue
        old = diffs.get(was[name]) or loaded.mail.diff
        into = [group for group in changed if contains_patch([diff for _, diff in group.commits], old)]
        if name in choices.drop or len(into) == 1:
            dropped.append(name)
            if name not in choices.drop:
                into[0].absorbed.append(name)
        else:
            missing.append(loaded)
    if missing:
        raise _missing_error(missing, [group for group in changed if not group.id])
    if unknown := [name for name in choices.drop if name not in dropped]:
        raise UsageError(
            f"--drop {unknown[0]}: the patch is not in the series, or the tree has a commit of it",
            next_step="remove its commit first: git rebase -i",
        )
    return dropped


def _missing_error(missing: Sequence[LoadedPatch], fresh: Sequence[PatchCommits]) -> TreeError:
    """Return an error about patches without a commit. For each patch, it names the command that solves the problem."""
    said: list[str] = []
    for loaded in missing:
        paths = {file.path for file in parse_diff(loaded.mail.diff)}
        near = (g.first for g in fresh if paths & {f.path for _, diff in g.commits for f in parse_diff(diff)})
        said += [
            f"if commit {commit.id[:10]} ({commit.subject}) is {loaded.patch.id!r}: "
            f"kvtool export --assign {commit.id[:10]}={loaded.patch.id}"
            for commit in itertools.islice(near, 3)
        ]
    names = [loaded.patch.id for loaded in missing]
    drop = " ".join(f"--drop {name}" for name in names)
    return TreeError(
        f"the tree has no commit any more of {', '.join(map(repr, names))}",
        why="no commit changes the same lines as the patch, and no commit has its subject",
        next_step="\n".join((*said, f"to drop {'it' if len(names) == 1 else 'them'}: kvtool export {drop}")),
    )


def _lost_extras(series: Series, gone: Collection[str]) -> list[str]:
    return [
        f"patches/{loaded.patch.file}: its headers and notes are removed with the patch"
        for loaded in series.patches
        if loaded.patch.id in gone and any(mail_extras(loaded.mail.raw))
    ]


def _commit_patch(builder: Builder, tree: Path, group: PatchCommits) -> str:
    """Commit a patch with its fixups squashed. Return the id of the commit, "" if the patch changes nothing."""
    first = group.first
    if not group.message.strip():
        raise TreeError(
            f"the message of commit {first.id[:10]} is empty",
            why="a patch file needs a subject",
            next_step=f"reword it: git -C {tree} rebase -i {first.parent[:10]}",
        )
    group.message = mail_message(group.message)
    for commit, diff in group.commits:
        if diff and not builder.apply(diff) and not builder.apply(diff, "--3way"):
            builder.reset()
            raise ConflictError(
                f"commit {commit.id[:10]} ({commit.subject}) does not apply to its patch {first.subject!r}",
                why="it changes lines that a later patch adds",
                next_step=f"make it a fixup of that patch, or fold it by hand: git -C {tree} rebase -i",
            )
    return builder.commit_index(group.message, author=first) or ""


# --- the files that change ---------------------------------------------------------------------------------------


def plan_export(
    project: Project, scratch: Scratch, folded: FoldedSeries, series: Series, was: Mapping[str, bytes]
) -> tuple[Change, ...]:
    """Return all changes of files that make the project equal to the tree.

    was: the diff of each patch as kvtool applied it to the tree, by patch id; empty if the tree is on the lock's
        current tag
    """
    by_id = {loaded.patch.id: loaded for loaded in series.patches}
    added: dict[str, str] = {}  # new id -> subject
    made: dict[str, str] = {}
    for patch in (patch for patch in folded.patches if patch.made):
        name = patch.id
        if not name:
            mail = _as_mail(scratch, patch.made)
            subject = parse_mail(mail, patch.made).subject
            # patch files of other patches; a file that a killed export wrote for this commit does not count
            files = {file.stem.lower() for file in project.patches.glob("*.patch") if file.read_bytes() != mail}
            name = new_id(subject, {*by_id, *added, *files})
            added[name] = subject
        patch.name = name
        made[name] = patch.made
    gone = [patch.id for patch in folded.patches if patch.id and not patch.made] + [*folded.dropped]
    group = last_of(series.known_groups, series.groups)
    found = [
        *_cpp_changes(project, scratch, folded.files, series.groups),
        *_mail_changes(scratch, by_id, made, gone, was),
    ]
    found += _text_change(project.series, edit_series(read_text(project.series), list(made), added, set(gone), group))
    return _in_write_order(found)


def plan_rebase(
    context: SeriesContext, scratch: Scratch, upstream: Upstream, done: Rehearsal, groups: Sequence[str] = ()
) -> tuple[tuple[Change, ...], Applied]:
    """Return the changes that move the project to the new upstream, and the record of the tree after these changes.

    The function first tries the changes in the temporary repository. A rebase always moves the whole series, even if
    the tree has only some groups.

    If a patch file produces the same commit on the new upstream, the file stays as it is.

    A patch is left out on the new upstream if upstream has it, if it changes nothing, or if the user skips it. Then
    series.toml gets a limit for the patch:

    - If the new upstream is newer than the current tag of the lock: `until` with the new tag.
    - If the new upstream is older: `from` with the tag that follows the new tag in the lock. But if that following tag
      is the patch's `until` already, the patch gets `until` with the new tag.

    A patch can also apply on the new upstream although its `from` and `until` leave it out there. Then the patch gets
    `from` with the new tag.

    groups: the groups of the series in the tree; empty for the whole series
    """
    project, lock = context.project, context.lock
    by_id = {loaded.patch.id: loaded for loaded in context.series(upstream).patches}
    made = {report.id: report.commit for report in done.reports if report.commit}
    dropped = [report.id for report in done.reports if report.outcome == PatchOutcome.DROPPED]
    out = [name for name, loaded in by_id.items() if loaded.wanted and name not in (*made, *dropped)]
    limits = dict.fromkeys(out, ("until", done.tag))
    if upstream.order < lock.upstream().order:
        after = next(u.tag for u in lock.upstreams.values() if u.order == upstream.order + 1)
        limits |= {name: ("from", after) for name in out if by_id[name].patch.until != after}
    limits |= {name: ("from", done.tag) for name in made if not by_id[name].wanted}
    found = _mail_changes(scratch, by_id, made, dropped, {})
    found += _text_change(project.series, set_limits(read_text(project.series), dropped, limits))
    found += _text_change(project.lock, pin(read_text(project.lock), lock, done.tag))
    todo = _in_write_order(found)
    preview, applied = prove_changes(context, scratch, upstream, done.base, done.tree, todo)
    if groups:
        series = context.with_groups(groups).with_project(preview).series(upstream)
        replayed = replay(scratch, done.base, series)
        if error := conflict_error(replayed.reports, done.tag):
            error.next_step = "make a tree with the whole series, and rebase there: kvtool apply"
            raise error
        applied = applied_of(series, replayed, pinned=False)
    return todo, applied


def prove_changes(
    context: SeriesContext, scratch: Scratch, upstream: Upstream, base: str, tree: str, todo: Sequence[Change]
) -> tuple[Project, Applied]:
    """Apply the series after some changes. Return the changed project and the record of its tree.

    Raises KvtoolError unless the series produces exactly `tree`, and unless an export would change nothing.

    base: the id of the commit of unpatched upstream
    tree: the id of the git tree that must result
    """
    preview = preview_project(context.project, todo, scratch.place())
    series = context.with_project(preview).series(upstream)
    replayed = replay(scratch, base, series)
    if not replayed.complete or replayed.tree != tree:
        bad = next((report.id for report in replayed.reports if report.outcome is PatchOutcome.CONFLICT), "")
        raise _bug("the new series does not reproduce the tree", f"patch {bad!r} was not applied" if bad else "")
    applied = applied_of(series, replayed, pinned=False)
    folded = squash_fixups(scratch, context.project.tree, applied, replayed.head, series)
    if drift := plan_export(preview, scratch, folded, series, {}):
        named = ", ".join(change.path for change in drift[:5])
        raise _bug("the series to be written does not export unchanged", f"export would change {named}")
    return preview, applied


def _bug(what: str, why: str) -> KvtoolError:
    return KvtoolError(what, why=why, next_step="please report this; nothing was written")


_LATE = {"patches/series.toml": 1, "patches/upstream.lock": 2}


def _in_write_order(found: list[Change]) -> tuple[Change, ...]:
    """Order the changes so that kvtool can read the project at every moment, in case it is killed.

    New files are written first, then series.toml, which names them, and then the lock. Old files are removed last.
    """
    turn = {change.path: 3 if change.content is None else _LATE.get(change.path, 0) for change in found}
    return tuple(sorted(found, key=lambda change: (turn[change.path], change.path)))


def _text_change(file: Path, text: str) -> list[Change]:
    """Return the change of a file of patches/; nothing if the text is equal."""
    return [Change(f"patches/{file.name}", "change", text.encode())] if text != read_text(file) else []


def _cpp_changes(project: Project, git: Git, blobs: Sequence[Blob], groups: Sequence[str]) -> list[Change]:
    """Return the changes that make cpp/ equal to the given files.

    groups: the groups of the series in the tree; files of other groups are not touched
    """
    ours = {blob.path: blob for blob in blobs_of(git, files_of_groups(project, groups))}
    _refuse_foreign(load_groups(project), groups, blobs)
    found: list[Change] = []
    for blob in blobs:
        known = ours.pop(blob.path, None)
        if known is None or known.id != blob.id or (known.mode != blob.mode and os.name != "nt"):
            content = git.raw("cat-file", "blob", blob.id)
            found.append(Change(f"cpp/{blob.path}", "change" if known else "add", content, blob.mode == "100755"))
    return found + [Change(f"cpp/{path}", "remove", None) for path in ours]


def _refuse_foreign(known: Sequence[Group], groups: Sequence[str], blobs: Sequence[Blob]) -> None:
    """Raise TreeError if a tree with some groups has a file that belongs to none of them.

    Otherwise the file would be missing from the next tree with the same groups.
    """
    mine = [group for group in known if group.id in groups]
    for blob in blobs if groups else ():
        if not any(group.has_file(blob.path) for group in mine):
            owners = owners_of(known, blob.path)
            raise TreeError(
                f"cpp/{blob.path} does not belong to this tree",
                why=f"it is a file of {', '.join(owners) or 'no group'}, and the tree has {', '.join(groups)} only",
                next_step=f"add a pattern for it to `files` of {groups[-1]} in patches/series.toml, or rename the file",
            )


def _mail_changes(
    scratch: Scratch,
    by_id: Mapping[str, LoadedPatch],
    made: Mapping[str, str],
    gone: Sequence[str],
    was: Mapping[str, bytes],
) -> list[Change]:
    """Return the changes of patch files: files to add, to change and to remove.

    made: the commit of each patch by patch id, including new patches
    gone: the ids of patches that have no commit any more
    was: as in plan_export()
    """
    found: list[Change] = []
    for name, commit in made.items():
        loaded = by_id.get(name)
        if loaded is None:
            found.append(Change(f"patches/{name}.patch", "add", _as_mail(scratch, commit)))
        elif not _gives_commit(scratch, loaded, commit, was.get(name, b"")):
            fresh = with_extras(_as_mail(scratch, commit), mail_extras(loaded.mail.raw))
            found.append(Change(f"patches/{loaded.patch.file}", "change", fresh))
    return found + [Change(f"patches/{by_id[name].patch.file}", "remove", None) for name in gone]


def _as_mail(git: Git, commit: str) -> bytes:
    """Return a commit as the bytes of a patch file. Every machine produces the same bytes."""
    return git.raw("format-patch", "--stdout", "-1", *MAIL_FLAGS, *DIFF_FLAGS, commit)


def _gives_commit(scratch: Scratch, loaded: LoadedPatch, commit: str, was: bytes) -> bool:
    """Return True if a patch file produces this commit, so that the file need not change.

    The line numbers in the patch file may differ from the line numbers in a newly written patch file.

    was: the diff of the patch as it was applied to the upstream of `commit`; empty if that diff is not known
    """
    fresh = parse_mail(_as_mail(scratch, commit), commit)
    if _identity(fresh) != _identity(loaded.mail):
        return False
    if was and changed_rows(was) == changed_rows(fresh.diff):
        return True
    if hunk_headings(fresh.diff) != hunk_headings(loaded.mail.diff):
        return False
    builder = Builder(scratch, f"{commit}^")
    return builder.apply(loaded.mail.diff) and builder.write_tree() == builder.git.resolve(f"{commit}^{{tree}}")


def _identity(mail: Mail) -> tuple[object, ...]:
    date: object = mail.date
    with contextlib.suppress(ValueError, TypeError):
        when = parsedate_to_datetime(mail.date)
        date = (when.timestamp(), when.utcoffset())
    return mail.name, mail.email, date, mail.message


# --- the result for each patch -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchChange:
    """Report what an export did to one patch.

    state: "new", "changed", "unchanged" or "dropped"
    commits: the commits that the patch was made of, as "1234567890 subject"; empty for an unchanged patch
    note: why the patch was dropped, or which other patches it contains now; "" for nothing
    """

    id: str
    state: str
    commits: tuple[str, ...] = ()
    note: str = ""


def patch_changes(folded: FoldedSeries, series: Series, todo: Sequence[Change]) -> tuple[PatchChange, ...]:
    """Return what the export did to each patch: the patches in the order of the tree, then the dropped patches."""
    files = {change.path: change.action for change in todo}
    by_id = {loaded.patch.id: loaded.patch.file for loaded in series.patches}
    absorbed = {name: group.name for group in folded.patches for name in group.absorbed}
    found: list[PatchChange] = []
    for group in (group for group in folded.patches if group.made):
        action = files.get(f"patches/{by_id.get(group.id, group.name + '.patch')}", "")
        state = {"add": "new", "change": "changed"}.get(action, "unchanged")
        commits = _named(group) if action else ()
        note = f"contains {', '.join(group.absorbed)} now" if group.absorbed else ""
        found.append(PatchChange(group.name, state, commits, note))
    reverted = [group for group in folded.patches if group.id and not group.made]
    for group in reverted:
        found.append(PatchChange(group.id, "dropped", _named(group), "its commits change nothing"))
    for name in folded.dropped:
        note = f"squashed into {absorbed[name]}" if name in absorbed else "requested with --drop"
        found.append(PatchChange(name, "dropped", (), note))
    return tuple(found)


def _named(group: PatchCommits) -> tuple[str, ...]:
    """Return the id and the subject of each commit of a patch, as printable text."""
    named = (f"{commit.id[:10]} {commit.subject}" for commit, _ in group.commits)
    return tuple(map(_printable, named))


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
