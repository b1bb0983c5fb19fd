"""Turn the commits of a tree back into patches/ and cpp/: assign commits to patches, and plan the changed files.

Paths decide where an edit goes: a path that upstream has belongs to a patch, and a new file to cpp/. A new file that
cpp/ cannot hold (paths.py) belongs to a patch, too. Subjects decide which patch: a commit that apply made, or with the
same subject, is that patch; `fixup! <subject or id>` (also squash! and amend!) is folded into it; any other commit with
changes for a patch is a new patch, at its place in the order.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from kvtool.errors import ConflictError, KvtoolError, TreeError
from kvtool.gitcmd import Git, Scratch
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
from kvtool.replay.paths import patch_paths, read_tree
from kvtool.replay.rebase_plan import Rehearsal, SeriesContext
from kvtool.result import PatchOutcome
from kvtool.series.changes import Change, preview_project
from kvtool.series.groups import Group, last_of, owners_of
from kvtool.series.patchfile import DIFF_FLAGS, MAIL_FLAGS, Mail, changed_rows, hunk_headings, parse_diff, parse_mail
from kvtool.series.series import LoadedPatch, Series, files_of_groups, load_groups, new_id
from kvtool.series.series_toml import edit_series, set_limits
from kvtool.upstream.lock import Upstream, pin

_FIXUP = re.compile(r"^(fixup|squash|amend)! ")
_NO_MAIL = re.compile(r"\A\s*\Z|^(---\s*$|diff -.*|Index: .*)", re.MULTILINE)  # git am ends a mail's message there


@dataclass
class PatchCommits:
    """A patch and its commits."""

    id: str  # "" for a new patch
    commits: list[tuple[Commit, bytes]]  # each with its diff; the first commit is the patch, the others are fixups
    message: str
    made: str = ""  # the squashed commit, "" if the fixups removed every change

    @property
    def first(self) -> Commit:
        return self.commits[0][0]


@dataclass(frozen=True)
class FoldedSeries:
    """The commits of a tree as a series: files of cpp/, patches in order, last commit and its tree."""

    files: tuple[Blob, ...]
    patches: tuple[PatchCommits, ...]
    head: str
    tree: str


def squash_fixups(scratch: Scratch, tree: Path, applied: Applied, head: str, series: Series) -> FoldedSeries:
    """Fold base..head into a series with the same final tree.

    TreeError: a merge, a subject twice, a patch that lost its commit, a fixup of nothing, a file cpp/ cannot hold.
    ConflictError: a fixup that does not go into its patch because it needs a later one.
    """
    if not scratch.ok("merge-base", "--is-ancestor", applied.base, head):
        raise TreeError(f"{tree}: HEAD does not come from {series.upstream.label}", next_step="kvtool status")
    of_patches = patch_paths(scratch.paths(applied.base), read_tree(scratch, head))
    blobs = _new_blobs(scratch, applied.base, head)
    groups = _group_commits(scratch, tree, commits_of(scratch, applied.base, head), applied, series, of_patches)
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
    return FoldedSeries(blobs, tuple(groups), builder.commit, builder.tree)


def only_drops_patches(
    scratch: Scratch, project: Project, applied: Applied, head: str, series: Series, was: Mapping[str, bytes]
) -> bool:
    """Return True if the project differs from the applied series only by patches that the tree lacks, too.

    Export then has nothing to undo.
    """
    wanted = {loaded.patch.id: loaded for loaded in series.patches if loaded.wanted}
    tried = (report for report in applied.patches if report.outcome is not PatchOutcome.SKIPPED)
    made = {report.id: report.commit for report in tried if report.id in wanted}
    gone = {report.commit for report in applied.patches if report.id not in wanted}
    subjects = {commit.subject for commit in commits_of(scratch, applied.base, applied.head) if commit.id in gone}
    return (
        list(made) == list(wanted)
        and not any(commit.subject in subjects for commit in commits_of(scratch, applied.base, head))
        and not _cpp_changes(project, scratch, _new_blobs(scratch, applied.base, applied.head), series.groups)
        and not _mail_changes(scratch, wanted, {name: commit for name, commit in made.items() if commit}, (), was)
    )


def _new_blobs(git: Git, base: str, head: str) -> tuple[Blob, ...]:
    """Return the files of a tree that belong to cpp/."""
    final = read_tree(git, head)
    of_patches = patch_paths(git.paths(base), final)
    return tuple(Blob(entry.mode, entry.id, path) for path, entry in final.items() if path not in of_patches)


def _patch_diff(git: Git, commit: Commit, of_patches: frozenset[str]) -> bytes:
    """Return the changes of a commit that belong to a patch, as a diff with plenty of context."""
    files = parse_diff(git.raw("diff-tree", "-p", "--no-commit-id", *DIFF_FLAGS, "-U3", commit.parent, commit.id))
    return b"".join(file.head + b"".join(h.text for h in file.hunks) for file in files if file.path in of_patches)


def _group_commits(
    git: Git, tree: Path, commits: tuple[Commit, ...], applied: Applied, series: Series, of_patches: frozenset[str]
) -> list[PatchCommits]:
    by_subject = {loaded.mail.subject: loaded.patch.id for loaded in series.patches if loaded.wanted}
    ids = set(by_subject.values())
    by_commit = {report.commit: report.id for report in applied.patches if report.commit and report.id in ids}
    groups: list[PatchCommits] = []
    for commit in commits:
        if len(commit.parents) > 1:
            raise TreeError(
                f"commit {commit.id[:10]} ({commit.subject}) is a merge",
                why="a series is a line of commits",
                next_step=f"git -C {tree} rebase {applied.base[:10]}",
            )
        target, kind = commit.subject, ""
        while found := _FIXUP.match(target):
            target, kind = target[found.end() :], kind or found[1]
        patch = by_commit.get(commit.id) or by_subject.get(target) or (target if kind and target in ids else "")
        diff = _patch_diff(git, commit, of_patches)
        known = next((group for group in groups if patch and group.id == patch), None)
        if kind:
            known = known or next((group for group in groups if group.first.subject == target), None)
            _add_fixup(known, commit, diff, kind, target)
        elif known:
            known.commits.append((commit, diff))
        elif patch or diff:
            _reject_duplicate_subject(groups, commit, tree, applied)
            groups.append(PatchCommits(patch, [(commit, diff)], commit.message))
    _reject_missing_commits(groups, applied, series)
    return groups


def _add_fixup(group: PatchCommits | None, commit: Commit, diff: bytes, kind: str, target: str) -> None:
    if group:
        group.commits.append((commit, diff))
        rest = commit.message.partition("\n")[2].strip()
        if kind == "amend" and rest:
            group.message = rest + "\n"
    elif diff:  # a fixup that touches new files only needs no patch: the path says where it goes
        raise TreeError(
            f"commit {commit.id[:10]} ({commit.subject}) fixes nothing",
            why=f"no patch before it has the subject or id {target!r}",
            next_step="give it the subject of a patch (kvtool status lists them), or one of its own",
        )


def _reject_duplicate_subject(groups: list[PatchCommits], commit: Commit, tree: Path, applied: Applied) -> None:
    """Raise TreeError for two commits with one subject: later exports identify a patch by its subject."""
    if first := next((group.first for group in groups if group.first.subject == commit.subject), None):
        raise TreeError(
            f"commits {first.id[:10]} and {commit.id[:10]} have the same subject: {commit.subject}",
            why="export tells commits apart by their subject",
            next_step=f"reword one, or make it a fixup of the other: git -C {tree} rebase -i {applied.base[:10]}",
        )


def _reject_missing_commits(groups: list[PatchCommits], applied: Applied, series: Series) -> None:
    """Raise TreeError if an applied patch of the series has no commit: no patch is dropped by accident."""
    there = {group.id for group in groups}
    was = {report.id for report in applied.patches if report.commit}
    if lost := [s.patch for s in series.patches if s.patch.id in was and s.patch.id not in there]:
        raise TreeError(
            f"no commit in the tree any more: {', '.join(repr(patch.id) for patch in lost)}",
            why="neither the commit of each of these patches nor one with its subject is there",
            next_step="to drop them: remove their entries from patches/series.toml, and "
            f"{', '.join(f'patches/{patch.file}' for patch in lost)}, then export again; "
            "to keep them: git cherry-pick them back",
        )


def _commit_patch(builder: Builder, tree: Path, group: PatchCommits) -> str:
    """Commit a squashed patch, if it changes anything. Return the commit or ""."""
    first = group.first
    if cut := _NO_MAIL.search(group.message):
        raise TreeError(
            f"the message of commit {first.id[:10]} ({first.subject}) cannot stand in a patch file",
            why=f"a mail's message ends at a line such as {line!r}" if (line := cut[0].strip()) else "it is empty",
            next_step=f"reword it: git -C {tree} rebase -i {first.parent[:10]}",
        )
    for commit, diff in group.commits:
        if diff and not builder.apply(diff) and not builder.apply(diff, "--3way"):
            builder.reset()
            raise ConflictError(
                f"commit {commit.id[:10]} ({commit.subject}) does not go into its patch {first.subject!r}",
                why="it changes lines that a later patch brings",
                next_step=f"make it a fixup of that one, or fold by hand: git -C {tree} rebase -i",
            )
    return builder.commit_index(group.message, author=first) or ""


# --- what changes ------------------------------------------------------------------------------------------------


def plan_export(
    project: Project, scratch: Scratch, folded: FoldedSeries, series: Series, was: Mapping[str, bytes]
) -> tuple[Change, ...]:
    """Everything that has to change in the project for it to say what the tree says.

    was: the diff of each patch as it was moved to the tree's upstream, where that is not the locked one.
    """
    by_id = {loaded.patch.id: loaded for loaded in series.patches}
    added: dict[str, str] = {}  # new id -> subject
    made: dict[str, str] = {}
    for patch in (patch for patch in folded.patches if patch.made):
        name = patch.id
        if not name:
            mail = _as_mail(scratch, patch.made)
            subject = parse_mail(mail, patch.made).subject
            # what lies there, but for what an export of this commit wrote before it was killed
            files = {file.stem.lower() for file in project.patches.glob("*.patch") if file.read_bytes() != mail}
            name = new_id(subject, {*by_id, *added, *files})
            added[name] = subject
        made[name] = patch.made
    gone = [patch.id for patch in folded.patches if patch.id and not patch.made]
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
    """What has to change for the project to say the new upstream, tried in scratch; and what the tree is then.

    groups: those that the tree is to have, empty for all. The rebase itself always moves the whole series.

    A patch file whose bytes give the same commit on the new upstream stays as it is. A patch that has no place there
    (merged, empty, left out) gets `until`, or `from` when the new upstream is older than the locked one and the patch
    has not ended with the next; one that was to begin later gets `from`, too.
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
    preview = preview_project(project, todo, scratch.place())
    series = context.with_project(preview).series(upstream)
    replayed = replay(scratch, done.base, series)
    if not replayed.complete or replayed.tree != done.tree:
        raise KvtoolError("the rebased series does not give the tree", why="this is a bug; nothing was written")
    if groups:
        series = context.with_groups(groups).with_project(preview).series(upstream)
        replayed = replay(scratch, done.base, series)
        if error := conflict_error(replayed.reports, done.tag):
            error.next_step = "make a tree with the whole series, and rebase there: kvtool apply"
            raise error
    return todo, applied_of(series, replayed, pinned=False)


