"""Where a hunk belongs in another version of its file, and whether it landed there. Pure.

One line of context finds a place over months of upstream, but not always the right one: a function may have a twin. So
two things are held against the place where a hunk landed:

- the line map: a line diff of the old file and the new one says what became of each of the hunk's context lines and
  removed lines. Each one that is still there must be where the hunk landed. In a file of C a line that was only
  re-aligned is still there.
- the enclosing function: the line that heads it must be the same line by the map, or have been replaced by the one that
  heads it now, or (where upstream moved the whole function) read the same. A function that still stands, or of which
  upstream made two, keeps its hunks: a diff takes a copy for the original where the copy reads more like it. (One that
  is much shorter now has given its lines to the other.)

Where upstream rewrote a line that the hunk stands on, the map says nothing about it: the function must then be the
same, and the hunk must have one place in it only.

Where upstream only put lines in at the place where the hunk puts some in, the hunk belongs behind them, if both are
whole.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvtool.series.patchfile import Block, Piece
from kvtool.series.source import SourceFile, words

Lines = Sequence[bytes]  # with their line ends

UNTOLD = "where it landed cannot be told: its hunks are out of order there, or only part of them is"
_ENTRY = re.compile(rb"\s*/\*\s*\.\w+\s*=\s*\*/")  # which member an entry without a name is of
_HEAD = re.compile(rb"[A-Za-z_$]|\[\[")  # git's rule for the function in a hunk's heading, and attributes


@dataclass(frozen=True)
class Landing:
    """What the check says of a hunk. wrong: why its place is wrong, "" when it is not; note: what is worth a look."""

    piece: Piece
    wrong: str = ""
    note: str = ""


class LineMap:
    """What became of each line of an old file in a new one, from the blocks of a line diff between them: between two of
    them is a line that stayed."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = sorted(blocks, key=lambda block: (block.old, block.new))

    def refined(self, old: Sequence[bytes], new: Sequence[bytes]) -> "LineMap":
        """The same, but lines of a block whose keys are equal are the same line: all of them where the block has only
        such lines, else those that are there once. Which of several braces is which, nobody can tell."""
        return LineMap([part for block in self.blocks for part in _refined(block, old, new)])

    def line(self, number: int) -> int | None:
        """The same line in the new file, None when it is not there any more. 0-based."""
        shift = 0
        for block in self.blocks:
            if block.old + block.removed <= number:
                shift = block.new + block.added - block.old - block.removed
            elif block.old <= number:
                return None
            else:
                break
        return number + shift

    def back(self) -> "LineMap":
        """From the new file to the old one."""
        return LineMap([Block(block.new, block.added, block.old, block.removed) for block in self.blocks])

    def region(self, start: int, stop: int) -> range:
        """What stands in the new file in the place of lines [start, stop): between the nearest lines still there."""
        above, below = range(start - 1, -1, -1), itertools.count(stop)
        before = next((line for number in above if (line := self.line(number)) is not None), -1)
        after = next(line for number in below if (line := self.line(number)) is not None)
        return range(before + 1, after)


