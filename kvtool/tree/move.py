"""Move one commit of a series from the upstream it was made on to another one, in a temporary index.

Two ways, and the first to be sure of its places wins:

1. A real three-way merge, with the tree that the patch was made on as the base (git merge-tree, what cherry-pick does).
   It is tried first because it finds places by what upstream really did between the two trees: it follows a renamed
   file, and a twin of a function does not mislead it. It merges only where a line of context on each side is still
   there and unmoved.
2. The plain patch with one line of context. It needs no relation between the two trees, so it survives what the merge
   calls a conflict (a function that was moved, a neighbouring line that was rewritten), but it takes the nearest place
   that fits, right or wrong.

Where both give the same tree and each hunk lands in the function it was recorded in, two independent ways agree and
nothing more is asked; together.py tells that of a whole series at once. Otherwise each hunk is held against
placement.py, and a hunk in the wrong place is a conflict that says where it landed and where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtool.errors import KvtoolError
from kvtool.gitcmd import Git
from kvtool.tree.mailbox import DIFF_FLAGS, FileDiff, parse_diff
from kvtool.tree.placement import Finding, LineMap, Piece, check, pieces_of, split_lines
from kvtool.tree.replay import Builder, FailedHunk, failed_hunks

# Blocks of lines as the three-way merge sees them, so that the map and the merge agree on what became of a line.
MAP_FLAGS = (
    "-U0",
    "--diff-algorithm=histogram",
    "--no-indent-heuristic",
    "--no-renames",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--full-index",
)


@dataclass(frozen=True)
class Origin:
    """A patch as a commit: where it was made. diff: as DIFF_FLAGS write it."""

    parent: str
    commit: str
    diff: bytes


@dataclass(frozen=True)
class Attempt:
    """tree: with the patch in it, None when it has no place; failed: what is in the way; notes: worth a look.

    diff: what the patch is there, None where nobody had to ask yet.
    """

    tree: str | None
    failed: tuple[FailedHunk, ...] = ()
    notes: tuple[str, ...] = ()
    diff: bytes | None = None


def move(builder: Builder, origin: Origin) -> Attempt:
    """Bring a patch onto builder.tree. The index is left somewhere; the caller resets it to the tree, and commits."""
    git, onto = builder.git, builder.tree
    merged = three_way(git, origin, onto)
    plain = apply_alone(builder, origin.diff)
    if merged == onto:
        return Attempt(merged)
    if merged is not None and merged == plain:
        diff = diff_of(git, onto, merged)
        if headings(diff) == headings(origin.diff):
            return Attempt(merged, diff=diff)
    failed: tuple[FailedHunk, ...] = ()
    for tree in dict.fromkeys(tree for tree in (merged, plain) if tree is not None):
        findings = inspect(git, origin, onto, tree)
        if not any(finding.wrong for finding in findings):
            notes = [f"{f.piece.hunk.path}: {f.note}" for f in findings if f.note]
            if tree == merged and plain not in (merged, None):
                notes += _astray(git, origin, onto, plain)
            return Attempt(tree, notes=tuple(notes))
        failed = failed or tuple(_misplaced(finding) for finding in findings if finding.wrong)
    if not failed:
        if _is_there(builder, origin):
            return Attempt(onto)
        builder.reset()
        failed = failed_hunks(builder, origin.diff)
    return Attempt(None, tuple(explain(git, origin, onto, hunk) for hunk in failed))


def misplaced(git: Git, origin: Origin, onto: str, result: str) -> tuple[FailedHunk, ...]:
    """The hunks of a patch that went from `onto` to `result` and landed in the wrong place."""
    same = headings(diff_of(git, onto, result)) == headings(origin.diff)
    if same and three_way(git, origin, onto) == git.resolve(f"{result}^{{tree}}"):
        return ()
    findings = inspect(git, origin, onto, result)
    return tuple(explain(git, origin, onto, _misplaced(finding)) for finding in findings if finding.wrong)


def three_way(git: Git, origin: Origin, onto: str) -> str | None:
    """The merged tree, None when there are conflicts. (merge-tree takes --merge-base from git 2.40 on only.)"""
    theirs = git.line("commit-tree", f"{onto}^{{tree}}", "-p", origin.parent, input="upstream\n")
    done = git.run(
        "merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", theirs, origin.commit, check=False
    )
    if done.returncode not in (0, 1):
        raise KvtoolError(
            "git cannot merge",
            why="git 2.38 or newer is needed to move a patch to another upstream",
            next_step="install a newer git; kvtool doctor says which one is used",
            output=done.stderr,
        )
    return done.stdout.split("\0")[0] if done.returncode == 0 else None


def apply_alone(builder: Builder, diff: bytes, *flags: str) -> str | None:
    """The tree with a diff applied to builder.tree by its context, None when it does not apply."""
    builder.reset()
    return builder.written() if builder.apply(diff, *flags) else None


def _is_there(builder: Builder, origin: Origin) -> bool:
    """Whether upstream has the whole patch: it can be taken back, and each hunk from the place where it belongs."""
    without = apply_alone(builder, origin.diff, "--reverse")
    if without is None:
        return False
    back = replace(origin, parent=origin.commit)
    return not any(f.wrong for f in inspect(builder.git, back, builder.tree, without, reverse=True))


# --- the placement check, fed from git ----------------------------------------------------------------------------


def inspect(git: Git, origin: Origin, onto: str, result: str, *, reverse: bool = False) -> tuple[Finding, ...]:
    """Hold every hunk against the place where it landed, `onto` and `result` being the tree before and after.

    A hunk that upstream has already is left out. reverse: the patch was taken back, origin.parent being its commit.
    """
    files = [file for file in parse_diff(origin.diff) if file.hunks]
    findings: list[Finding] = []
    names = _renamed(git, files, onto, result)
    for file in files:
        base, now, after = (
            split_lines(git.blob(tree, path) or b"")
            for tree, path in ((origin.parent, file.path), (onto, names[file.path]), (result, names[file.path]))
        )
        moved = line_map(git, f"{origin.parent}:{file.path}", f"{onto}:{names[file.path]}")
        pieces = [piece for piece in pieces_of(file, reverse=reverse) if not _had(piece, now, moved)]
        findings += check(base, now, after, pieces, moved)
    return tuple(findings)


def _had(piece: Piece, lines: Sequence[bytes], moved: LineMap) -> bool:
    region = moved.region(piece.start, piece.start + len(piece.before))
    return tuple(lines[region.start : region.stop]) == piece.after


def _renamed(git: Git, files: Sequence[FileDiff], onto: str, result: str) -> dict[str, str]:
    """Where each file of a patch is in the other upstream: the merge follows renames, one for one."""
    touched = git.run("diff-tree", "-r", "--name-only", "--no-renames", "-z", onto, result).stdout.split("\0")[:-1]
    ours = {file.path for file in files}
    gone, fresh = sorted(ours - set(touched)), sorted(set(touched) - ours)
    names = {path: path for path in ours}
    if len(gone) == len(fresh):
        names.update(zip(gone, fresh, strict=True))
    return names


def line_map(git: Git, old: str, new: str) -> LineMap:
    """What became of the lines of one blob ("tree:path") in another; everything is gone when one does not exist."""
    done = git.run("diff", *MAP_FLAGS, old, new, check=False)
    files = parse_diff(done.stdout.encode("utf-8", "surrogateescape"))
    return LineMap.of(files[0] if files else None)


def changes(git: Git, base: str, head: str) -> dict[str, Origin]:
    """Each commit of a chain with its parent and diff, by its id; one git call for all."""
    flags = ("--reverse", "-p", "--format=%x00%x00%H %P%x00", *DIFF_FLAGS)
    found: dict[str, Origin] = {}
    for entry in git.run("log", *flags, f"{base}..{head}").stdout.split("\0\0")[1:]:
        ids, _, diff = entry.partition("\0")
        commit, parent = ids.split()
        found[commit] = Origin(parent, commit, diff.lstrip("\n").encode("utf-8", "surrogateescape"))
    return found


def headings(diff: bytes) -> list[tuple[str, str]]:
    """The function of each hunk, as git names it."""
    return [(hunk.path, hunk.heading) for file in parse_diff(diff) for hunk in file.hunks]


def diff_of(git: Git, before: str, after: str) -> bytes:
    """The difference of two trees as a patch has it."""
    return git.run("diff-tree", "-p", *DIFF_FLAGS, before, after).stdout.encode("utf-8", "surrogateescape")


def _misplaced(finding: Finding) -> FailedHunk:
    hunk = finding.piece.hunk
    return FailedHunk(hunk.path, hunk.number, hunk.total, f"{hunk.header} {hunk.heading}".strip(), finding.wrong)


def _astray(git: Git, origin: Origin, onto: str, plain: str | None) -> list[str]:
    """What the plain patch alone would have done wrong."""
    assert plain is not None
    wrong = [_misplaced(finding) for finding in inspect(git, origin, onto, plain) if finding.wrong]
    return [f"merged; one line of context alone would have misled it: {hunk}" for hunk in wrong]


_MOST = 40  # lines of a region worth showing


def explain(git: Git, origin: Origin, onto: str, hunk: FailedHunk) -> FailedHunk:
    """Add what the patch expects there, what it makes of it, and what upstream has in its place."""
    file = next((f for f in parse_diff(origin.diff) if f.path == hunk.path), None)
    piece = next((p for p in pieces_of(file) if p.hunk.number == hunk.number), None) if file else None
    if piece is None:
        return hunk
    now = git.blob(onto, hunk.path)
    found: Sequence[bytes] = ()
    if now is not None:
        region = line_map(git, f"{origin.parent}:{hunk.path}", f"{onto}:{hunk.path}").region(
            piece.start, piece.start + len(piece.before)
        )
        found = split_lines(now)[region.start : region.stop][:_MOST]
    return replace(hunk, expected=_text(piece.before), wanted=_text(piece.after), found=_text(found))


def _text(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", "replace").rstrip("\r\n") for line in lines)
