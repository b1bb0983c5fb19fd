"""From the commits of a patched tree back to a series: which commit belongs to which patch, fixups folded in.

Paths decide where an edit goes: a path that upstream has belongs to a patch, any other to cpp/. Subjects decide which
patch: a commit that apply made, or with the same subject, is that patch; `fixup! <subject or id>` (also squash! and
amend!) is folded into it; any other commit that touches upstream's files is a new patch, at its place in the order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import ConflictError, TreeError
from kvtool.gitcmd import Git
from kvtool.tree.mailbox import DIFF_FLAGS, Mail, parse_diff
from kvtool.tree.replay import NEW_FILES_SUBJECT, Builder
from kvtool.tree.series import Series, hidden
from kvtool.tree.worktree import Applied, Commit, commits_since

_FIXUP = re.compile(r"^(fixup|squash|amend)! ")


@dataclass(frozen=True)
class Blob:
    """A file of a git tree. mode: "100644" or "100755"."""

    path: str
    mode: str
    id: str


@dataclass(frozen=True)
class FoldedPatch:
    """A patch as the tree has it. id "" for a new one; commit: the folded one, parent: what it stands on."""

    id: str
    subject: str
    commit: str
    parent: str


@dataclass(frozen=True)
class Folded:
    """The tree's commits as a series: the files for cpp/, the patches in order, the last commit.

    emptied: ids of patches that fixups took back altogether.
    """

    files: tuple[Blob, ...]
    patches: tuple[FoldedPatch, ...]
    emptied: tuple[str, ...]
    head: str
    tree: str


@dataclass
class _Group:
    """A patch and the commits that make it up; the first is its own."""

    id: str
    commits: list[Commit]
    message: str


def fold(git: Git, applied: Applied, head: str, series: Series, scratch: Path) -> Folded:
    """Fold base..head into a series with the same final tree.

    TreeError: a merge, a patch that lost its commit, a fixup of nothing, a file cpp/ cannot hold. ConflictError: a
    fixup that does not go into its patch because it needs a later one.
    """
    if not git.ok("merge-base", "--is-ancestor", applied.base, head):
        raise TreeError(f"{git.repo}: HEAD does not come from llama.cpp {applied.tag}", next_step="kvtool status")
    commits = commits_since(git.repo, applied.base, head)
    theirs = frozenset(git.run("ls-tree", "-r", "-z", "--name-only", applied.base).stdout.split("\0"))
    blobs = _new_blobs(git, head, theirs)
    groups = _groups(git, commits, applied, series, theirs)
    builder = Builder(git, scratch, applied.base)
    builder.add_blobs([(blob.mode, blob.id, blob.path) for blob in blobs])
    builder.commit_index(f"{NEW_FILES_SUBJECT}\n")
    built = [(group.id, _build(builder, group, theirs)) for group in groups]
    patches = tuple(patch for _, patch in built if patch)
    emptied = tuple(name for name, patch in built if name and patch is None)
    wanted = git.line("rev-parse", f"{head}^{{tree}}")
    if builder.tree != wanted:
        differ = git.run("diff", "--name-only", builder.tree, wanted).stdout.split()
        raise ConflictError(
            "the commits cannot be folded into a series with the same result",
            why=f"these files would differ: {', '.join(differ)}",
            next_step=f"fold them by hand: git -C {git.repo} rebase -i --autosquash {applied.base[:10]}",
        )
    return Folded(blobs, patches, emptied, builder.commit, builder.tree)


def _new_blobs(git: Git, head: str, theirs: frozenset[str]) -> tuple[Blob, ...]:
    """The files that upstream does not have."""
    found = []
    for entry in git.run("ls-tree", "-r", "-z", head).stdout.split("\0"):
        if not entry:
            continue
        (mode, _, blob), path = entry.split("\t", 1)[0].split(), entry.split("\t", 1)[1]
        if path in theirs:
            continue
        if mode not in ("100644", "100755") or hidden(path):
            raise TreeError(
                f"{path} cannot be exported",
                why="cpp/ holds plain files, none of them hidden, and no README.md of llama.cpp's root",
                next_step=f"remove it from the tree: git -C {git.repo} rm {path}",
            )
        found.append(Blob(path, mode, blob))
    return tuple(found)


def upstream_diff(git: Git, commit: Commit, theirs: frozenset[str]) -> bytes:
    """What a commit changes in upstream's own files, as a diff with plenty of context."""
    flags = [flag for flag in DIFF_FLAGS if flag != "-U1"]
    done = git.run("diff-tree", "-p", "-U3", "--no-commit-id", *flags, commit.parent, commit.id)
    files = parse_diff(done.stdout.encode("utf-8", "surrogateescape"))
    return b"".join(file.head + b"".join(h.text for h in file.hunks) for file in files if file.path in theirs)