def _refined(block: Block, old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[Block]:
    was = old[block.old : block.old + block.removed]
    now = new[block.new : block.new + block.added]
    pairs = [(n, n) for n in range(len(was))]
    if was != now:
        counts = Counter(was), Counter(now)
        once = [key for key in was if counts[0][key] == counts[1][key] == 1]
        pairs = [(was.index(key), now.index(key)) for key in once]
        if pairs != sorted(pairs, key=lambda pair: pair[1]):  # in another order
            pairs = []
    at, there = 0, 0
    for here, place in (*pairs, (len(was), len(now))):
        if here > at or place > there:
            yield Block(block.old + at, here - at, block.new + there, place - there)
        at, there = here + 1, place + 1


def heading_at(lines: Lines, number: int) -> int | None:
    """The line (0-based) that heads the function around line `number`, that one included; None when none does."""
    return next((n for n in range(min(number, len(lines) - 1), -1, -1) if _HEAD.match(lines[n])), None)


def find_landings(
    target: Lines, result: Lines, pieces: Sequence[Piece], expected: Sequence[int | None]
) -> list[int] | None:
    """Where each hunk went, given the file before and after: 0-based lines of `target`. None when it cannot be told.

    Where several places give the same result, the expected one is taken.
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
            # the context behind a hunk may be the context before the next one
            next_i = at + len(piece.before) - piece.trail
            next_o = o + at - i + len(piece.after) - piece.trail
            if (rest := place(number + 1, next_i, next_o)) is not None:
                return [at, *rest]
        return None

    return place(0, 0, 0)


def check(
    base: SourceFile,
    patched: SourceFile,
    target: SourceFile,
    result: SourceFile,
    pieces: Sequence[Piece],
    moved: LineMap,
) -> tuple[Landing, ...]:
    """Whether each hunk of `pieces` (a diff from `base` to `patched`) landed in its place.

    target, result: the new file before and after; moved: what became of base's lines in target. Lines are compared by
    their keys, so that one which was only re-aligned is the same line.
    """
    shared = [_shared(piece, moved) for piece in pieces]
    stand = [_keyed(piece, base, patched, piece.lead if at else 0) for piece, at in zip(pieces, shared, strict=True)]
    expected = [next(iter(_mapped(piece, moved)), None) for piece in stand]
    landed = find_landings(target.keys, result.keys, stand, expected)
    if landed is None:
        return tuple(Landing(piece, UNTOLD) for piece in pieces)
    fresh, judged = target.words - base.words, list[Landing]()
    for piece, keyed, place, at in zip(pieces, stand, shared, landed, strict=True):
        landing = _branched(_judge(keyed, at, base, target, moved), at, base, target)
        judged.append(_again(_look(replace(landing, piece=piece), place, patched, target), fresh))
    return tuple(judged)


def _again(landing: Landing, fresh: set[bytes]) -> Landing:
    """Worth a look where upstream has come to have all that the hunk puts in, at another place of the file."""
    mine = words(landing.piece.after) - words(landing.piece.before)
    if not mine or not mine <= fresh or landing.wrong or landing.note:
        return landing
    return replace(landing, note="look at it: upstream has put in the same lines, at another place")


def _keyed(piece: Piece, base: SourceFile, patched: SourceFile, skip: int) -> Piece:
    """The hunk behind its first `skip` lines, which are context; with the keys of its lines, read where they stand: a
    line alone does not tell what is in a string."""
    before = base.keys[piece.start + skip : piece.start + len(piece.before)]
    after = patched.keys[piece.made + skip : piece.made + len(piece.after)]
    return replace(piece, start=piece.start + skip, before=tuple(before), after=tuple(after), lead=piece.lead - skip)


def _shared(piece: Piece, moved: LineMap) -> range:
    """What upstream put in just where the hunk puts in something, all other lines being as they were; else nothing.

    The hunk then stands behind it, and only what follows says where that is.
    """
    inserts = len(piece.before) == piece.lead + piece.trail and piece.lead and piece.trail
    at = piece.start + piece.lead
    above, below = moved.line(at - 1), moved.line(at)
    if not inserts or above is None or below is None or below == above + 1:
        return range(0)
    return range(above + 1, below)


def _look(landing: Landing, shared: range, patched: SourceFile, target: SourceFile) -> Landing:
    """Where both put something in: wrong unless each is whole and has no line of the other; worth a look."""
    if not shared or landing.wrong:
        return landing
    piece = landing.piece
    mine = range(piece.made + piece.lead, piece.made + len(piece.after) - piece.trail)
    theirs = target.lines[shared.start : shared.stop]
    if words(theirs) & words(patched.lines[mine.start : mine.stop]):
        return replace(landing, wrong="upstream put some of the same lines in at the same place")
    if any(_ENTRY.match(line) for line in (*theirs, *patched.lines[mine.start : mine.stop])):
        why = "both put entries into an initializer that goes by position: they must stand as in what it initializes"
        return replace(landing, wrong=why)
    if not (target.whole(shared.start, shared.stop) and patched.whole(mine.start, mine.stop)):
        return replace(landing, wrong="upstream put in lines at the same place, and one of the two is not whole")
    note = f"merged, look at it: it stands behind {len(theirs)} lines that upstream put in at the same place"
    return replace(landing, note=note)


def _mapped(piece: Piece, moved: LineMap) -> list[int]:
    """For each old line of a hunk that is still there: where the hunk's first line is in the new file, by that line
    alone; its lines may have been torn apart."""
    lines = (moved.line(piece.start + offset) for offset in range(len(piece.before)))
    return [line - offset for offset, line in enumerate(lines) if line is not None]


def _judge(piece: Piece, at: int, old: SourceFile, new: SourceFile, moved: LineMap) -> Landing:
    base, target = old.keys, new.keys
    within, into = old.function_at(piece.start), new.function_at(at)
    lead = piece.lead  # what it puts in stands behind these lines
    if lead and (where := new.disabled(at + lead)) and not old.disabled(piece.start + lead):
        return Landing(piece, f"it landed in line {at + 1}, which upstream put into {where}")
    block = _out_of_its_block(piece, at, old, new, within, into)
    astray = block and f"it landed in line {at + 1}; {block}"
    if within and into and _is_untouched(base, target, within, into, moved, at - piece.start):
        return Landing(piece, astray)
    was, now = heading_at(base, piece.start), heading_at(target, at)
    here = f"it landed in line {at + 1}, {_name(target, now)}"
    known = _mapped(piece, moved)
    if any(line != at for line in known):
        want = known[0]
        there = f"it belongs in line {want + 1}, {_name(target, heading_at(target, want))}"
        return Landing(piece, f"{here}; {there}")
    if within and into and (why := _elsewhere(piece, old, new, within, into, moved)):
        return Landing(piece, f"it landed in line {at + 1}, {_name(target, into.start)}; {why}")
    if lead and new.is_body(at + lead - 1) and not old.is_body(piece.start + lead - 1):
        return Landing(piece, f"it landed in line {at + 1}; upstream put an if or a loop without braces above that")
    if astray:
        return Landing(piece, astray)
    same = _same_function(base, target, was, now, moved)
    if within and into and moved.line(within.start) not in (None, into.start):  # upstream took it out of a function
        same, was, now = False, within.start, into.start
    if len(known) == len(piece.before) and known:
        # every line says so; upstream may have put a label or the head of a split function in between
        kept = moved.line(was) if was is not None else -1
        if same or (kept is not None and kept <= at):
            note = "" if same else f"recorded in {_text(base, was)!r}, landed in {_text(target, now)!r}"
            return Landing(piece, note=note)
    belongs = f"it belongs {_name(base, was)}, where upstream rewrote its lines"
    if not known and (other := _others(piece, at, moved)):
        return Landing(piece, f"{here}, which was line {other[0] + 1}; {belongs}")
    if not same:
        return Landing(piece, f"{here}; {belongs}")
    # its last lines may head the next function
    if (count := _count(target, piece.before, _section(target, at))) > 1:
        return Landing(piece, f"{here}; upstream rewrote its lines and {count} places there would do")
    return Landing(piece)


def _is_untouched(base: Lines, target: Lines, was: range, now: range, moved: LineMap, shift: int) -> bool:
    """Whether a function reads as it did, and stands `shift` lines from where it did.

    What the map says of its lines may be of a copy: they are the same.
    """
    stands = moved.line(was.start) == now.start == was.start + shift
    return stands and base[was.start : was.stop] == target[now.start : now.stop]


_AROUND = 3  # lines that make two places of a function look alike


def _elsewhere(piece: Piece, old: SourceFile, new: SourceFile, was: range, now: range, moved: LineMap) -> str:
    """Why the function in which a hunk landed is not the one it was in, "" where it may be."""
    base, target = old.keys, new.keys
    head, kept = base[was.start].strip(), moved.line(was.start)
    if kept == now.start or (kept is None and target[now.start].strip() == head):
        return ""
    if kept is None:
        others = {moved.line(n) for n, line in enumerate(base) if line.strip() == head}
        kept = next((n for n, line in enumerate(target) if line.strip() == head and n not in others), None)
    there = new.function_at(kept) if kept is not None else None
    if there and 2 * len(there) >= len(was):  # a shorter one may call what it was
        return f"it belongs {_name(base, was.start)}, which stands in line {there.start + 1}"
    above, below = piece.start - _AROUND, piece.start + len(piece.before) + _AROUND
    lines = base[max(was.start + 1, above) : min(was.stop, below)]
    if _count(target, lines, range(len(target))) > max(_count(base, lines, range(len(base))), 1):
        return f"upstream has made more than one of {_name(base, was.start)[3:]}, with the same lines in each"
    return ""


def _out_of_its_block(
    piece: Piece, at: int, old: SourceFile, new: SourceFile, within: range | None, into: range | None
) -> str:
    """Why a block (a case, a lambda, a struct in a class) or a branch of an #if in which a hunk landed is not the one
    it was in, "" where it may be: what heads that is there once in both, and does not head what it is in now. One of a
    function (outside of C, of what begins in the first column) is looked for there; whether that is the right one,
    _elsewhere says. Several blocks with the same head differ in the line behind it."""
    whole = range(len(old.keys)), range(len(new.keys))
    inner = (within[1:], into[1:]) if within and into else whole
    if not old.is_code:
        within = _section(old.keys, piece.start)
        inner = within, _section(new.keys, at)
    around = new.around(at)
    for n, length in itertools.product(old.around(piece.start), (1, 2)):
        was, now = inner if within and n in within else whole
        head = old.openings[n][:length]
        there = [k for k in new.headed.get(head, ()) if k in now]
        once = sum(k in was for k in old.headed[head]) == len(there) == 1
        if not once or n not in was or there[0] in around:
            continue
        own = {line.strip() for line in old.keys[n + 1 : piece.start + len(piece.before)]}
        if length == 2 and any(new.openings[k][0] == head[0] and new.openings[k][1] in own for k in around):
            continue  # upstream made two blocks of it, and the second begins with a line of it
        said = " with ".join(repr(_text(head, k)) for k in range(length))
        return f"it belongs in {said}, which stands in line {there[0] + 1}"
    branches = new.branches(at + piece.lead)
    for n, says in old.branches(piece.start + piece.lead).items():
        was, now = inner if within and n in within else whole
        there = [k for k in now if new.every_branch.get(k) == says]
        if sum(old.every_branch.get(k) == says for k in was) == len(there) == 1 and there[0] not in branches:
            return f"it belongs in {_text([says], 0)!r}, which stands in line {there[0] + 1}"
    return ""


def _section(lines: Lines, number: int) -> range:
    """From the line in the first column above a line to the next one."""
    start = heading_at(lines, number) or 0
    return range(start, next((n for n in range(start + 1, len(lines)) if _HEAD.match(lines[n])), len(lines)))


def _branched(landing: Landing, at: int, base: SourceFile, target: SourceFile) -> Landing:
    """Worth a look where the place is in another branch of an #if than before: a second one may need the hunk as well,
    or the condition has changed."""
    piece = landing.piece
    was = base.branches(piece.start + piece.lead).values()
    more = [says for says in target.branches(at + piece.lead).values() if says not in was]
    if not more or landing.wrong or landing.note:
        return landing
    return replace(landing, note=f"look at it: its place is in {_text(more, -1)!r} now")


def _others(piece: Piece, at: int, moved: LineMap) -> list[int]:
    """Which lines of the old file the lines are that a hunk landed on, of those that say something."""
    back = moved.back()
    was = (back.line(n) for n, line in enumerate(piece.before, at) if words([line]))
    return [line for line in was if line is not None]


def _count(lines: Lines, part: Lines, starts: range) -> int:
    """How many times some lines stand in a file, from one of `starts` on."""
    wanted = list(part)
    return sum(lines[n : n + len(wanted)] == wanted for n in starts)


def _same_function(base: Lines, target: Lines, was: int | None, now: int | None, moved: LineMap) -> bool:
    if was is None or now is None:
        return was is now
    if (kept := moved.line(was)) is not None:
        return kept == now
    return now in moved.region(was, was + 1) or base[was].strip() == target[now].strip()


def _text(lines: Lines, at: int | None) -> str:
    text = lines[at].decode("utf-8", "replace") if at is not None else ""
    return text.replace("\0", " ").replace("\1", "\t").strip()  # what a key hides


def _name(lines: Lines, at: int | None) -> str:
    return f"in {_text(lines, at)!r}" if at is not None else "above the first function"
