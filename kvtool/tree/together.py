"""Move a whole series at once, where no hunk leaves anything to decide.

move.py asks git six times for each patch. Most patches need none of it: upstream touched none of the lines that their
hunks stand on. Here the two upstreams are compared once, by the diff that the merge uses, and every line of a touched
file gets a number that both share where the line is the same. A hunk is taken only if each answer that move.py would
get is plain from that:

- the merge is clean and has one place: all lines of the hunk, context on both sides included, are still there and still
  neighbours;
- the function is the same: the line that heads it is that very line;
- the plain patch lands there too: no place where the hunk would fit is nearer to the line that it names.

One git process then writes all commits, and another one shows what the patches are there: each hunk must again be in
the function it was recorded in. Any doubt about any hunk gives None, and move.py decides about every patch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtool.gitcmd import Git
from kvtool.tree import fastimport
from kvtool.tree.exact import plain_index
from kvtool.tree.mailbox import FileDiff, parse_diff
from kvtool.tree.move import MAP_FLAGS, Origin, changes, headings
from kvtool.tree.placement import LineMap, Lines, Piece, heading_at, pieces_of, split_lines
from kvtool.tree.series import NewFile, Step


@dataclass(frozen=True)
class Together:
    """The new chain. head, tree: its end; moved: each patch that is wanted there, as a commit with its diff."""

    head: str
    tree: str
    moved: Mapping[str, Origin]


def move_all(
    git: Git,
    old: str,
    new: str,
    files: Sequence[NewFile],
    subject: str,
    steps: Sequence[Step],
    origins: Mapping[str, Origin],
) -> Together | None:
    """Bring the wanted patches of `steps` from the upstream `old` onto `new`, behind a commit of `files`.

    None where that is not plain; objects that nothing refers to may then be left. origins: the patches on `old`, in
    their order, those that `new` does not want included.
    """
    wanted = {step.patch.id: step.mail for step in steps if step.wanted}
    diffs = {name: parse_diff(origin.diff) for name, origin in origins.items()}
    if not wanted or not wanted.keys() <= diffs.keys() or [n for n in diffs if n in wanted] != list(wanted):
        return None
    touched = list(dict.fromkeys(file.path for name in wanted for file in diffs[name]))
    paths = [*touched, *(file.path for file in files)]
    if not fastimport.is_plain(list(wanted.values()), paths) or not fastimport.are_new(git, new, files):
        return None
    pairs = _compared(git, old, new, touched)
    if pairs is None:
        return None
    commits = [fastimport.new_files(files, subject)] if files else []
    for name, parts in diffs.items():
        changed: list[bytes] = []
        for part in parts:
            if part.path not in pairs:  # only patches that are not wanted touch it
                continue
            index, pair = plain_index(part), pairs[part.path]
            if index is None or not part.hunks or not pair.take(part, both=name in wanted):
                return None
            changed.append(fastimport.modify(index[2].decode(), part.path, b"".join(pair.new.text)))
        if name in wanted:
            commits.append(fastimport.commit_of(wanted[name], changed))
    made = fastimport.write(git, new, commits, bool(files))
    there = changes(git, new, made.head)
    moved = {name: there[commit] for name, commit in zip(wanted, made.commits[1:], strict=True)}
    if any(headings(moved[name].diff) != headings(origins[name].diff) for name in wanted):
        return None
    return Together(made.head, made.tree, moved)


def _compared(git: Git, old: str, new: str, paths: Sequence[str]) -> dict[str, _Pair] | None:
    """Each file in both upstreams; None when one has no such file, or its mode or more than its lines changed."""
    before, after = git.blobs(old, paths), git.blobs(new, paths)
    if before is None or after is None:
        return None
    done = git.run("diff", *MAP_FLAGS, old, new, "--", *(f":(literal){path}" for path in paths))
    parts = {part.path: part for part in parse_diff(done.stdout.encode("utf-8", "surrogateescape"))}
    pairs: dict[str, _Pair] = {}
    for path in paths:
        part = parts.get(path)
        if part is not None and plain_index(part) is None:
            return None
        pair = _pair(split_lines(before[path]), split_lines(after[path]), LineMap.of(part))
        if pair is None:
            return None
        pairs[path] = pair
    return pairs


@dataclass
class _Side:
    """A file as lines, each with a number. The two sides of a pair give a line the same number where it is the same."""

    text: list[bytes]
    ids: list[int]

    def put(self, at: int, piece: Piece, fresh: Sequence[int]) -> None:
        """Apply a hunk at a line. Its context keeps its numbers; what is between becomes `fresh`."""
        end = at + len(piece.before)
        self.text[at:end] = piece.after
        self.ids[at + piece.lead : end - piece.trail] = fresh


class _Pair:
    """One file of the old upstream and of the new one, as the patches so far made them."""

    def __init__(self, old: _Side, new: _Side, fresh: itertools.count[int]) -> None:
        self.old, self.new, self._fresh = old, new, fresh

    def take(self, file: FileDiff, *, both: bool) -> bool:
        """Apply the hunks of a patch to the old side, and to the new one as well; False when that is not plain."""
        shift = free = 0
        for piece in pieces_of(file):
            at = piece.start + shift
            shift += len(piece.after) - len(piece.before)
            if not _stands(piece, at, self.old.text):
                return False
            place = self._place(piece, at) if both else None
            fresh = list(itertools.islice(self._fresh, len(piece.after) - piece.lead - piece.trail))
            if both:
                if place is None or place < free:
                    return False
                self.new.put(place, piece, fresh)
                free = place + len(piece.after)
            self.old.put(at, piece, fresh)
        return True

    def _place(self, piece: Piece, at: int) -> int | None:
        """Where the hunk that stands at a line of the old side belongs in the new one; None when there is a doubt."""
        stood = self.old.ids[at : at + len(piece.before)]
        if stood[0] not in self.new.ids:
            return None
        place = self.new.ids.index(stood[0])
        if self.new.ids[place : place + len(stood)] != stood or nearest(self.new.text, piece.before, at) != place:
            return None
        was, now = heading_at(self.old.text, at), heading_at(self.new.text, place)
        if was is None or now is None:
            return place if was is now else None
        return place if self.old.ids[was] == self.new.ids[now] else None


def _pair(old: list[bytes], new: list[bytes], moved: LineMap) -> _Pair | None:
    """None when the map is not about these lines (git took a file for a binary one)."""
    fresh = itertools.count(len(old))
    ids = list(itertools.islice(fresh, len(new)))
    for start, stop, there in moved.kept(len(old)):
        if old[start:stop] != new[there : there + stop - start]:
            return None
        ids[there : there + stop - start] = range(start, stop)
    return _Pair(_Side(old, list(range(len(old)))), _Side(new, ids), fresh)


def _stands(piece: Piece, at: int, lines: Lines) -> bool:
    """Whether the hunk is at this line, not at an end of the file: there git ties it to that end."""
    here = tuple(lines[at : at + len(piece.before)]) == piece.before
    return here and piece.start > 0 and piece.lead > 0 and piece.trail > 0


def nearest(lines: Lines, wanted: Sequence[bytes], start: int) -> int | None:
    """The place of `wanted` that git apply finds from line `start` on: line by line away from it, forwards first."""
    first, size = wanted[0], len(wanted)
    for distance in range(max(start, len(lines) - start) + 1):
        for place in (start + distance, start - distance):
            inside = 0 <= place < len(lines) and lines[place] == first
            if inside and list(lines[place : place + size]) == list(wanted):
                return place
    return None
