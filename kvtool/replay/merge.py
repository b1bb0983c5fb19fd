"""Move one commit of a series from its upstream to another upstream, as git cherry-pick does, and check the result.

1. Hunks that upstream already has are left out, so that no hunk is inserted a second time. Upstream has a hunk if the
   lines after the hunk's change are at the place to which the line map (placement.py) maps the hunk. The lines must be
   equal byte for byte. In a file of C, their white space may differ.
2. A three-way merge (git merge-tree) places the other hunks. The base of the merge is the tree that the patch was made
   on. So the merge finds the place of a hunk by upstream's real changes between this tree and the new upstream. The
   merge follows a renamed file, and a similar function does not mislead it.
3. If the merge has a conflict, or puts a hunk into a wrong place, git apply tries the plain patch with one line of
   context. git apply compares only lines of context, so git apply also works for a function that was moved. But git
   apply uses the nearest place that fits, which may be wrong.

placement.py checks every hunk of the result of step 2 or 3. A hunk in a wrong place is reported as a conflict, with the
wrong and the right place.

Rejected: merging a line that upstream only re-aligned, and two insertions at one place. Over the 18 upstreams of the
lock, and over 34 moves between them, these two rules resolved no conflict. The second rule put a call after a
`break`, which is a wrong place.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtool.errors import KvtoolError
from kvtool.gitcmd import Git
from kvtool.replay.apply import Blob, Builder, Commit, FailedHunk, failed_hunks
from kvtool.replay.conflict import add_cause
from kvtool.series.patchfile import PLAIN_FLAGS, FileDiff, Hunk, Piece, hunks_of, parse_diff, pieces_of, quote_name
from kvtool.series.placement import UNTOLD, HunkPlacement, LineMap, check_placement, heading_at
from kvtool.series.source import SourceFile, split_lines, squeezed

# Flags for blocks of lines as the three-way merge sees them, so that the line map and the merge agree which lines
# changed.
MAP_FLAGS = (*PLAIN_FLAGS, "--diff-algorithm=histogram", "--no-indent-heuristic", "--full-index", "-U0")
# Length of the conflict markers in a temporary repository. No line of upstream is so long a row of these characters.
MARKER_SIZE = 60
_CONFLICT = re.compile(
    rb"^<{60}[^\n]*\n(?P<ours>.*?)^(?:\|{60}[^\n]*\n.*?)?^={60}\n.*?^>{60}[^\n]*\n?",
    re.DOTALL | re.MULTILINE,
)
SUBMODULE = "160000"


@dataclass(frozen=True)
class PickResult:
    """Hold the result of moving one patch.

    tree: the id of the tree with the patch in it; None if the patch has a conflict
    failed: the hunks that have a conflict
    notes: remarks that the user should read
    commit: the commit that the user must merge by hand: the patch without the hunks that upstream already has; "" if
        there is nothing to merge by hand
    """

    tree: str | None
    failed: tuple[FailedHunk, ...] = ()
    notes: tuple[str, ...] = ()
    commit: str = ""


def cherry_pick(builder: Builder, origin: Commit) -> PickResult:
    """Apply a patch to builder.tree by merging.

    The caller must commit the tree. The content of the index is undefined afterwards.
    """
    git, onto = builder.git, builder.tree
    gone = moved_removals(git, origin, onto)
    there = hunks_in_upstream(git, origin, onto) - {(hunk.path, hunk.number) for hunk in gone}
    notes = tuple(f"{path} hunk {number}: upstream already has it" for path, number in sorted(there) if number)
    notes += _note_renames(git, origin, onto)
    if there >= _hunks(origin):
        return PickResult(onto)
    todo = _without(builder, origin, there) if any(number for _, number in there) else origin
    tree, unmerged = three_way_merge(builder, todo)
    if tree == onto and not unmerged and not gone:
        return PickResult(onto, notes=notes)
    but = frozenset(name for path in unmerged for name in (path, _without_side(path)))
    landings = check_hunks(git, todo, onto, tree, but=but, known=_lines_of(origin, there))
    wrong = [FailedHunk.of(found.piece.hunk, found.wrong, "wrong place") for found in landings if found.wrong]
    wrong += [hunk for hunk in gone if hunk.path not in but]
    if not unmerged and not wrong:
        return PickResult(tree, notes=notes + _notes(landings))
    alone = apply_by_context(builder, _with_new_names(git, todo, onto)) if not gone else None
    if alone is not None:
        again = check_hunks(git, todo, onto, alone, known=_lines_of(origin, there))
        if not any(landing.wrong for landing in again):
            return PickResult(alone, notes=notes + _notes(again))
    if not gone and _is_in_upstream(builder, origin):
        return PickResult(onto)
    failed = [*_conflicts(git, todo, onto, tree, unmerged), *wrong]
    if not failed:
        builder.reset()
        failed = list(failed_hunks(builder, _with_new_names(git, todo, onto)))
    return PickResult(
        None, tuple(add_context(git, todo, onto, _numbered(origin, hunk)) for hunk in failed), notes, todo.id
    )


def _notes(landings: Sequence[HunkPlacement]) -> tuple[str, ...]:
    return tuple(f"{landing.piece.hunk.path}: {landing.note}" for landing in landings if landing.note)


_SIMILAR = 0.75  # if a renamed file has a smaller share of equal lines, it may be another file, so print a note


def _note_renames(git: Git, origin: Commit, onto: str) -> tuple[str, ...]:
    """Return a note for each file that git treats as renamed although few of its lines are equal under both names."""
    notes: list[str] = []
    for path, name in _new_names(git, origin, onto).items():
        if name != path:
            base, now = read_files(git, (f"{origin.parent}:{path}", path), (f"{onto}:{name}", name))
            equal = len(base.lines) - sum(block.removed for block in map_lines(git, base, now).blocks)
            share = equal / max(len(base.lines), len(now.lines), 1)
            if share < _SIMILAR:
                notes.append(
                    f"look at it: {name} counts as the renamed {path}, although only {share:.0%} of the lines are equal"
                )
    return tuple(notes)


# --- hunks that upstream has ---------------------------------------------------------------------------------------


def hunks_in_upstream(git: Git, origin: Commit, onto: str) -> set[tuple[str, int]]:
    """Return the hunks whose result is in upstream already, as pairs of path and number.

    The number 0 means changes of a file that are not in hunks: its mode, a binary change, a link, a submodule.
    """
    found: set[tuple[str, int]] = set()
    names = _new_names(git, origin, onto)
    for file in parse_diff(origin.diff):
        name, has_text = names[file.path], file.hunks and not _is_submodule(file)
        # compare mode and content; for a text only the mode, because its content is compared hunk by hunk
        parts = 1 if has_text else 2
        if _entry(git, origin.id, file.path)[:parts] == _entry(git, onto, name)[:parts]:
            found |= {(file.path, 0), *((file.path, hunk.number) for hunk in (() if has_text else file.hunks))}
        if has_text:
            places = ((origin.parent, file.path), (origin.id, file.path), (onto, name))
            base, patched, now = read_files(git, *((f"{tree}:{path}", path) for tree, path in places))
            moved = map_lines(git, base, now)
            pieces = pieces_of(file)
            found |= {(file.path, p.hunk.number) for p in pieces if _is_applied(p, base, patched, now, moved)}
    return found


def moved_removals(git: Git, origin: Commit, onto: str) -> list[FailedHunk]:
    """Return the hunks that only remove lines, if upstream moved these lines to another place.

    The lines are not at their old place any more, so it seems that upstream has the hunk. But the patch must still
    remove them at the new place.
    """
    found: list[FailedHunk] = []
    names = _new_names(git, origin, onto)
    for file in parse_diff(origin.diff):
        removals = [piece for piece in pieces_of(file) if not any(row[:1] == b"+" for row in piece.hunk.rows)]
        if not removals or _is_submodule(file):
            continue
        old, new = (origin.parent, file.path), (onto, names[file.path])
        sides = (old, (origin.id, file.path), new)
        base, patched, now = read_files(git, *((f"{tree}:{path}", path) for tree, path in sides))
        moved = map_lines(git, base, now)
        for piece in removals:
            if _is_applied(piece, base, patched, now, moved) and (where := _removed_to(git, piece, patched, old, new)):
                reason = f"upstream moved the lines that the patch removes to {where}"
                found.append(FailedHunk.of(piece.hunk, reason, "moved lines"))
    return found


def _removed_to(git: Git, piece: Piece, patched: SourceFile, old: tuple[str, str], new: tuple[str, str]) -> str:
    """Return where upstream has the removed lines of a hunk now, as "path:line"; "" if it does not have them."""
    lines = [row[1:] for row in piece.hunk.rows if row[:1] == b"-"]
    telling = [line for line in lines if len(line.strip()) >= _TELLING]
    (now,) = read_files(git, (f"{new[0]}:{new[1]}", new[1]))
    here, known = {squeezed(line): n for n, line in enumerate(now.lines, 1)}, {squeezed(line) for line in patched.lines}
    fresh = [line for line in telling if squeezed(line) not in known]
    if fresh and 2 * sum(squeezed(line) in here for line in fresh) > len(fresh):
        return f"{new[1]}:{min(here[squeezed(line)] for line in fresh if squeezed(line) in here)}"
    return _new_location(git, fresh, old, new) if fresh else ""


def _is_submodule(file: FileDiff) -> bool:
    return re.search(rb"^(?:index .*|.*mode) 160000$", file.head, re.MULTILINE) is not None


def _hunks(origin: Commit) -> set[tuple[str, int]]:
    files = parse_diff(origin.diff)
    return {(file.path, number) for file in files for number in (0, *(hunk.number for hunk in file.hunks))}


def _entry(git: Git, tree: str, path: str) -> tuple[str, ...]:
    """Return the mode and the object id of a path; an empty tuple if the tree does not have it."""
    said = git.run("ls-tree", "-z", "--full-tree", tree, "--", f":(literal){path}", check=False).stdout
    mode, _, rest = said.partition(" ")
    return (mode, rest.partition("\t")[0].rpartition(" ")[2]) if said else ()


def _is_applied(piece: Piece, old: SourceFile, patched: SourceFile, now: SourceFile, moved: LineMap) -> bool:
    """Return True if upstream has the lines after the hunk's change, at the place to which `moved` maps the hunk.

    White space may differ. But if the hunk itself changes only white space, the lines must be equal byte for byte.
    """
    region = moved.map_range(piece.start, piece.start + len(piece.before))
    place, made = slice(region.start, region.stop), slice(piece.made, piece.made + len(piece.after))
    if now.lines[place] == patched.lines[made]:
        return True
    before = old.keys[piece.start : piece.start + len(piece.before)]
    return now.keys[place] == patched.keys[made] != before


def _without(builder: Builder, origin: Commit, there: set[tuple[str, int]]) -> Commit:
    """Return the patch without some of its hunks, as a commit on the same parent."""
    git, blobs = builder.git, list[Blob]()
    for file in parse_diff(origin.diff):
        left_out = [piece for piece in pieces_of(file) if (file.path, piece.hunk.number) in there]
        entry = _entry(git, origin.id, file.path)
        if not left_out or not entry:
            continue
        (patched,) = read_files(git, (f"{origin.id}:{file.path}", file.path))
        lines = list(patched.lines)
        for piece in reversed(left_out):
            lines[piece.made : piece.made + len(piece.after)] = piece.before
        content = git.line("hash-object", "-w", "--stdin", input=b"".join(lines))
        blobs.append(Blob(entry[0], content, file.path))
    builder.reset(f"{origin.id}^{{tree}}")
    builder.add_blobs(blobs)
    made = git.line("commit-tree", builder.write_tree(), "-p", origin.parent, input=origin.message)
    return replace(origin, id=made, diff=builder.diff_of(origin.parent, made))


def _numbered(origin: Commit, failed: FailedHunk) -> FailedHunk:
    """Return the failed hunk with its number in the whole patch, because it may be from a patch without some hunks."""
    hunks = (hunk for hunk in hunks_of(origin.diff) if hunk.path == failed.path and _same_place(hunk, failed))
    hunk = next(hunks, None)
    return replace(failed, number=hunk.number, total=hunk.total) if hunk else failed


# --- the three-way merge ------------------------------------------------------------------------------------------


def three_way_merge(builder: Builder, origin: Commit) -> tuple[str, dict[str, dict[str, tuple[str, str]]]]:
    """Return the merged tree and its conflicts, as parse_unmerged() returns them.

    A file with a conflict has conflict markers in the tree. git merge-tree needs two commits with a common parent,
    because its option --merge-base exists only since git 2.40. So upstream's tree is first made a commit on top of the
    base.
    """
    git, onto = builder.git, builder.tree
    attributes = git.repo / "info/attributes"
    # a temporary repository is bare, so no other attributes apply
    if (git.repo / "HEAD").is_file() and not attributes.exists():
        attributes.parent.mkdir(exist_ok=True)
        attributes.write_text(f"* conflict-marker-size={MARKER_SIZE}\n")
    return merge_trees(git, onto, origin.parent, origin.id)


def merge_trees(git: Git, onto: str, base: str, patched: str) -> tuple[str, dict[str, dict[str, tuple[str, str]]]]:
    """Merge the tree `onto` with the commit `patched`, whose parent is `base`.

    Returns the merged tree and its conflicts, as parse_unmerged() returns them.
    """
    upstream = git.line("commit-tree", onto, "-p", base, input="upstream\n")
    done = git.run("merge-tree", "--write-tree", "-z", "--no-messages", upstream, patched, check=False)
    if done.returncode not in (0, 1):
        raise KvtoolError(
            "git cannot merge",
            why="git 2.38 or newer is needed to move a patch to another upstream",
            next_step="install a newer git; kvtool doctor shows the current one",
            output=done.stderr,
        )
    tree, *entries = done.stdout.split("\0")
    return tree, parse_unmerged(entries)


def parse_unmerged(entries: Sequence[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """Parse the conflicts of merge-tree or of an index.

    Returns the mode and the blob by path and stage: "1" is the base, "2" is upstream, "3" is the patch.
    """
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for entry in entries:
        if entry:
            meta, _, path = entry.partition("\t")
            mode, blob, stage = meta.split()
            found.setdefault(path, {})[stage] = (mode, blob)
    return found


def _conflicts(
    git: Git, origin: Commit, onto: str, tree: str, unmerged: Mapping[str, Mapping[str, tuple[str, str]]]
) -> list[FailedHunk]:
    """Return the conflicts of a merged tree: hunks with conflict markers, and files that cannot have such markers."""
    found: list[FailedHunk] = []
    names = _new_names(git, origin, onto)
    files = {names[file.path]: file for file in parse_diff(origin.diff)}
    files |= {file.path: file for file in files.values()}
    for path, stages in unmerged.items():
        file = files.get(path) or files.get(_without_side(path))
        if file and (reason := _type_change(git, origin, onto, file.path, names[file.path])):
            found.append(FailedHunk(file.path, 0, 0, "", reason, cause="file type"))
            continue
        regions = _regions(git, f"{tree}:{path}", stages)
        hunks = _hunks_at(git, origin, onto, file, path, regions) if file else []
        if hunks:
            found += [FailedHunk.of(piece.hunk, "") for piece in hunks]
        elif file or regions:
            found.append(FailedHunk(path, 0, 0, "", _without_markers(stages, regions)))
    found = list(dict.fromkeys(found))
    return found or [FailedHunk(path, 0, 0, "", _without_markers(stages, [])) for path, stages in unmerged.items()]


def _without_side(path: str) -> str:
    """Return a path without the suffix, such as "~COMMIT", that names a side of the merge.

    git appends this suffix if a file and a folder, or a file and a link, have the same name.
    """
    return re.sub(r"~[0-9a-f]{40}(_\d+)?$", "", path)


_TYPES = {"10": "a file", "12": "a symbolic link", "16": "a submodule", "04": "a folder"}


def _type_change(git: Git, origin: Commit, onto: str, path: str, name: str) -> str:
    """Return the reason if one side turned a path into another type, for example into a link; "" if neither did."""
    entries = (_entry(git, tree, at) for tree, at in ((origin.parent, path), (origin.id, path), (onto, name)))
    base, mine, theirs = (_TYPES.get(entry[0][:2], "") if entry else "" for entry in entries)
    if base and theirs and base != theirs:
        return f"upstream replaced {base} by {theirs}"
    if base and mine and base != mine:
        return f"the patch replaces {base} by {mine}, and upstream changed it"
    return ""


def _without_markers(stages: Mapping[str, tuple[str, str]], regions: Sequence[range]) -> str:
    """Return the reason why a file as a whole has a conflict."""
    if SUBMODULE in (mode for mode, _ in stages.values()):
        return "the patch and upstream each name another commit of this submodule"
    if set(stages) == {"1", "3"}:
        return "upstream removed this file, and the patch changes it"
    if set(stages) == {"1", "2"}:
        return "the patch removes this file, and upstream changed it"
    if "1" not in stages and len(stages) == 2:
        return "upstream and the patch both add this file"
    if len(stages) < 3:
        return "upstream and the patch rename or remove this file in different ways"
    return (
        "upstream changed the same lines"
        if regions
        else "upstream and the patch both change this file, which is not a text"
    )


def _regions(git: Git, name: str, stages: Mapping[str, tuple[str, str]]) -> list[range]:
    """Return the line ranges of upstream's file that are in conflict, read from a file with markers."""
    if "2" not in stages or SUBMODULE in (mode for mode, _ in stages.values()):
        return []
    (marked,), (ours,) = (read_files(git, (each, "")) for each in (name, stages["2"][1]))
    text = marked.text
    kept = _CONFLICT.sub(lambda found: found["ours"], text)
    back = map_lines(git, SourceFile(kept), ours)
    found: list[range] = []
    cut = 0  # number of lines so far that upstream's file does not have: markers, and lines of the base and the patch
    for each in _CONFLICT.finditer(text):
        start = text.count(b"\n", 0, each.start()) - cut
        stop = start + each["ours"].count(b"\n")
        cut += each[0].count(b"\n") - each["ours"].count(b"\n")
        found.append(back.map_range(start, stop))
    return found


