"""Test that the lines of tests/e2e/traps exist in cpp/. The end-to-end tests, which break these lines, need minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.broken import Edit, rewrite
from tests.e2e.traps import TRAPS

CPP = Path(__file__).parents[2] / "cpp"
EDITS = tuple(edit for trap in TRAPS for edit in trap.edits if (CPP / edit.file).exists())


def test_most_traps_are_in_our_files() -> None:
    assert len(EDITS) > len(TRAPS) // 2


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.file}: {edit.old[:40]}")
def test_trap_finds_its_line(edit: Edit) -> None:
    assert "kv_broken(1)" in rewrite((CPP / edit.file).read_text(encoding="utf-8"), [(1, edit)])
