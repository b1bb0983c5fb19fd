"""Find the cause of a hunk's conflict, and a diff between the lines it expects and upstream's lines. Runs no git."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtool.replay.apply import FailedHunk
from kvtool.series.patchfile import Piece
from kvtool.series.placement import LineMap
from kvtool.series.source import SourceFile, squeezed

CONTEXT = 3  # lines around a difference
_MOST = 40  # lines of upstream worth keeping for a report
_WORD = re.compile(rb"[A-Za-z_]\w*|\d[\w.]*|\S")
_MapLines = Callable[[SourceFile, SourceFile], LineMap]


def add_cause(
    hunk: FailedHunk, piece: Piece, old: SourceFile, new: SourceFile, map_lines: _MapLines, moved_to: str
) -> FailedHunk:
    """Return the failed hunk with its lines, its cause and a diff.

    old, new: the file that the patch was made on, and upstream's file
    moved_to: where upstream has the lines now ("path:line"), "" if that is unknown
    """
    region = map_lines(old, new).map_range(piece.start, piece.start + len(piece.before))
    cause, reason = hunk.cause, hunk.reason
    if not cause:
        cause, reason, region = _cause(piece, old, new, region, map_lines, moved_to)
    found = new.lines[region.start : region.stop]
    # A diff does not show line ends or trailing white space, so the cause names them.
    shown = () if cause == "line ends" or (not new.lines and not found) else _diff(piece, old, new, region)
    expected, wanted, there = (_decoded(lines) for lines in (piece.before, piece.after, found[:_MOST]))
    return replace(hunk, cause=cause, reason=reason, expected=expected, wanted=wanted, found=there, diff=shown)


def _cause(
    piece: Piece, old: SourceFile, new: SourceFile, region: range, map_lines: _MapLines, moved_to: str
) -> tuple[str, str, range]:
    """Return the cause, a sentence about it, and the lines of upstream's file that it is about."""
    if not new.lines:
        there = f"; one of the lines is in {moved_to} now" if moved_to else ""
        return "deleted lines", f"upstream has no such file any more{there}", region
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
    if mine & theirs and any(len(line) > 4 for line in mine & theirs):
        return "already upstream", "upstream already has a part of the lines that the patch adds", region
    missing = [line for line in piece.before if squeezed(line) and squeezed(line) not in theirs]
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


def _unix(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n")


def _blank(text: bytes) -> bytes:
    return re.sub(rb"[ \t\r\f\v]+", b"", text)


def _equal_after(
    normalize: Callable[[bytes], bytes], piece: Piece, old: SourceFile, new: SourceFile, map_lines: _MapLines
) -> range | None:
    """Return the lines of upstream's file that equal the hunk's lines once both are normalized, None if none do."""
    sides = [SourceFile(normalize(side.text), "", "") for side in (old, new)]
    region = map_lines(*sides).map_range(piece.start, piece.start + len(piece.before))
    wanted = [normalize(line) for line in piece.before]
    there = sides[1].lines[region.start : region.stop]
    return region if there == wanted and list(piece.before) != new.lines[region.start : region.stop] else None


def _renamed(missing: Sequence[bytes], found: Sequence[bytes]) -> dict[str, str]:
    """Return the new name of each renamed identifier if renames alone turn the missing lines into upstream's lines."""
    names: dict[bytes, bytes] = {}
    for line in missing:
        before = _WORD.findall(line)
        for other in found:
            after = _WORD.findall(other)
            pairs = {(a, b) for a, b in zip(before, after, strict=False) if a != b}
            if len(before) != len(after) or not pairs or 2 * len(pairs) > len(before):
                continue
            known = {**names, **dict(pairs)}
            if len(dict(pairs)) == len(pairs) and all(
                re.fullmatch(rb"[A-Za-z_]\w*", a + b) and names.get(a, b) == b for a, b in pairs
            ):
                names = known
                break
        else:
            return {}
    text = {old.decode("utf-8", "replace"): new.decode("utf-8", "replace") for old, new in names.items()}
    return text if len(text) <= CONTEXT else {}


def _diff(piece: Piece, old: SourceFile, new: SourceFile, region: range) -> tuple[str, ...]:
    """Return a diff from the lines that the patch expects to upstream's lines, with a few lines of context."""
    start, stop = piece.start, piece.start + len(piece.before)
    before = old.lines[max(start - CONTEXT, 0) : stop + CONTEXT]
    after = new.lines[max(region.start - CONTEXT, 0) : region.stop + CONTEXT]
    rows = list(difflib.unified_diff(_decoded(before), _decoded(after), n=CONTEXT, lineterm=""))[2:]
    return tuple(row for row in rows if not row.startswith("@@"))


def _decoded(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", "replace").rstrip("\r\n") for line in lines)
