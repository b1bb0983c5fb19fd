"""Move one commit of a series from its upstream to another upstream, like git cherry-pick but with more checks.

1. Try a three-way merge whose base is the tree that the patch was made on (git merge-tree). The merge uses the real
   changes between the two trees: it follows renamed files and is not misled by a twin of a function.
2. Resolve trivial conflicts in C files. A line that upstream only re-aligned is the same line: the patch gets the new
   alignment, and git merges the file again. If both sides only inserted lines at one place, keep both insertions,
   upstream's first.
3. Otherwise try the plain patch with one line of context. It needs no relation between the two trees, so it survives
   a moved function and a rewritten neighbouring line. But it applies at the nearest place that fits, right or wrong.

placement.py checks every hunk of the result. A hunk in the wrong place is a conflict that reports where the hunk
landed and where it belongs.
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

# Use the algorithm of the three-way merge, so that the line map and the merge agree on every line.
MAP_FLAGS = (*PLAIN_FLAGS, "--diff-algorithm=histogram", "--no-indent-heuristic", "--full-index", "-U0")
_MARKER = 60  # characters of a conflict marker; no line of upstream looks like one
_CONFLICT = re.compile(
    rb"^<{60}[^\n]*\n(?P<ours>.*?)^\|{60}[^\n]*\n(?P<base>.*?)^={60}\n(?P<theirs>.*?)^>{60}[^\n]*\n",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class PickResult:
    """The result of moving one patch."""

    tree: str | None  # tree id with the patch applied, None after a conflict
    failed: tuple[FailedHunk, ...] = ()  # the hunks that conflict
    notes: tuple[str, ...] = ()  # places that the user should review


def cherry_pick(builder: Builder, origin: Commit) -> PickResult:
    """Apply a patch to builder.tree. The caller commits the returned tree; the index is left undefined."""
    git, onto = builder.git, builder.tree
    merged, aligned = three_way_merge(builder, origin)
    if merged == onto:
        return PickResult(merged)
    failed: tuple[FailedHunk, ...] = ()
    for merging in (True, False):
        tree = merged if merging else apply_by_context(builder, _with_new_names(git, origin, onto))
        if tree is None:
            continue
        placements = check_hunks(git, origin, onto, tree)
        said = "" if merging else "upstream changed its lines, or those beside it; by its context alone: "
        wrong = tuple(FailedHunk.of(found.piece.hunk, said + found.wrong) for found in placements if found.wrong)
        if not wrong:
            notes = tuple(
                f"{placement.piece.hunk.path}: {placement.note}" for placement in placements if placement.note
            )
            return PickResult(tree, notes=aligned + notes if merging else notes)
        failed = failed or wrong
    if not failed:
        if _is_in_upstream(builder, origin):
            return PickResult(onto)
        builder.reset()
        failed = failed_hunks(builder, _with_new_names(git, origin, onto))
    return PickResult(None, tuple(add_context(git, origin, onto, hunk) for hunk in failed))


# --- the three-way merge ------------------------------------------------------------------------------------------


def three_way_merge(builder: Builder, origin: Commit) -> tuple[str | None, tuple[str, ...]]:
    """Return the merged tree, or None after a conflict, and notes on lines that were treated as re-aligned.

    Git before 2.40 has no merge-tree --merge-base, so upstream becomes a temporary commit on top of the base.
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
    return (tree, ()) if done.returncode == 0 else _resolve_all(builder, tree, parse_unmerged(entries))