def _hunks_at(git: Git, origin: Commit, onto: str, file: FileDiff, path: str, regions: Sequence[range]) -> list[Piece]:
    """Return the hunks of a file whose place in upstream overlaps or touches one of the regions."""
    base, now = read_files(git, (f"{origin.parent}:{file.path}", file.path), (f"{onto}:{path}", path))
    moved = map_lines(git, base, now)
    found: list[Piece] = []
    for piece in pieces_of(file):
        start, stop = piece.start + piece.lead, piece.start + len(piece.before) - piece.trail
        place = moved.map_range(start, max(start, stop))
        if any(place.start <= region.stop and region.start <= max(place.start, place.stop) for region in regions):
            found.append(piece)
    return found


def has_every_hunk(git: Git, origin: Commit, onto: str, result: str) -> bool:
    """Return True if a tree has every change of a patch, no matter whether upstream or the patch made the change.

    Each line that the patch adds must be at its place in `result`, and no line that it removes may be there.
    """
    if moved_removals(git, origin, result):
        return False
    names = _new_names(git, origin, onto)
    for file in parse_diff(origin.diff):
        before, after, now = (
            _entry(git, tree, path)
            for tree, path in ((origin.parent, file.path), (origin.id, file.path), (result, names[file.path]))
        )
        if not file.hunks or not after or _is_submodule(file):
            if after != now:
                return False
            continue
        if not now or (before[:1] != after[:1] and now[0] != after[0]):
            return False
        places = ((origin.parent, file.path), (origin.id, file.path), (result, names[file.path]))
        base, patched, there = read_files(git, *((f"{tree}:{path}", path) for tree, path in places))
        from_base, from_patched = map_lines(git, base, there), map_lines(git, patched, there)
        for hunk in file.hunks:
            removed, added = _changed_lines(hunk)
            again = {patched.keys[n] for n in added}  # a line whose white space the patch changes is not a removed line
            gone = [n for n in removed if base.keys[n] not in again]
            if any(from_patched.line(n) is None for n in added) or any(from_base.line(n) is not None for n in gone):
                return False
    return True