def _groups(
    git: Git, commits: tuple[Commit, ...], applied: Applied, series: Series, theirs: frozenset[str]
) -> list[_Group]:
    by_commit = {report.commit: report.id for report in applied.patches if report.commit}
    by_name = {step.mail.subject: step.patch.id for step in series.steps if step.wanted}
    by_name |= {step.patch.id: step.patch.id for step in series.steps if step.wanted}
    groups: list[_Group] = []
    for commit in commits:
        if commit.merge:
            raise TreeError(
                f"commit {commit.id[:10]} ({commit.subject}) is a merge",
                why="a series is a line of commits",
                next_step=f"git -C {git.repo} rebase {applied.base[:10]}",
            )
        target, kind = commit.subject, ""
        while found := _FIXUP.match(target):
            target, kind = target[found.end() :], kind or found[1]
        patch = by_commit.get(commit.id) or by_name.get(target, "")
        if kind:
            _add_fixup(groups, commit, kind, target, patch, bool(upstream_diff(git, commit, theirs)))
        elif any(group.id == patch for group in groups if patch):
            groups[[group.id for group in groups].index(patch)].commits.append(commit)
        elif patch or upstream_diff(git, commit, theirs):
            groups.append(_Group(patch, [commit], commit.message))
    _refuse_lost(groups, applied, series)
    return groups


def _add_fixup(groups: list[_Group], commit: Commit, kind: str, target: str, patch: str, needed: bool) -> None:
    mine = [g for g in groups if (patch and g.id == patch) or g.commits[0].subject == target]
    if mine:
        mine[0].commits.append(commit)
        rest = commit.message.partition("\n")[2].strip()
        if kind == "amend" and rest:
            mine[0].message = rest + "\n"
    elif needed:  # a fixup that touches new files only needs no patch: the path says where it goes
        raise TreeError(
            f"commit {commit.id[:10]} ({commit.subject}) fixes nothing",
            why=f"no patch before it has the subject or id {target!r}",
            next_step="give it the subject of a patch (kvtool status lists them), or one of its own",
        )


def _refuse_lost(groups: list[_Group], applied: Applied, series: Series) -> None:
    """A patch that is in the series and was applied must still have a commit: nothing is dropped by accident."""
    there = {group.id for group in groups}
    was = {report.id for report in applied.patches if report.commit}
    lost = [s.patch for s in series.steps if s.patch.id in was and s.patch.id not in there]
    if lost:
        raise TreeError(
            f"patch {lost[0].id!r} has no commit in the tree any more",
            why="neither its commit nor one with its subject is there",
            next_step=f"to drop it: remove its entry from patches/series.toml and patches/{lost[0].file}, then export "
            "again; to keep it: git cherry-pick it back",
        )


def _build(builder: Builder, group: _Group, theirs: frozenset[str]) -> FoldedPatch | None:
    """Commit a group on top of what is built so far; None when it changes nothing in upstream's files."""
    parent = builder.commit
    for commit in group.commits:
        diff = upstream_diff(builder.git, commit, theirs)
        if diff and not builder.apply(diff) and not builder.apply(diff, "--3way"):
            builder.reset()
            raise ConflictError(
                f"commit {commit.id[:10]} ({commit.subject}) does not go into its patch {group.commits[0].subject!r}",
                why="it changes lines that a later patch brings",
                next_step=f"make it a fixup of that one, or fold by hand: git -C {builder.git.repo} rebase -i",
            )
    first = group.commits[0]
    mail = Mail(first.author, first.email, first.date, first.subject, group.message, b"", b"")
    made = builder.commit_index(group.message, mail=mail)
    return FoldedPatch(group.id, group.message.partition("\n")[0].strip(), made, parent) if made else None
