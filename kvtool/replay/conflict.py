"""Find why a hunk does not apply, and compare the lines that it expects with upstream's lines. Git is not run."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvtool.replay.apply import FailedHunk
from kvtool.series.patchfile import Piece
from kvtool.series.placement import LineMap
from kvtool.series.source import SourceFile, squeezed

CONTEXT = 3  # lines of context around a difference
_MOST = 40  # most lines of upstream that are kept for a report
_WORD = re.compile(rb"[A-Za-z_]\w*|\d[\w.]*|\S")
_MapLines = Callable[[SourceFile, SourceFile], LineMap]


def add_cause(
    hunk: FailedHunk,
    piece: Piece,
    old: SourceFile,
    new: SourceFile,
    map_lines: _MapLines,
    moved_to: str,
    moved: str = "",
) -> FailedHunk:
    """Return the failed hunk with the cause of its conflict, the lines of both sides, and a diff of the sides.

    piece: the part of the hunk that conflicts
    old: the file that the patch was made on
    new: upstream's file
    moved_to: where upstream has the lines now, as "path:line"; "" if that is unknown
    moved: the first line of the function, if the whole function moved there; "" if only a line of the hunk moved
    """
    region = map_lines(old, new).map_range(piece.start, piece.start + len(piece.before))
    cause, reason = hunk.cause, hunk.reason
    if not cause:
        cause, reason, region = _cause(piece, old, new, region, map_lines, moved_to, moved)
    found = new.lines[region.start : region.stop]
    # a diff does not show different line ends and white space at the end, so the cause names them
    shown = () if cause == "line ends" or (not new.lines and not found) else _diff(piece, old, new, region)
    expected, wanted, there = (_decoded(lines) for lines in (piece.before, piece.after, found[:_MOST]))
    return replace(hunk, cause=cause, reason=reason, expected=expected, wanted=wanted, found=there, diff=shown)


def _cause(
    piece: Piece,
    old: SourceFile,
    new: SourceFile,
    region: range,
    map_lines: _MapLines,
    moved_to: str,
    moved: str,
) -> tuple[str, str, range]:
    """Return the cause of a conflict, a sentence that explains the cause, and the upstream lines in conflict.

    The upstream lines are a range of line indexes in upstream's file.
    """
    if not new.lines:
        there = f"; {moved or 'a line of it'} is in {moved_to} now" if moved_to else ""
        return "deleted lines", f"upstream has no such file any more{there}", region
    if (place := _equal_after(_ended, piece, old, new, map_lines)) is not None:
        what = "ends the last line of the file now" if new.text.endswith(b"\n") else "no longer ends the last line"
        return "line ends", f"upstream {what}", place
    if (place := _equal_after(_unix, piece, old, new, map_lines)) is not None:
        ends = "CR LF" if b"\r\n" in new.text else "LF"
        return "line ends", f"upstream's lines end in {ends} now, the patch's lines do not", place
    found = new.lines[region.start : region.stop]
    mine = {squeezed(line) for line in piece.after} - {squeezed(line) for line in piece.before} - {b""}
    theirs = {squeezed(line) for line in found}
    if mine and mine <= theirs:
        return "already upstream", "upstream already has the lines that the patch adds", region
    if (place := _equal_after(_blank, piece, old, new, map_lines)) is not None:
        return "white space", "upstream changed only the white space of the lines", place
    # leave out lines that the old file already had, because upstream did not add them
    known = {squeezed(line) for line in old.lines}
    if any(len(line) > 4 for line in mine & theirs - known):
        return "already upstream", "upstream already has a part of the lines that the patch adds", region
    missing = [line for line in piece.before if squeezed(line) and squeezed(line) not in theirs]
    if moved:
        return "moved lines", f"upstream moved {moved} to {moved_to}", region
    if names := _renamed(missing, found):
        return "renamed identifier", f"upstream renamed {' and '.join(f'{a} to {b}' for a, b in names.items())}", region
    if moved_to:
        return "moved lines", f"upstream moved a line of it to {moved_to}", region
    if missing and theirs <= {squeezed(line) for line in piece.before} | {b""}:
        count = "a line" if len(missing) == 1 else f"{len(missing)} lines"
        return "deleted lines", f"upstream removed {count} that the patch expects", region
    if not missing:
        return "inserted lines", "upstream inserted lines at the same place", region
    return "changed lines", "upstream changed the same lines", region


def _ended(text: bytes) -> bytes:
    return text if text.endswith(b"\n") or not text else text + b"\n"


def _unix(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n")


def _blank(text: bytes) -> bytes:
    return re.sub(rb"[ \t\r\f\v]+", b"", text)


def _equal_after(
    normalize: Callable[[bytes], bytes], piece: Piece, old: SourceFile, new: SourceFile, map_lines: _MapLines
) -> range | None:
    """Return the lines of upstream's file that are equal to the hunk's lines after both are normalized.

    Returns None if they are not equal, or if they were equal without normalizing.
    """
    sides = [SourceFile(normalize(side.text), "", "") for side in (old, new)]
    region = map_lines(*sides).map_range(piece.start, piece.start + len(piece.before))
    wanted = [normalize(line) for line in piece.before]
    there = sides[1].lines[region.start : region.stop]
    return region if there == wanted and list(piece.before) != new.lines[region.start : region.stop] else None


def _renamed(missing: Sequence[bytes], found: Sequence[bytes]) -> dict[str, str]:
    """Return the new name of each renamed identifier.

    Returns an empty dict unless each missing line becomes a line of upstream by renaming identifiers only.
    """
    names: dict[bytes, bytes] = {}
    for line in missing:
        fitting = [pairs for other in found if (pairs := _identifier_changes(line, other, names))]
        if not fitting:
            return {}
        names |= sorted(fitting, key=len)[0]
    text = {old.decode("utf-8", "replace"): new.decode("utf-8", "replace") for old, new in names.items()}
    is_order = set(names) & set(names.values())  # if old and new names overlap, names were exchanged and not renamed
    return text if len(text) <= CONTEXT and not is_order else {}


def _identifier_changes(line: bytes, other: bytes, known: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the identifiers that differ between two lines, with their new names.

    Returns nothing if the lines differ in anything else, or if `known` has another new name for an identifier.
    """
    before, after = _WORD.findall(line), _WORD.findall(other)
    pairs = {(a, b) for a, b in zip(before, after, strict=False) if a != b}
    if len(before) != len(after) or 2 * len(pairs) > len(before) or len(dict(pairs)) != len(pairs):
        return {}
    is_renamed = all(re.fullmatch(rb"[A-Za-z_]\w*", a + b) and known.get(a, b) == b for a, b in pairs)
    return dict(pairs) if is_renamed else {}


