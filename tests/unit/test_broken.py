"""Test how tests/e2e/broken.py writes the library whose lines can be broken while it runs."""

from __future__ import annotations

import pytest

from tests.e2e.broken import Edit, rewrite

SOURCE = "int f() {\n    sync();\n    return size();\n}\nint g() {\n    return size();\n}\n"


def body(*edits: tuple[int, Edit]) -> str:
    return rewrite(SOURCE, list(edits)).partition("#line 1\n")[2]


def test_statement_becomes_branch() -> None:
    assert "if (kv_broken(3)) {\n\n} else {\nsync();\n}" in body((3, Edit("f", "sync();", "")))


def test_expression_becomes_conditional() -> None:
    made = body((1, Edit("f", "size()", "max()", after="int g()")))
    assert made.count("kv_broken") == 1
    assert made.endswith("return (kv_broken(1) ? (max()) : (size()));\n}\n")


def test_edits_of_one_place_nest() -> None:
    made = body((1, Edit("f", "sync();", "a();")), (2, Edit("f", "sync();", "b();")))
    assert made.count("sync();") == 1
    assert "kv_broken(1)" in made and "kv_broken(2)" in made


def test_edits_of_several_places() -> None:
    made = body((1, Edit("f", "sync();", "")), (2, Edit("f", "size()", "0", after="int f()")))
    assert made.index("kv_broken(1)") < made.index("kv_broken(2)") < made.index("int g()")


@pytest.mark.parametrize(
    "edit", [Edit("f", "gone();", ""), Edit("f", "size()", "0"), Edit("f", "sync();", "", "no such")]
)
def test_missing_or_ambiguous_line_fails(edit: Edit) -> None:
    with pytest.raises(AssertionError):
        edit.find(SOURCE)