def _changed_lines(hunk: Hunk) -> tuple[list[int], list[int]]:
    """Return the numbers of the removed lines in the old file and of the added lines in the new file, from 0 on."""
    old, new = hunk.old, hunk.new
    removed, added = list[int](), list[int]()
    for row in hunk.rows:
        if row[:1] == b"-":
            removed.append(old)
        elif row[:1] == b"+":
            added.append(new)
        old += row[:1] in (b"-", b" ")
        new += row[:1] in (b"+", b" ")
    return removed, added


def apply_by_context(builder: Builder, diff: bytes) -> str | None:
    """Return builder.tree with a diff applied to it by its context; None if it does not apply."""
    builder.reset()
    return builder.write_tree() if builder.apply(diff) else None


def _is_in_upstream(builder: Builder, origin: Commit) -> bool:
    """Return True if upstream has the whole patch.

    Upstream has it if the reverse patch applies, and each hunk of the reverse patch is at the right place.
    """
    diff = builder.diff_of(origin.id, origin.parent)
    back = replace(origin, id=origin.parent, parents=(origin.id,), diff=diff)
    without = apply_by_context(builder, _with_new_names(builder.git, back, builder.tree))
    return without is not None and not any(f.wrong for f in check_hunks(builder.git, back, builder.tree, without))


