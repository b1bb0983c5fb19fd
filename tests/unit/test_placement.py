"""Test the check of a hunk's place: the line map, the function around the hunk, and the messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.series.patchfile import Block, count_runs, parse_diff, pieces_of
from kvtool.series.placement import LineMap, check_placement, find_placements
from kvtool.series.source import SourceFile, split_lines
from tests.unit.placing import BASE, diff, judge


def add(text: str, after: str, line: str = "    more();\n") -> str:
    """Insert `line` into the text after `after`, which must occur exactly once."""
    assert text.count(after) == 1
    return text.replace(after, after + line)


PATCHED = add("".join(BASE), "int y = 3;\n    use(y);\n")


def test_moved_lines_are_right_place(tmp_path: Path) -> None:
    target = "// new\n" * 5 + "".join(BASE)
    (found,) = judge(tmp_path, PATCHED, target, add(target, "int y = 3;\n    use(y);\n"))
    assert (found.wrong, found.note) == ("", "")


def test_other_function_is_wrong(tmp_path: Path) -> None:
    target = "".join(BASE)
    (found,) = judge(tmp_path, PATCHED, target, add(target, "int y = 2;\n    use(y);\n"))
    assert "it landed in line 9, in 'int f2() {'; it belongs in line 15, in 'int f3() {'" in found.wrong


def test_twin_before_right_place(tmp_path: Path) -> None:
    target = "".join([*BASE[:2], BASE[2].replace("f3", "g3"), *BASE[2:]])
    wrong = target.replace("int y = 3;\n    use(y);\n", "int y = 3;\n    use(y);\n    more();\n", 1)
    (found,) = judge(tmp_path, PATCHED, target, wrong)
    assert "in 'int g3() {'; it belongs in line 21, in 'int f3() {'" in found.wrong
    (found,) = judge(tmp_path, PATCHED, target, add(target, "int f3() {\n    int y = 3;\n    use(y);\n"))
    assert not found.wrong


def test_moved_function_is_right_place(tmp_path: Path) -> None:
    target = "".join([BASE[2], BASE[0], BASE[1], BASE[3]])
    (found,) = judge(tmp_path, PATCHED, target, add(target, "int y = 3;\n    use(y);\n"))
    assert not found.wrong


def test_changed_signature_is_right_place(tmp_path: Path) -> None:
    target = "".join(BASE).replace("int f3() {", "int f3(int x) {")
    (found,) = judge(tmp_path, PATCHED, target, add(target, "int y = 3;\n    use(y);\n"))
    assert not found.wrong


def test_removed_function_refuses_hunk(tmp_path: Path) -> None:
    """Remove a function whose last lines are equal to those before it, so that a diff may confuse the two."""
    patched = "".join(BASE).replace("    return y;\n}\n\nint f4", "    return y;\n    // end\n}\n\nint f4")
    target = "".join([*BASE[:2], BASE[3]])
    for function in ("f2", "f4"):
        head, body = target.split(f"int {function}", 1)
        result = f"{head}int {function}" + body.replace("return y;\n", "return y;\n    // end\n", 1)
        (found,) = judge(tmp_path, patched, target, result)
        assert "it belongs" in found.wrong, function


TWINS = "int f() {\n    b();\n    c();\n    x();\n    b();\n    c();\n}\n"


@pytest.mark.parametrize(("target", "places"), [(TWINS, 2), (TWINS.replace("x();\n    b();", "x();"), 1)])
def test_rewritten_lines_need_unique_place(tmp_path: Path, target: str, places: int) -> None:
    base = "int f() {\n    b();\n    c();\n}\n"
    pieces = pieces_of(parse_diff(diff(tmp_path, base, add(base, "    b();\n"), 1))[0])
    result = target.replace("    b();\n", "    b();\n    more();\n", 1)
    before, after, moved, applied = (
        SourceFile(text.encode(), "f.cpp") for text in (base, add(base, "    b();\n"), target, result)
    )
    (found,) = check_placement(before, after, moved, applied, pieces, LineMap([Block(1, 3, 1, target.count("\n") - 1)]))
    assert (f"{places} places there" in found.wrong) == (places > 1)


def test_new_label_above_is_note(tmp_path: Path) -> None:
    base = "struct s {\n    int a;\n    int b;\n    int c;\n};\n"
    patched = base.replace("    int c;\n", "    int more;\n    int c;\n")
    target = base.replace("    int a;\n", "    int a;\nprivate:\n")
    (found,) = judge(tmp_path, patched, target, target.replace("    int c;\n", "    int more;\n    int c;\n"), base)
    assert not found.wrong and "'struct s {', landed in 'private:'" in found.note


F3 = "int y = 3;\n    use(y);\n"
EDITED = BASE[2].replace("use(y);", "use(y, 0);").replace("return y", "return -y")


def methods(text: str) -> str:
    """Turn the functions into methods of a class, so that git uses `private:` as the heading of hunks."""
    return (
        "class c {\nprivate:\n"
        + "".join(f"    {line}" if line.strip() else line for line in text.splitlines(True))
        + "};\n"
    )


@pytest.mark.parametrize("shape", [str, methods])
@pytest.mark.parametrize("behind", [False, True])
def test_copied_function_with_edited_original(tmp_path: Path, shape: Callable[[str], str], behind: bool) -> None:
    copy = BASE[2].replace("f3", "g3")
    target = "".join([*BASE[:2], *([EDITED, copy] if behind else [copy, EDITED]), BASE[3]])
    base, patched = shape("".join(BASE)), shape(PATCHED)
    (found,) = judge(tmp_path, patched, shape(target), shape(add(target, F3)), base)
    assert "it landed in" in found.wrong and "int g3() {'; it belongs in 'int f3() {', which is in" in found.wrong


def test_changed_signature_with_old_wrapper(tmp_path: Path) -> None:
    target = "".join(BASE).replace("int f3() {", "int f3(int x) {") + "int f3() { return f3(0); }\n"
    (found,) = judge(tmp_path, PATCHED, target, add(target, F3))
    assert (found.wrong, found.note) == ("", "")


def test_two_copies_of_removed_function(tmp_path: Path) -> None:
    copies = [BASE[2].replace("f3", name) for name in ("f3_here", "f3_there")]
    target = "".join([*BASE[:2], *copies, BASE[3]])
    result = add(target, f"f3_there() {{\n    {F3}")
    (found,) = judge(tmp_path, PATCHED, target, result)
    assert "upstream has several versions of 'int f3() {' now, with the same lines in each" in found.wrong


def test_copy_after_unchanged_function(tmp_path: Path) -> None:
    """Let upstream add a copy of a function after the original.

    A diff may report that the body of the original was moved into the copy.
    """
    target = "".join([*BASE[:3], BASE[2].replace("f3", "g3"), BASE[3]])
    pieces = pieces_of(parse_diff(diff(tmp_path, "".join(BASE), PATCHED, 1))[0])
    texts = ("".join(BASE), PATCHED, target, target.replace(F3, F3 + "    more();\n", 1))
    base, patched, now, after = (SourceFile(text.encode(), "f.cpp") for text in texts)
    (found,) = check_placement(base, patched, now, after, pieces, LineMap([Block(13, 0, 13, 6)]))
    assert not found.wrong


@pytest.mark.parametrize(
    ("line", "function"),
    [
        (1, (0, 3)),
        (4, None),
        (6, None),
        (8, (7, 9)),
        (10, None),
        (11, None),
        (14, (12, 16)),
        (15, (12, 16)),
        (18, None),
    ],
)
def test_function_around_a_line(line: int, function: tuple[int, int] | None) -> None:
    text = (
        "static int f(\n        int a) {\n    return a;\n}\n\n"
        "class c : public b {\npublic:\n    int m(int a) const {\n        return a;\n    }\n\n"
        "    void declared(int a);\n"
        "    c(int a)\n        : b(a) {\n        if (a) {\n        }\n    }\n    int n;\n};\n"
    )
    found = SourceFile(text.encode(), "f.cpp").function_at(line)
    assert (found and (found.start, found.stop - 1)) == function
    assert SourceFile(text.encode(), "f.py").function_at(line) is None


def test_hunks_out_of_order_are_wrong(tmp_path: Path) -> None:
    target = "".join(BASE)
    (found,) = judge(tmp_path, PATCHED, target, target)
    assert "is ambiguous" in found.wrong


def test_hunks_sharing_context() -> None:
    old = "a\nb\nx\nc\nd\n"
    new = "a\n1\nb\nx\nc\n2\nd\n"
    text = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,3 @@\n a\n+1\n b\n@@ -4,2 +5,3 @@\n c\n+2\n d\n"
    pieces = pieces_of(parse_diff(text)[0])
    assert find_placements(split_lines(old.encode()), split_lines(new.encode()), pieces, [None, None]) == [0, 3]
    target, result = b"a\nb\nd\n", b"a\n1\nb\n2\nd\n"
    text = text.replace(b"@@ -4,2 +5,3 @@\n c\n", b"@@ -4,2 +5,3 @@\n b\n")
    pieces = pieces_of(parse_diff(text)[0])
    assert find_placements(split_lines(target), split_lines(result), pieces, [0, 1]) == [0, 1]


@pytest.mark.parametrize(("text", "lines"), [(b"", []), (b"a", [b"a"]), (b"a\n\nb\r\n", [b"a\n", b"\n", b"b\r\n"])])
def test_split_lines(text: bytes, lines: list[bytes]) -> None:
    assert split_lines(text) == lines


def test_pieces_without_a_last_line_end() -> None:
    text = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -3 +3,2 @@ head\n-c\n\\ No newline at end of file\n+c\n+d\n"
    (piece,) = pieces_of(parse_diff(text)[0])
    assert (piece.start, piece.before, piece.after) == (2, (b"c",), (b"c\n", b"d\n"))


def test_line_map() -> None:
    moved = LineMap([Block(2, 0, 2, 3), Block(5, 2, 8, 1)])
    assert [moved.line(n) for n in (0, 1, 2, 4, 5, 6, 7)] == [0, 1, 5, 7, None, None, 9]
    assert (moved.map_range(5, 6), moved.map_range(5, 7), moved.map_range(1, 2), moved.map_range(2, 3)) == (
        range(8, 9),
        range(8, 9),
        range(1, 5),
        range(2, 6),
    )


def test_runs_do_not_depend_on_the_context(tmp_path: Path) -> None:
    new = add(add("".join(BASE), "int y = 3;\n"), "int y = 3;\n    more();\n    use(y);\n")
    counts = [count_runs(diff(tmp_path, "".join(BASE), new, context)) for context in (0, 1, 3)]
    assert counts == [2, 2, 2]


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("abc", "abc", {0: 0, 1: 1, 2: 2}),  # all lines
        ("abc", "xabyc", {0: 1, 1: 2, 2: 4}),
        ("a}}b", "xa}b", {0: 1, 3: 3}),  # the two braces cannot be distinguished
        ("ab", "yba", {}),  # in another order
        ("}", "}}", {}),
        ("abc", "", {}),
    ],
)
def test_realigned_lines_are_mapped(old: str, new: str, kept: dict[int, int]) -> None:
    keys = [[b"-", *(text[n : n + 1].encode() for n in range(len(text))), b"-"] for text in (old, new)]
    moved = LineMap([Block(1, len(old), 1, len(new))]).with_keys(*keys)
    assert {n: place - 1 for n in range(len(old)) if (place := moved.line(n + 1)) is not None} == kept
    assert (moved.line(0), moved.line(len(old) + 1)) == (0, len(new) + 1)
