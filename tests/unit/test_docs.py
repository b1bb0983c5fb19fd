"""docs/: what it claims is backed by a test that exists, and each table is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/features.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
HEAD, FEATURES = ROWS[0], ROWS[2:]


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0][:40])
def test_each_feature_names_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == len(HEAD)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[1])
    assert named, "kvtool's cell names a test"
    for file, test in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file} has no {test}"


def test_what_is_said_of_others_names_its_source() -> None:
    notes = set(re.findall(r"^(\d+)\. ", TEXT, re.MULTILINE))
    cells = [cell for row in FEATURES for cell in row[2:]]
    assert all(re.fullmatch(r"\?|(yes|no) \(\d+\)", cell) for cell in cells)
    assert {number for cell in cells for number in re.findall(r"\d+", cell)} == notes