# --- the check of places, with files from git ---------------------------------------------------------------------


def check_hunks(
    git: Git,
    origin: Commit,
    onto: str,
    result: str,
    *,
    but: frozenset[str] = frozenset(),
    known: frozenset[bytes] = frozenset(),
) -> tuple[HunkPlacement, ...]:
    """Check the place of every hunk in the result of a merge.

    Hunks that upstream already has are left out.

    onto: the tree before the merge
    result: the tree after the merge
    but: the paths of files that are not checked
    known: lines, without white space, that upstream added for a known reason
    """
    placements: list[HunkPlacement] = []
    names = _new_names(git, origin, onto)
    for file in parse_diff(origin.diff):
        if not file.hunks or _is_submodule(file) or {file.path, names[file.path]} & but:
            continue
        there = names[file.path]
        places = ((origin.parent, file.path), (origin.id, file.path), (onto, there), (result, there))
        base, patched, now, after = read_files(git, *((f"{tree}:{path}", path) for tree, path in places))
        moved = map_lines(git, base, now)
        applied = {p.hunk.number for p in pieces_of(file) if _is_applied(p, base, patched, now, moved)}
        pieces = [piece for piece in pieces_of(file) if piece.hunk.number not in applied]
        lines = known | _lines_of(origin, {(file.path, number) for number in applied})
        found = check_placement(base, patched, now, after, pieces, moved, lines)
        placements += [_refuse_moved_function(git, each, base, now, *places[::2]) for each in found]
    return tuple(placements)


