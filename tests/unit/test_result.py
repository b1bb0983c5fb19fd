"""Test that results stay the same as JSON and back, and that Markdown tables keep their columns."""

import dataclasses
import json
from typing import Any

import pytest

from kvtool import markdown
from kvtool.result import CheckOutcome, from_plain, to_plain


@dataclasses.dataclass(frozen=True)
class Part:
    outcome: CheckOutcome
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    pair: tuple[str, int]
    one: Part
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


WHOLE = Whole((Part(CheckOutcome.PASSED), Part(CheckOutcome.FAILED, ("a", "b"))), ("x", 1), Part(CheckOutcome.SKIPPED))


def test_plain_round_trip() -> None:
    assert from_plain(Whole, json.loads(json.dumps(to_plain(WHOLE)))) == WHOLE


def test_missing_and_unknown_fields() -> None:
    assert from_plain(Part, {"outcome": "passed", "unheard": 1}) == Part(CheckOutcome.PASSED)


@pytest.mark.parametrize("data", [{}, [], None, 3, {"outcome": "splendid"}, {"outcome": "passed", "names": 1}])
def test_invalid_plain_is_error(data: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_plain(Part, data)


def test_table_escapes_cells() -> None:
    assert markdown.table(("a", ">n"), [("x|y\nz", "1")]) == "| a | n |\n|---|---:|\n| x\\|y<br>z | 1 |\n"
