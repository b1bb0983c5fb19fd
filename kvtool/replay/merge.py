"""Carry one commit of a series from the upstream it was made on to another one: what git cherry-pick does, and more.

1. A three-way merge, with the tree that the patch was made on as the base (git merge-tree). It finds places by what
   upstream really did between the two trees: it follows a renamed file, and a twin of a function does not mislead it.
2. Where that meets a conflict in a file of C, the conflict may be none. A line that upstream only re-aligned is the
   same line: the patch takes the new alignment, and git merges the file again. And where both only put lines in at one
   place, both stay, upstream's first.
3. Else the plain patch with one line of context. It needs no relation between the two trees, so it survives a function
   that was moved and a neighbouring line that was rewritten, but takes the nearest place that fits, right or wrong.

Whatever comes out is held against placement.py, hunk by hunk, and a hunk in the wrong place is a conflict that says
where it landed and where it belongs.
"""

import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.gitcmd import Git
from kvtool.replay.apply import Blob, Builder, Commit, FailedHunk, failed_hunks
from kvtool.series.patchfile import PLAIN_FLAGS, FileDiff, Piece, hunks_of, parse_diff, pieces_of, quote_name
from kvtool.series.placement import UNTOLD, HunkPlacement, LineMap, check_placement
from kvtool.series.source import SourceFile, split_lines

