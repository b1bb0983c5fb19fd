"""Check that each hunk of a patch was applied at the right place of another version of its file. Git is not run.

A patch with one line of context still applies after months of changes in upstream. But it can be applied at a wrong
place, because two functions may be similar. Two checks find such a hunk:

- The line map is made from a line diff of the old file and the new file. The line map has the new number of each
  context line and each removed line of the hunk. If such a line still exists, the hunk must be applied at that line. In
  a C file, a line counts as the same line if only its white space differs.
- The function around the hunk in the new file must be the function around the hunk in the old file. The two functions
  are the same if the line map maps the first line of one to the first line of the other. They are also the same if
  upstream moved the function and both first lines are equal.
  If the function still exists, the hunk must stay in this original, also if upstream made a copy of the function. A
  diff can mistake the copy for the original if the copy is more similar. There is one exception: if the original is now
  much shorter, its lines were moved to the function that has the hunk now.

If upstream rewrote a line that the hunk needs, the line map does not have the line. Then the function must be the same,
and the hunk must fit at exactly one place in the function.

A hunk is also wrong if upstream added the lines of the hunk at another place of the file. Otherwise the lines would
exist twice.
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtool.series.patchfile import Block, Piece
from kvtool.series.source import SourceFile, squeezed, words

Lines = Sequence[bytes]  # lines of a file with their line ends

UNTOLD = "its place is ambiguous: its hunks are out of order there, or only some of them are present"
_HEAD = re.compile(rb"[A-Za-z_$]|\[\[")  # git's rule for the heading of a hunk, and C++ attributes


@dataclass(frozen=True)
class HunkPlacement:
    """Hold the verdict on the place of one hunk."""

    piece: Piece
    wrong: str = ""  # reason why the place is wrong, "" if it is right
    note: str = ""  # remark that the user should read, "" for none


class LineMap:
    """Map the line numbers of an old file to those of a new file.

    The map is made from a line diff, whose blocks are the lines that differ. All lines between two blocks are the same
    in both files.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = sorted(blocks, key=lambda block: (block.old, block.new))

    def with_keys(self, old: Sequence[bytes], new: Sequence[bytes]) -> "LineMap":
        """Return a map that also matches two lines inside of a block if their keys are equal.

        A key is a line in which white space that has no meaning is removed. If both sides of a block have the same
        keys, all of its lines match. Otherwise a key matches only if it occurs once on each side, because equal lines
        such as braces are ambiguous.
        """
        return LineMap([part for block in self.blocks for part in _split_by_keys(block, old, new)])

    def line(self, number: int) -> int | None:
        """Return the number of the same line in the new file, None if it was removed. Lines are counted from 0."""
        shift = 0
        for block in self.blocks:
            if block.old + block.removed <= number:
                shift = block.new + block.added - block.old - block.removed
            elif block.old <= number:
                return None
            else:
                break
        return number + shift

    def inverse(self) -> "LineMap":
        """Return the map from the new file to the old file."""
        return LineMap([Block(block.new, block.added, block.old, block.removed) for block in self.blocks])

    def map_range(self, start: int, stop: int) -> range:
        """Return the lines of the new file that take the place of the lines [start, stop).

        Take the nearest line before and the nearest line after [start, stop) that the new file still has. The result is
        the lines of the new file between these two.
        """
        above, below = range(start - 1, -1, -1), itertools.count(stop)
        before = next((line for number in above if (line := self.line(number)) is not None), -1)
        after = next(line for number in below if (line := self.line(number)) is not None)
        return range(before + 1, after)


