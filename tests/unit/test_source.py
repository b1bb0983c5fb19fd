"""Test SourceFile: enclosing blocks, bodies without braces, and lines that are not compiled."""

from __future__ import annotations

import pytest

from kvtool.series.placement import heading_at
from kvtool.series.source import SourceFile, split_lines

NESTED = b"""\
int f(int a) {
    if (a) {
#ifdef X
        one();

        two();
    }

    for (;;)
    {
        three();
    }
    four();
    {
        five(a,
            6);
    }
    switch (a) {
        case 1:
        case 2:
            seven();
    }
}
class c {
private:
    int n = R"(
eight)";
};
"""


@pytest.mark.parametrize(
    ("line", "heads"),
    [
        (1, []),  # the function itself, and blocks that begin in this line, are left out
        (3, [1]),
        (5, [1]),  # an empty line and a directive are skipped
        (7, []),  # an empty line belongs to the block of the next line
        (8, []),
        (10, [8]),  # a line with only a brace is skipped
        (9, [8]),
        (14, []),  # a block without a first line
        (15, [14]),
        (20, [19, 18, 17]),  # several labels in a row
        (25, [23]),  # a class counts, and a brace in a literal does not end a block
        (99, []),
    ],
)
def test_enclosing_headers(line: int, heads: list[int]) -> None:
    assert SourceFile(NESTED, "f.cpp").enclosing_headers(line) == heads
    assert SourceFile(NESTED, "f.txt").enclosing_headers(line) == []


@pytest.mark.parametrize(
    ("above", "body"),
    [
        ("    if (a)", True),
        ("    } else", True),
        ("    for (;;)", True),
        ("    if (a) {", False),
        ("    while (a--);", False),
        ("    }", False),
        ("    call(a,", False),
        ("    do_it(a)", False),
    ],
)
def test_is_body_without_braces(above: str, body: bool) -> None:
    text = f"{above}\n        more();\n".encode()
    found = [SourceFile(text, name).is_body(1) for name in ("f.cpp", "f.txt")]
    assert found == [body, False]
    assert not SourceFile(text, "f.cpp").is_body(0)
    assert not SourceFile(text, "f.cpp").is_body(3)


def test_disabled_lines() -> None:
    text = b"a();\n#if 0\nb();\n#else\nc();\n#endif\n/* d();\n   e(); */\nf();\n"
    why = [SourceFile(text, "f.cpp").disabled(number) for number in range(10)]
    assert why == ["", "", "an #if 0", "an #if 0", "", "", "", "a comment", "", ""]
    assert not any(SourceFile(text, "f.txt").disabled(number) for number in range(10))


def test_heading_of_line() -> None:
    lines = split_lines(b"int f() {\n    a();\n}\n\n\n")
    assert [heading_at(lines, number) for number in (0, 1, 4, 5, 9)] == [0, 0, 0, 0, 0]
    assert heading_at(lines[1:2], 0) is None