# Blocks of lines as the three-way merge sees them, so that the map and the merge agree on what became of a line.
MAP_FLAGS = (*PLAIN_FLAGS, "--diff-algorithm=histogram", "--no-indent-heuristic", "--full-index", "-U0")
_MARKER = 60  # long enough that no line of upstream's is taken for one
_CONFLICT = re.compile(
    rb"^<{60}[^\n]*\n(?P<ours>.*?)^\|{60}[^\n]*\n(?P<base>.*?)^={60}\n(?P<theirs>.*?)^>{60}[^\n]*\n",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Picked:
    """tree: with the patch in it, None when it has no place; failed: what is in the way; notes: worth a look."""

    tree: str | None
    failed: tuple[FailedHunk, ...] = ()
    notes: tuple[str, ...] = ()


def cherry_pick(builder: Builder, origin: Commit) -> Picked:
    """Bring a patch onto builder.tree. The index is left somewhere, and the caller commits the tree."""
    git, onto = builder.git, builder.tree
    merged, aligned = merge(builder, origin)
    if merged == onto:
        return Picked(merged)
    failed: tuple[FailedHunk, ...] = ()
    for merging in (True, False):
        tree = merged if merging else apply_alone(builder, _as_called(git, origin, onto))
        if tree is None:
            continue
        placements = inspect(git, origin, onto, tree)
        said = "" if merging else "upstream changed its lines, or those beside it; by its context alone: "
        wrong = tuple(FailedHunk.of(found.piece.hunk, said + found.wrong) for found in placements if found.wrong)
        if not wrong:
            notes = tuple(
                f"{placement.piece.hunk.path}: {placement.note}" for placement in placements if placement.note
            )
            return Picked(tree, notes=aligned + notes if merging else notes)
        failed = failed or wrong
    if not failed:
        if _is_there(builder, origin):
            return Picked(onto)
        builder.reset()
        failed = failed_hunks(builder, _as_called(git, origin, onto))
    return Picked(None, tuple(explain(git, origin, onto, hunk) for hunk in failed))


# --- the three-way merge ------------------------------------------------------------------------------------------


def merge(builder: Builder, origin: Commit) -> tuple[str | None, tuple[str, ...]]:
    """The merged tree, None when there are conflicts; and what was taken for re-aligned only.

    (merge-tree takes --merge-base from git 2.40 on only, so upstream becomes a commit on top of the base.)
    """
    git, onto = builder.git, builder.tree
    upstream = git.line("commit-tree", onto, "-p", origin.parent, input="upstream\n")
    done = git.run("merge-tree", "--write-tree", "-z", "--no-messages", upstream, origin.id, check=False)
    if done.returncode not in (0, 1):
        raise KvtoolError(
            "git cannot merge",
            why="git 2.38 or newer is needed to move a patch to another upstream",
            next_step="install a newer git; kvtool doctor says which one is used",
            output=done.stderr,
        )
    tree, *entries = done.stdout.split("\0")
    return (tree, ()) if done.returncode == 0 else _settle_all(builder, tree, unmerged_of(entries))


def _settle_all(
    builder: Builder, tree: str, unmerged: Mapping[str, Mapping[str, tuple[str, str]]]
) -> tuple[str | None, tuple[str, ...]]:
    """The tree of a merge without its conflicts, None where one is none of those that can be settled."""
    git, notes, settled = builder.git, list[str](), list[Blob]()
    for path, stages in unmerged.items():
        if set(stages) != {"1", "2", "3"} or len({mode for mode, _ in stages.values()}) > 1:
            return None, ()
        base, ours, theirs = read(git, *((stages[n][1], path) for n in "123"))
        made = settle(git, base, ours, theirs)
        if made is None:
            return None, ()
        content, note = made
        notes += [f"{path}: {note}"] if note else []
        settled.append(Blob(stages["2"][0], git.line("hash-object", "-w", "--stdin", input=content), path))
    builder.reset(tree)
    builder.add_blobs(settled)
    return builder.write_tree(), tuple(notes)


def unmerged_of(entries: Sequence[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """The conflicts of merge-tree or an index: by path and stage (1 base, 2 upstream, 3 the patch) mode and blob."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for entry in entries:
        if entry:
            meta, _, path = entry.partition("\t")
            mode, blob, stage = meta.split()
            found.setdefault(path, {})[stage] = (mode, blob)
    return found


def settle(git: Git, base: SourceFile, ours: SourceFile, theirs: SourceFile) -> tuple[bytes, str] | None:
    """Merge one file in which white space counts only where it means something, and lines put in at one place both
    stay, ours first. With it a note on lines that were re-aligned, or "". None: a conflict all the same."""
    if not ours.is_code or any(side.text[-1:] != b"\n" for side in (base, ours, theirs)):
        return None
    (old, new), note = _realigned(git, base, ours, theirs)
    with tempfile.TemporaryDirectory(prefix="kvtool-merge-") as name:
        files = [Path(name) / side for side in ("upstream", "base", "patch")]
        for file, text in zip(files, (ours.text, old, new), strict=True):
            file.write_bytes(text)
        done = git.run("merge-file", "-p", "--diff3", f"--marker-size={_MARKER}", *files, check=False)
    if done.returncode > 127 or any(found["base"] for found in _CONFLICT.finditer(done.raw)):
        return None
    return _CONFLICT.sub(lambda found: found["ours"] + found["theirs"], done.raw), note


def _realigned(git: Git, base: SourceFile, ours: SourceFile, theirs: SourceFile) -> tuple[tuple[bytes, bytes], str]:
    """base and theirs with the alignment that ours gave their lines; and what to say of it."""
    moved, made = compare(git, base, ours), compare(git, base, theirs)
    old, new = list(base.lines), list(theirs.lines)
    columns: dict[int, dict[int, int]] = {}
    for number, line in enumerate(base.lines):
        there, mine = moved.line(number), made.line(number)
        if there is None or line == ours.lines[there]:
            continue
        columns[number] = base.columns(number, ours, there)
        old[number] = ours.lines[there]
        if mine is not None and new[mine] == line:
            new[mine] = ours.lines[there]
    took = touched = 0
    for block in made.blocks:
        near = (*range(block.old, block.old + block.removed), block.old - 1, block.old + block.removed)
        touched += any(number in columns for number in near)
        for row in range(block.new, block.new + block.added):
            # the line in the same row of what is replaced knows best, then the others there, then those around it
            best = sorted(near, key=lambda number: number - block.old != row - block.new)
            ways = [theirs.with_alignment(row, columns[number]) for number in best if number in columns]
            new[row] = next((way for way in ways if way != new[row]), new[row])
            took += new[row] != theirs.lines[row]
    note = f"merged, look at it: upstream re-aligned lines there; {took} of the patch's took the new alignment"
    return (b"".join(old), b"".join(new)), note if touched else ""


def apply_alone(builder: Builder, diff: bytes) -> str | None:
    """The tree with a diff applied to builder.tree by its context, None when it does not apply."""
    builder.reset()
    return builder.write_tree() if builder.apply(diff) else None


def _is_there(builder: Builder, origin: Commit) -> bool:
    """Whether upstream has the whole patch: it can be taken back, and each hunk from the place where it belongs."""
    diff = builder.diff_of(origin.id, origin.parent)
    back = replace(origin, id=origin.parent, parents=(origin.id,), diff=diff)
    without = apply_alone(builder, _as_called(builder.git, back, builder.tree))
    return without is not None and not any(f.wrong for f in inspect(builder.git, back, builder.tree, without))


# --- the placement check, fed from git ----------------------------------------------------------------------------


def inspect(git: Git, origin: Commit, onto: str, result: str) -> tuple[HunkPlacement, ...]:
    """Hold every hunk against the place where it landed, `onto` and `result` being the tree before and after.

    A hunk that upstream has already is left out.
    """
    placements: list[HunkPlacement] = []
    names = _names(git, origin, onto)
    for file in (file for file in parse_diff(origin.diff) if file.hunks):
        there = names[file.path]
        places = ((origin.parent, file.path), (origin.id, file.path), (onto, there), (result, there))
        base, patched, now, after = read(git, *((f"{tree}:{path}", path) for tree, path in places))
        moved = compare(git, base, now)
        pieces = [piece for piece in pieces_of(file) if not _had(piece, patched, now, moved)]
        placements += check_placement(base, patched, now, after, pieces, moved)
    return tuple(placements)


def _had(piece: Piece, patched: SourceFile, now: SourceFile, moved: LineMap) -> bool:
    region = moved.map_range(piece.start, piece.start + len(piece.before))
    return now.keys[region.start : region.stop] == patched.keys[piece.made : piece.made + len(piece.after)]


def _names(git: Git, origin: Commit, onto: str) -> dict[str, str]:
    """What each file of a patch is called in the other upstream: the merge follows renames."""
    names = {file.path: file.path for file in parse_diff(origin.diff)}
    if not set(names) <= git.paths(onto):
        names.update({path: name for path, name in git.renamed(origin.parent, onto).items() if path in names})
    return names


def _as_called(git: Git, origin: Commit, onto: str) -> bytes:
    """The diff of a patch with the names that its files have in the other upstream."""
    names = _names(git, origin, onto)
    if all(old == new for old, new in names.items()):
        return origin.diff

    def head(file: FileDiff) -> bytes:
        path = names[file.path].encode("utf-8", "surrogateescape")
        old, new = (quote_name(side + path) for side in (b"a/", b"b/"))
        tab = b"\t" if b" " in path else b""
        first, *others = split_lines(file.head)
        fresh = {b"--- ": b"--- " + old + tab + b"\n", b"+++ ": b"+++ " + new + tab + b"\n"}
        kept = [line if line[4:] == b"/dev/null\n" else fresh.get(line[:4], line) for line in others]
        lines = [b"diff --git " + old + b" " + new + b"\n" if first else b"", *kept]
        return b"".join(lines)

    return b"".join(head(file) + b"".join(hunk.text for hunk in file.hunks) for file in parse_diff(origin.diff))


def look_at(builder: Builder, origin: Commit, tree: str) -> tuple[str, ...]:
    """What is worth a look in `tree`, which a person made of a patch on builder.tree: hunks that stand where they were
    said not to belong, and files that the patch did not touch."""
    git, onto = builder.git, builder.tree
    left = [placement for placement in inspect(git, origin, onto, tree) if placement.wrong not in ("", UNTOLD)]
    more = set(git.changed(onto, tree)) - set(_names(git, origin, onto).values())
    notes = [f"{placement.piece.hunk.path}: as it was left, though {placement.wrong}" for placement in left]
    return (*notes, *(f"{path}: the resolution changes it, the patch did not" for path in sorted(more)))


def read(git: Git, *files: tuple[str, str]) -> list[SourceFile]:
    """Files by git's name for each and their path; one that is not there is empty."""
    found = git.blobs(*(name for name, _path in files))
    return [_source(text, path, blob) for (blob, text), (_name, path) in zip(found, files, strict=True)]


_source = functools.lru_cache(32)(SourceFile)  # as a patch leaves a file, so the next one of the series finds it


def compare(git: Git, old: SourceFile, new: SourceFile) -> LineMap:
    """What became of the lines of one file in another: by git's diff, in which some may only have been re-aligned."""
    if old.text == new.text:
        return LineMap(())
    blobs = (side.blob or git.line("hash-object", "-w", "--stdin", input=side.text) for side in (old, new))
    return LineMap(hunks_of(git.raw("diff", "--text", *MAP_FLAGS, *blobs))).with_keys(old.keys, new.keys)


_MOST = 40  # lines of a region worth showing


def explain(git: Git, origin: Commit, onto: str, hunk: FailedHunk) -> FailedHunk:
    """Add what the patch expects there, what it makes of it, and what upstream has in its place."""
    names = _names(git, origin, onto)
    files = (file for file in parse_diff(origin.diff) if hunk.path in (file.path, names[file.path]))
    piece = next((p for file in files for p in pieces_of(file) if p.hunk.number == hunk.number), None)
    if piece is None:
        return hunk
    path, name, reason = piece.hunk.path, names[piece.hunk.path], hunk.reason
    places = ((origin.parent, path), (onto, name))
    old, new = read(git, *((f"{tree}:{file}", file) for tree, file in places))
    region = compare(git, old, new).map_range(piece.start, piece.start + len(piece.before))
    found = new.lines[region.start : region.stop][:_MOST]
    if gone := _gone_to(git, piece.before, *places):
        reason += f"; a line of it is in {gone} now"
    expected, wanted, there = (_text(lines) for lines in (piece.before, piece.after, found))
    return replace(hunk, path=name, reason=reason, expected=expected, wanted=wanted, found=there)


_TELLING = 16  # characters that are not in every other file


def _gone_to(git: Git, lines: Sequence[bytes], old: tuple[str, str], new: tuple[str, str]) -> str:
    """The one other file ("path:line") that has come to have the longest of some lines, "" when none or several have.
    old, new: the tree and the file that they are from, and that they would be in."""
    line = max((line.strip() for line in lines), key=len, default=b"").decode("utf-8", "replace")
    if len(line) < _TELLING:
        return ""

    def having(tree: str) -> dict[str, str]:
        said = git.run("grep", "-n", "-z", "-F", "-f", "-", tree, input=line + "\n", check=False).stdout.splitlines()
        rows = (row.removeprefix(f"{tree}:").split("\0") for row in reversed(said))
        return {row[0]: row[1] for row in rows if len(row) > 2}

    after = {path: number for path, number in having(new[0]).items() if path != new[1]}
    before = having(old[0]) if after else {}
    fresh = [f"{path}:{number}" for path, number in after.items() if path not in before]
    return fresh[0] if len(fresh) == 1 else ""


def _text(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", "replace").rstrip("\r\n") for line in lines)