_LATE = {"patches/series.toml": 1, "patches/upstream.lock": 2}


def _in_write_order(found: list[Change]) -> tuple[Change, ...]:
    """As they are to be written, so that the project can be read at every moment: new files before series.toml names
    them, the lock behind it, and old files go after all that."""
    turn = {change.path: 3 if change.content is None else _LATE.get(change.path, 0) for change in found}
    return tuple(sorted(found, key=lambda change: (turn[change.path], change.path)))


def _text_change(file: Path, text: str) -> list[Change]:
    """Return the change of a file of patches/, or nothing if the text is equal."""
    return [Change(f"patches/{file.name}", "change", text.encode())] if text != read_text(file) else []


def _cpp_changes(project: Project, git: Git, blobs: Sequence[Blob], groups: Sequence[str]) -> list[Change]:
    """Return the changes that give cpp/ these files. groups: the groups of the tree; other files are not touched."""
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
    """TreeError if a tree with some groups has a file that belongs to none of them: the next tree would lack it."""
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
    """The patch files that have to change. made: the commit of each patch, new ones among them; gone: those that have
    none any more; was: as in plan_export()."""
    found: list[Change] = []
    for name, commit in made.items():
        loaded = by_id.get(name)
        if loaded is None:
            found.append(Change(f"patches/{name}.patch", "add", _as_mail(scratch, commit)))
        elif not _gives_commit(scratch, loaded, commit, was.get(name, b"")):
            found.append(Change(f"patches/{loaded.patch.file}", "change", _as_mail(scratch, commit)))
    return found + [Change(f"patches/{by_id[name].patch.file}", "remove", None) for name in gone]


def _as_mail(git: Git, commit: str) -> bytes:
    """Write a commit as a patch file, with the same bytes on every machine."""
    return git.raw("format-patch", "--stdout", "-1", *MAIL_FLAGS, *DIFF_FLAGS, commit)


def _gives_commit(scratch: Scratch, loaded: LoadedPatch, commit: str, was: bytes) -> bool:
    """Return True if the patch file already gives this commit and need not change. Its line numbers may be old.

    `was` is the diff of the patch when it was moved to this upstream.
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