def _resolve_all(
    builder: Builder, tree: str, unmerged: Mapping[str, Mapping[str, tuple[str, str]]]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the merged tree with every conflict resolved, or None if a conflict is not trivial, and notes."""
    git, notes, resolved = builder.git, list[str](), list[Blob]()
    for path, stages in unmerged.items():
        if set(stages) != {"1", "2", "3"} or len({mode for mode, _ in stages.values()}) > 1:
            return None, ()
        base, ours, theirs = read_files(git, *((stages[n][1], path) for n in "123"))
        made = resolve_trivial_conflicts(git, base, ours, theirs)
        if made is None:
            return None, ()
        content, note = made
        notes += [f"{path}: {note}"] if note else []
        resolved.append(Blob(stages["2"][0], git.line("hash-object", "-w", "--stdin", input=content), path))
    builder.reset(tree)
    builder.add_blobs(resolved)
    return builder.write_tree(), tuple(notes)


def parse_unmerged(entries: Sequence[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """Parse the conflicts that merge-tree or ls-files -u prints.

    Returns mode and blob by path and stage: 1 is the base, 2 is upstream, 3 is the patch.
    """
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for entry in entries:
        if entry:
            meta, _, path = entry.partition("\t")
            mode, blob, stage = meta.split()
            found.setdefault(path, {})[stage] = (mode, blob)
    return found


def resolve_trivial_conflicts(
    git: Git, base: SourceFile, ours: SourceFile, theirs: SourceFile
) -> tuple[bytes, str] | None:
    """Merge one C file; return the content and a note, or None if a conflict remains.

    Insignificant white space is ignored, and two insertions at one place are both kept, `ours` first. The note, "" for
    none, says which lines were re-aligned.
    """
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
    """Return `base` and `theirs` with the alignment of `ours`, and a note or ""."""
    moved, made = map_lines(git, base, ours), map_lines(git, base, theirs)
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
            # prefer the columns of the replaced line in the same row, then other replaced lines, then neighbours
            best = sorted(near, key=lambda number: number - block.old != row - block.new)
            ways = [theirs.with_alignment(row, columns[number]) for number in best if number in columns]
            new[row] = next((way for way in ways if way != new[row]), new[row])
            took += new[row] != theirs.lines[row]
    note = f"merged, look at it: upstream re-aligned lines there; {took} of the patch's took the new alignment"
    return (b"".join(old), b"".join(new)), note if touched else ""


def apply_by_context(builder: Builder, diff: bytes) -> str | None:
    """Apply a diff to builder.tree by its context; return the tree, or None if the diff does not apply."""
    builder.reset()
    return builder.write_tree() if builder.apply(diff) else None


def _is_in_upstream(builder: Builder, origin: Commit) -> bool:
    """Return True if upstream contains the whole patch: its reverse applies, with each hunk in the right place."""
    diff = builder.diff_of(origin.id, origin.parent)
    back = replace(origin, id=origin.parent, parents=(origin.id,), diff=diff)
    without = apply_by_context(builder, _with_new_names(builder.git, back, builder.tree))
    return without is not None and not any(f.wrong for f in check_hunks(builder.git, back, builder.tree, without))


# --- the placement check, fed from git ----------------------------------------------------------------------------


def check_hunks(git: Git, origin: Commit, onto: str, result: str) -> tuple[HunkPlacement, ...]:
    """Check where every hunk landed. `onto` and `result` are the trees before and after the patch.

    Hunks that upstream already contains are left out.
    """
    placements: list[HunkPlacement] = []
    names = _new_names(git, origin, onto)
    for file in (file for file in parse_diff(origin.diff) if file.hunks):
        there = names[file.path]
        places = ((origin.parent, file.path), (origin.id, file.path), (onto, there), (result, there))
        base, patched, now, after = read_files(git, *((f"{tree}:{path}", path) for tree, path in places))
        moved = map_lines(git, base, now)
        pieces = [piece for piece in pieces_of(file) if not _is_applied(piece, patched, now, moved)]
        placements += check_placement(base, patched, now, after, pieces, moved)
    return tuple(placements)


def _is_applied(piece: Piece, patched: SourceFile, now: SourceFile, moved: LineMap) -> bool:
    """Return True if upstream already has the lines that the hunk produces, in its place."""
    region = moved.map_range(piece.start, piece.start + len(piece.before))
    return now.keys[region.start : region.stop] == patched.keys[piece.made : piece.made + len(piece.after)]


def _new_names(git: Git, origin: Commit, onto: str) -> dict[str, str]:
    """Map each path of a patch to its path in the other upstream; renames are followed."""
    names = {file.path: file.path for file in parse_diff(origin.diff)}
    if not set(names) <= git.paths(onto):
        names.update({path: name for path, name in git.renamed(origin.parent, onto).items() if path in names})
    return names


def _with_new_names(git: Git, origin: Commit, onto: str) -> bytes:
    """Return the diff of a patch with the paths of the other upstream."""
    names = _new_names(git, origin, onto)
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


def review_resolution(builder: Builder, origin: Commit, tree: str) -> tuple[str, ...]:
    """Return notes on a user's resolution of a patch on builder.tree, whose result is `tree`.

    A note names each hunk that is still in a place reported as wrong, and each file that the patch did not change.
    """
    git, onto = builder.git, builder.tree
    left = [placement for placement in check_hunks(git, origin, onto, tree) if placement.wrong not in ("", UNTOLD)]
    more = set(git.changed(onto, tree)) - set(_new_names(git, origin, onto).values())
    notes = [f"{placement.piece.hunk.path}: as it was left, though {placement.wrong}" for placement in left]
    return (*notes, *(f"{path}: the resolution changes it, the patch did not" for path in sorted(more)))


def read_files(git: Git, *files: tuple[str, str]) -> list[SourceFile]:
    """Read files, each given as git object name and path. A missing file is empty."""
    found = git.blobs(*(name for name, _path in files))
    return [_cached_source(text, path, blob) for (blob, text), (_name, path) in zip(found, files, strict=True)]


_cached_source = functools.lru_cache(32)(SourceFile)  # the next patch of the series often reads the same file


def map_lines(git: Git, old: SourceFile, new: SourceFile) -> LineMap:
    """Map the lines of one file to another with git diff; lines that were only re-aligned match."""
    if old.text == new.text:
        return LineMap(())
    blobs = (side.blob or git.line("hash-object", "-w", "--stdin", input=side.text) for side in (old, new))
    return LineMap(hunks_of(git.raw("diff", "--text", *MAP_FLAGS, *blobs))).with_keys(old.keys, new.keys)


_MOST = 40  # lines of upstream to show for a failed hunk


def add_context(git: Git, origin: Commit, onto: str, hunk: FailedHunk) -> FailedHunk:
    """Return the failed hunk with the lines it expects, the lines it wants and the lines of upstream."""
    names = _new_names(git, origin, onto)
    files = (file for file in parse_diff(origin.diff) if hunk.path in (file.path, names[file.path]))
    piece = next((p for file in files for p in pieces_of(file) if p.hunk.number == hunk.number), None)
    if piece is None:
        return hunk
    path, name, reason = piece.hunk.path, names[piece.hunk.path], hunk.reason
    places = ((origin.parent, path), (onto, name))
    old, new = read_files(git, *((f"{tree}:{file}", file) for tree, file in places))
    region = map_lines(git, old, new).map_range(piece.start, piece.start + len(piece.before))
    found = new.lines[region.start : region.stop][:_MOST]
    if gone := _new_location(git, piece.before, *places):
        reason += f"; a line of it is in {gone} now"
    expected, wanted, there = (_decoded(lines) for lines in (piece.before, piece.after, found))
    return replace(hunk, path=name, reason=reason, expected=expected, wanted=wanted, found=there)


_TELLING = 16  # minimum length of a line that is rare enough to search for


def _new_location(git: Git, lines: Sequence[bytes], old: tuple[str, str], new: tuple[str, str]) -> str:
    """Return where the longest of `lines` is now ("path:line"), or "" if no other file or several files have it.

    `old` is the tree and path of the lines before; `new` is where they should be.
    """
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


def _decoded(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", "replace").rstrip("\r\n") for line in lines)