def _refuse_moved_function(
    git: Git, placement: HunkPlacement, base: SourceFile, now: SourceFile, old: tuple[str, str], new: tuple[str, str]
) -> HunkPlacement:
    """Return the placement, marked as wrong if upstream moved the function to another file.

    In that case, the hunk is now in another function that looks similar.

    old: tree and path of the file that the patch was made on
    new: tree and path of upstream's file
    """
    found = _moved_function(git, placement.piece, base, now, old, new) if not placement.wrong else None
    if not found:
        return placement
    return replace(placement, wrong=f"upstream moved {found[1]} to {found[0]}, and the hunk landed in another function")


def _moved_function(
    git: Git, piece: Piece, base: SourceFile, now: SourceFile, old: tuple[str, str], new: tuple[str, str]
) -> tuple[str, str] | None:
    """Return the place to which upstream moved the function of a hunk, as "path:line", and the function's first line.

    Returns None if the function is still in the same file, or if it is not found.

    old: tree and path of the file that the patch was made on
    new: tree and path of upstream's file
    """
    number = _function_head(base, piece.start)
    if number is None or base.keys[number] in now.keys:
        return None
    head = base.lines[number]
    where = _new_location(git, [head], old, new)
    return (where, repr(head.decode("utf-8", "replace").strip())) if where else None