def _nearest(piece: Piece, new: SourceFile, region: range) -> range:
    """Return the lines of a region of upstream's file that share the most words with the hunk.

    A small region is returned unchanged.
    """
    size = len(piece.before)
    if len(region) <= 3 * size + _MOST:
        return region
    wanted = {word for line in piece.before for word in _WORD.findall(line) if len(word) > 1}
    hits = [len(wanted & set(_WORD.findall(new.lines[n]))) for n in region]
    sums = [sum(hits[n : n + size]) for n in range(len(hits) - size + 1)]
    start = region.start + sums.index(max(sums))
    return range(start, start + size)


def _diff(piece: Piece, old: SourceFile, new: SourceFile, region: range) -> tuple[str, ...]:
    """Return a diff from the lines that the patch expects to upstream's lines, with three lines of context."""
    start, stop = piece.start, piece.start + len(piece.before)
    region = _nearest(piece, new, region)
    before = old.lines[max(start - CONTEXT, 0) : stop + CONTEXT]
    after = new.lines[max(region.start - CONTEXT, 0) : region.stop + CONTEXT]
    rows = list(difflib.unified_diff(_decoded(before), _decoded(after), n=CONTEXT, lineterm=""))[2:]
    return tuple(row for row in rows if not row.startswith("@@"))


def _decoded(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", "replace").rstrip("\r\n") for line in lines)