def _split_by_keys(block: Block, old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[Block]:
    was = old[block.old : block.old + block.removed]
    now = new[block.new : block.new + block.added]
    pairs = [(n, n) for n in range(len(was))]
    if was != now:
        counts = Counter(was), Counter(now)
        once = [key for key in was if counts[0][key] == counts[1][key] == 1]
        pairs = [(was.index(key), now.index(key)) for key in once]
        if pairs != sorted(pairs, key=lambda pair: pair[1]):  # the lines are in another order now
            pairs = []
    at, there = 0, 0
    for here, place in (*pairs, (len(was), len(now))):
        if here > at or place > there:
            yield Block(block.old + at, here - at, block.new + there, place - there)
        at, there = here + 1, place + 1


def heading_at(lines: Lines, number: int) -> int | None:
    """Return the first line of the function around a line, None if there is no function. Lines are counted from 0."""
    return next((n for n in range(min(number, len(lines) - 1), -1, -1) if _HEAD.match(lines[n])), None)


def find_placements(
    target: Lines, result: Lines, pieces: Sequence[Piece], expected: Sequence[int | None]
) -> list[int] | None:
    """Return the line of `target` at which each hunk was applied, counted from 0.

    Returns None if the hunks cannot be applied so that `result` is the outcome. If several places give the same result,
    the expected place is returned.
    """

    def candidates(piece: Piece, wanted: int | None, i: int, o: int) -> Iterator[int]:
        pairs = zip(itertools.islice(target, i, None), itertools.islice(result, o, None), strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for place in sorted(range(i, i + same + 1), key=lambda place: place != wanted):
            there = o + place - i
            if (
                tuple(target[place : place + len(piece.before)]) == piece.before
                and tuple(result[there : there + len(piece.after)]) == piece.after
            ):
                yield place

    def place(number: int, i: int, o: int) -> list[int] | None:
        if number == len(pieces):
            return [] if list(target[i:]) == list(result[o:]) else None
        piece = pieces[number]
        for at in candidates(piece, expected[number], i, o):
            # the last context lines of a hunk can be the first context lines of the next hunk
            next_i = at + len(piece.before) - piece.trail
            next_o = o + at - i + len(piece.after) - piece.trail
            if (rest := place(number + 1, next_i, next_o)) is not None:
                return [at, *rest]
        return None

    return place(0, 0, 0)


def check_placement(
    base: SourceFile,
    patched: SourceFile,
    target: SourceFile,
    result: SourceFile,
    pieces: Sequence[Piece],
    moved: LineMap,
    added: Collection[bytes] = (),
) -> tuple[HunkPlacement, ...]:
    """Return a verdict on the place of each hunk.

    Lines are compared by their keys, so a line with other white space is the same line.

    base: the file that the patch was made on
    patched: this file with the patch
    target: the new version of the file
    result: the new version with the patch
    pieces: the hunks from `base` to `patched`
    moved: the map of the lines of `base` to `target`
    added: lines, without white space, that do not make a hunk wrong if upstream added them
    """
    stand = [_keyed(piece, base, patched) for piece in pieces]
    expected = [next(iter(_mapped(piece, moved)), None) for piece in stand]
    landed = find_placements(target.keys, result.keys, stand, expected)
    if landed is None:
        return tuple(HunkPlacement(piece, UNTOLD) for piece in pieces)
    known = {squeezed(line) for line in base.lines} | set(added)
    fresh = {squeezed(line): number for number, line in enumerate(target.lines) if squeezed(line) not in known}
    judged = list[HunkPlacement]()
    for piece, keyed, at in zip(pieces, stand, landed, strict=True):
        placement = _note_new_branch(_judge(keyed, at, base, target, moved), at, base, target)
        judged.append(_refuse_duplicate(replace(placement, piece=piece), fresh))
    return tuple(judged)


_DISTINCTIVE = 8  # an equal line is a coincidence if it has fewer characters, not counting white space
_NAME = re.compile(rb"[A-Za-z_]\w{3,}")
_COMMON = frozenset(
    b"""auto bool break case char class const continue default double elif else endif enum extern false float ifdef
    ifndef include inline long None null NULL nullptr pass private protected public return self short size_t static
    struct switch template this throw True False true typedef union unsigned using virtual void while""".split()
)


def _is_telling(line: bytes) -> bool:
    """Return True if it is unlikely that a line is equal by coincidence.

    The line must be long enough, and must have a name that is not a common word of a programming language.
    """
    return len(squeezed(line)) >= _DISTINCTIVE and any(name not in _COMMON for name in _NAME.findall(line))


def _refuse_duplicate(placement: HunkPlacement, fresh: Mapping[bytes, int]) -> HunkPlacement:
    """Return the placement as wrong if upstream itself now has the lines that the hunk inserts.

    fresh: lines that upstream added to the file, without white space, and their numbers
    """
    if placement.wrong:
        return placement
    piece = placement.piece
    before = {squeezed(line) for line in piece.before}
    mine = {squeezed(line) for line in words(piece.after)} - before
    twice = mine & set(fresh)
    if not twice:
        return placement
    number = min(fresh[line] for line in twice)
    if twice == mine:
        return replace(placement, wrong=f"upstream has added the same lines itself, in line {number + 1}")
    if any(_is_telling(line) for line in words(piece.after) if squeezed(line) in twice):
        return replace(placement, wrong=f"upstream has added some of the same lines itself, in line {number + 1}")
    note = f"look at it: upstream has added some of the same lines, in line {number + 1}"
    return placement if placement.note else replace(placement, note=note)


def _keyed(piece: Piece, base: SourceFile, patched: SourceFile) -> Piece:
    """Return the hunk with the keys of its lines instead of the lines.

    The keys are computed from the whole file. The lines of the hunk alone would not be enough, because a string can
    begin in an earlier line.
    """
    before = base.keys[piece.start : piece.start + len(piece.before)]
    after = patched.keys[piece.made : piece.made + len(piece.after)]
    return replace(piece, before=tuple(before), after=tuple(after))


def _mapped(piece: Piece, moved: LineMap) -> list[int]:
    """Compute the line of the new file at which the hunk begins, from each old line of the hunk that still exists.

    Return all results. They are different if upstream separated the lines of the hunk.
    """
    lines = (moved.line(piece.start + offset) for offset in range(len(piece.before)))
    return [line - offset for offset, line in enumerate(lines) if line is not None]


def _judge(piece: Piece, at: int, old: SourceFile, new: SourceFile, moved: LineMap) -> HunkPlacement:
    base, target = old.keys, new.keys
    within, into = old.function_at(piece.start), new.function_at(at)
    lead = piece.lead  # the inserted lines follow these context lines
    if lead and (where := new.disabled(at + lead)) and not old.disabled(piece.start + lead):
        return HunkPlacement(piece, f"it landed in line {at + 1}, which upstream put into {where}")
    block = _wrong_block(piece, at, old, new, within, into)
    wrong_block = block and f"it landed in line {at + 1}; {block}"
    if within and into and _is_untouched(base, target, within, into, moved, at - piece.start):
        return HunkPlacement(piece, wrong_block)
    was, now = heading_at(base, piece.start), heading_at(target, at)
    here = f"it landed in line {at + 1}, {_name(target, now)}"
    known = _mapped(piece, moved)
    if any(line != at for line in known):
        want = known[0]
        there = f"it belongs in line {want + 1}, {_name(target, heading_at(target, want))}"
        return HunkPlacement(piece, f"{here}; {there}")
    if within and into and (why := _wrong_function(piece, old, new, within, into, moved)):
        return HunkPlacement(piece, f"it landed in line {at + 1}, {_name(target, into.start)}; {why}")
    if lead and new.is_body(at + lead - 1) and not old.is_body(piece.start + lead - 1):
        return HunkPlacement(
            piece, f"it landed in line {at + 1}; upstream added an if or a loop without braces above it"
        )
    if wrong_block:
        return HunkPlacement(piece, wrong_block)
    same = _same_function(base, target, was, now, moved)
    if (
        within and into and moved.line(within.start) not in (None, into.start)
    ):  # upstream moved the lines out of a function
        same, was, now = False, within.start, into.start
    if len(known) == len(piece.before) and known:
        # every line is mapped to this place; upstream may have added a label, or the first line of a new function
        kept = moved.line(was) if was is not None else -1
        if same or (kept is not None and kept <= at):
            note = "" if same else f"recorded in {_text(base, was)!r}, landed in {_text(target, now)!r}"
            return HunkPlacement(piece, note=note)
    belongs = f"it belongs {_name(base, was)}, where upstream rewrote its lines"
    if not known and (other := _mapped_back(piece, at, moved)):
        return HunkPlacement(piece, f"{here}, which was line {other[0] + 1}; {belongs}")
    if not same:
        return HunkPlacement(piece, f"{here}; {belongs}")
    # the last lines of the hunk can be the first lines of the next function
    if (count := _count(target, piece.before, _section(target, at))) > 1:
        return HunkPlacement(piece, f"{here}; upstream rewrote its lines, and it fits at {count} places there")
    return HunkPlacement(piece)


def _is_untouched(base: Lines, target: Lines, was: range, now: range, moved: LineMap, shift: int) -> bool:
    """Return True if a function is unchanged and was only moved by `shift` lines.

    Only the first line of the function is searched in the map `moved`. For its other lines, the map may refer to a copy
    of the function, so the texts are compared.
    """
    stands = moved.line(was.start) == now.start == was.start + shift
    return stands and base[was.start : was.stop] == target[now.start : now.stop]


_AROUND = 3  # with this many lines around them, two places of a function count as similar


def _wrong_function(piece: Piece, old: SourceFile, new: SourceFile, was: range, now: range, moved: LineMap) -> str:
    """Return the reason why the hunk is in the wrong function, "" if the function may be right."""
    base, target = old.keys, new.keys
    head, kept = base[was.start].strip(), moved.line(was.start)
    if kept == now.start or (kept is None and target[now.start].strip() == head):
        return ""
    if kept is None:
        others = {moved.line(n) for n, line in enumerate(base) if line.strip() == head}
        kept = next((n for n, line in enumerate(target) if line.strip() == head and n not in others), None)
    there = new.function_at(kept) if kept is not None else None
    # if the old function is now much shorter, upstream may have moved its code, with the hunk, into another function
    if there and 2 * len(there) >= len(was):
        return f"it belongs {_name(base, was.start)}, which is in line {there.start + 1}"
    above, below = piece.start - _AROUND, piece.start + len(piece.before) + _AROUND
    lines = base[max(was.start + 1, above) : min(was.stop, below)]
    if _count(target, lines, range(len(target))) > max(_count(base, lines, range(len(base))), 1):
        return f"upstream has several versions of {_name(base, was.start)[3:]} now, with the same lines in each"
    return ""


def _wrong_block(
    piece: Piece, at: int, old: SourceFile, new: SourceFile, within: range | None, into: range | None
) -> str:
    """Return the reason why the hunk is in the wrong block or #if branch, "" if the place may be right.

    A block is a case, a lambda or a nested struct. The place is wrong if the first line of the old block occurs exactly
    once in both files, but the new place is not in such a block.

    A block of a function is searched for only in that function. In a file that is not C, it is searched for in the
    section that starts in the first column. _wrong_function() checks the function itself. If several blocks have the
    same first line, the next line is compared, too.
    """
    whole = range(len(old.keys)), range(len(new.keys))
    inner = (within[1:], into[1:]) if within and into else whole
    if not old.is_code:
        within = _section(old.keys, piece.start)
        inner = within, _section(new.keys, at)
    around = new.enclosing_headers(at)
    for n, length in itertools.product(old.enclosing_headers(piece.start), (1, 2)):
        was, now = inner if within and n in within else whole
        head = old.block_openings[n][:length]
        there = [k for k in new.lines_by_header.get(head, ()) if k in now]
        once = sum(k in was for k in old.lines_by_header[head]) == len(there) == 1
        if not once or n not in was or there[0] in around:
            continue
        own = {line.strip() for line in old.keys[n + 1 : piece.start + len(piece.before)]}
        if length == 2 and any(new.block_openings[k][0] == head[0] and new.block_openings[k][1] in own for k in around):
            continue  # upstream divided the block, and the second block begins with one of its lines
        said = " with ".join(repr(_text(head, k)) for k in range(length))
        return f"it belongs in {said}, which is in line {there[0] + 1}"
    branches = new.branches(at + piece.lead)
    for n, says in old.branches(piece.start + piece.lead).items():
        was, now = inner if within and n in within else whole
        there = [k for k in now if new.every_branch.get(k) == says]
        if sum(old.every_branch.get(k) == says for k in was) == len(there) == 1 and there[0] not in branches:
            return f"it belongs in {_text([says], 0)!r}, which is in line {there[0] + 1}"
    return ""


def _section(lines: Lines, number: int) -> range:
    """Return the section around a line.

    It reaches from a line that starts in the first column to the next such line.
    """
    start = heading_at(lines, number) or 0
    return range(start, next((n for n in range(start + 1, len(lines)) if _HEAD.match(lines[n])), len(lines)))


def _note_new_branch(placement: HunkPlacement, at: int, base: SourceFile, target: SourceFile) -> HunkPlacement:
    """Add a note if the hunk is now in an #if branch in which it was not before.

    Perhaps another branch needs the hunk, too, or the condition has changed.
    """
    piece = placement.piece
    was = base.branches(piece.start + piece.lead).values()
    more = [says for says in target.branches(at + piece.lead).values() if says not in was]
    if not more or placement.wrong or placement.note:
        return placement
    return replace(placement, note=f"look at it: its place is in {_text(more, -1)!r} now")


def _mapped_back(piece: Piece, at: int, moved: LineMap) -> list[int]:
    """Return the numbers that the old file has for the lines at which the hunk was applied.

    Lines without letters and digits, and lines that the old file does not have, are left out.
    """
    back = moved.inverse()
    was = (back.line(n) for n, line in enumerate(piece.before, at) if words([line]))
    return [line for line in was if line is not None]


def _count(lines: Lines, part: Lines, starts: range) -> int:
    """Return how often the lines `part` occur in a file. Only places that begin at a line in `starts` count."""
    wanted = list(part)
    return sum(lines[n : n + len(wanted)] == wanted for n in starts)


def _same_function(base: Lines, target: Lines, was: int | None, now: int | None, moved: LineMap) -> bool:
    if was is None or now is None:
        return was is now
    if (kept := moved.line(was)) is not None:
        return kept == now
    return now in moved.map_range(was, was + 1) or base[was].strip() == target[now].strip()


def _text(lines: Lines, at: int | None) -> str:
    text = lines[at].decode("utf-8", "replace") if at is not None else ""
    return text.replace("\0", " ").replace("\1", "\t").strip()  # a key has these characters instead of white space


def _name(lines: Lines, at: int | None) -> str:
    return f"in {_text(lines, at)!r}" if at is not None else "above the first function"