def _function_head(file: SourceFile, number: int) -> int | None:
    """Return the number of the first line of the function around a line of C or Python; None if there is none."""
    if within := file.function_at(number):
        return within.start
    if not file.path.endswith(".py"):
        return None
    around = (*file.enclosing_headers(number), heading_at(file.lines, number))
    return next((n for n in around if n is not None and _PYTHON.match(file.lines[n])), None)


_PYTHON = re.compile(rb"\s*(?:async\s+)?(?:def|class)\b")


def _lines_of(origin: Commit, hunks: Collection[tuple[str, int]]) -> frozenset[bytes]:
    """Return the lines that some hunks add, without white space."""
    chosen = (hunk for hunk in hunks_of(origin.diff) if (hunk.path, hunk.number) in hunks)
    return frozenset(squeezed(row[1:]) for hunk in chosen for row in hunk.rows if row[:1] == b"+")


@functools.lru_cache(8)  # each step of moving a patch needs them
def _new_names(git: Git, origin: Commit, onto: str) -> Mapping[str, str]:
    """Return the new path of each file that a patch changes. It differs if the upstream `onto` renamed the file."""
    names = {file.path: file.path for file in parse_diff(origin.diff)}
    if not set(names) <= git.paths(onto):
        names.update({path: name for path, name in git.renamed(origin.parent, onto).items() if path in names})
    return names


def _with_new_names(git: Git, origin: Commit, onto: str) -> bytes:
    """Return the diff of a patch, with the paths that its files have in the other upstream."""
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
    """Return notes on a user's resolution of a conflict. `tree` is the result of the resolution.

    There is a note for each hunk that is still at a place reported as wrong, and for each changed file that the patch
    does not change.
    """
    git, onto = builder.git, builder.tree
    left = [placement for placement in check_hunks(git, origin, onto, tree) if placement.wrong not in ("", UNTOLD)]
    more = set(git.changed(onto, tree)) - set(_new_names(git, origin, onto).values())
    notes = [
        f"{placement.piece.hunk.path}: not changed by the resolution, although {placement.wrong}" for placement in left
    ]
    return (*notes, *(f"{path}: the resolution changes it, the patch did not" for path in sorted(more)))


def read_files(git: Git, *files: tuple[str, str]) -> list[SourceFile]:
    """Read files. Each is given as the name of a git object and a path. A missing file is empty."""
    found = git.blobs(*(name for name, _path in files))
    return [_cached_source(text, path, blob) for (blob, text), (_name, path) in zip(found, files, strict=True)]


_cached_source = functools.lru_cache(32)(SourceFile)  # the next patch of the series often reads the same file


# the merge, the check of its result and the report of a conflict need the map of the same files
@functools.lru_cache(32)
def map_lines(git: Git, old: SourceFile, new: SourceFile) -> LineMap:
    """Map the lines of `old` to the lines of `new` with git diff. Lines with equal keys match (see SourceFile.keys)."""
    if old.text == new.text:
        return LineMap(())
    blobs = (side.blob or git.line("hash-object", "-w", "--stdin", input=side.text) for side in (old, new))
    return LineMap(hunks_of(git.raw("diff", "--text", *MAP_FLAGS, *blobs))).with_keys(old.keys, new.keys)


def add_context(git: Git, origin: Commit, onto: str, hunk: FailedHunk) -> FailedHunk:
    """Add to a failed hunk the expected lines, upstream's lines, the diff between both, and the cause in words."""
    names = _new_names(git, origin, onto)
    files = [file for file in parse_diff(origin.diff) if hunk.path in (file.path, names[file.path])]
    if not files:
        return hunk
    path, name = files[0].path, names[files[0].path]
    hunk, pieces = replace(hunk, path=name), [piece for file in files for piece in pieces_of(file)]
    piece = next((piece for piece in pieces if _same_place(piece.hunk, hunk)), None)
    if piece is None:
        return _add_context_of_file(git, origin, onto, path, hunk)
    places = ((origin.parent, path), (onto, name))
    old, new = read_files(git, *((f"{tree}:{file}", file) for tree, file in places))
    gone, what = _moved_function(git, piece, old, new, *places) or (_new_location(git, piece.before, *places), "")
    return add_cause(hunk, piece, old, new, functools.partial(map_lines, git), gone, what)


def _same_place(hunk: Hunk, failed: FailedHunk) -> bool:
    """Return True if a failed hunk is a given hunk of a diff. Both must begin in the same line of the old file."""
    return failed.number > 0 and hunk.header.split(" +")[0] == failed.header.split(" +")[0]


def _add_context_of_file(git: Git, origin: Commit, onto: str, path: str, hunk: FailedHunk) -> FailedHunk:
    """Add the cause of a conflict about a whole file.

    The file is a submodule, a link or a binary file, or only one side has it.
    """
    if hunk.cause:
        return hunk
    entries = [_entry(git, tree, path) for tree in (origin.parent, origin.id, onto)]
    if SUBMODULE in (entry[0] for entry in entries if entry):
        expected, wanted, found = (((f"Subproject commit {entry[1]}",) if entry else ()) for entry in entries)
        return replace(hunk, cause="submodule", expected=expected, wanted=wanted, found=found)
    if entries[0] and not entries[2]:
        return replace(hunk, cause="deleted lines")
    return replace(hunk, cause="changed lines")


_TELLING = 16  # a line with fewer characters occurs too often to be searched for


def _new_location(git: Git, lines: Sequence[bytes], old: tuple[str, str], new: tuple[str, str]) -> str:
    """Return where the longest of `lines` is now, as "path:line".

    Returns "" if no other file has it, or if several files do.

    old: the tree and the path of the lines before
    new: the tree and the path where the lines should be
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
