"""Test the journal of `kvtool verify --matrix`: it must not lose a finding, nor use a damaged line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.result import CheckOutcome
from kvtool.verify.checks import Check, Finding
from kvtool.verify.journal import Journal

ONE = Check("kv-check/a/1", "kv-check", Path("a.gguf"), args=("-fa", "on"))
TWO = Check("kv-check/b/1", "kv-check", Path("b.gguf"))


def found(check: Check, outcome: CheckOutcome = CheckOutcome.PASSED, reason: str = "") -> Finding:
    return Finding(check.id, "kv-check", "plain", outcome, "same", reason, True, 1.5, {"values": 3})


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def file(work: Path) -> Path:
    """Return the path of the journal with the key "abc"."""
    return work / "matrix-abc.jsonl"


def test_findings_survive_restart(work: Path) -> None:
    journal = Journal(work, "abc")
    journal.add(ONE, found(ONE))
    journal.add(TWO, found(TWO))
    assert Journal(work, "abc").known == {ONE.id: found(ONE), TWO.id: found(TWO)}


@pytest.mark.parametrize("outcome", [CheckOutcome.FAILED, CheckOutcome.SKIPPED])
def test_failed_checks_run_again(work: Path, outcome: CheckOutcome) -> None:
    Journal(work, "abc").add(ONE, found(ONE, outcome))
    assert Journal(work, "abc").known == {}


def test_partly_passed_checks_run_again(work: Path) -> None:
    Journal(work, "abc").add(ONE, found(ONE, reason="static fails in shift: timeout"))
    assert Journal(work, "abc").known == {}


def test_other_key_has_own_journal(work: Path) -> None:
    Journal(work, "abc").add(ONE, found(ONE))
    assert Journal(work, "def").known == {}
    assert list(Journal(work, "abc").known) == [ONE.id]


@pytest.mark.parametrize("left", [1, 20, 60])
def test_truncated_line_is_ignored(work: Path, file: Path, left: int) -> None:
    journal = Journal(work, "abc")
    journal.add(ONE, found(ONE))
    journal.add(TWO, found(TWO))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:left])
    again = Journal(work, "abc")
    assert list(again.known) == [ONE.id]
    again.add(TWO, found(TWO))
    assert list(Journal(work, "abc").known) == [ONE.id, TWO.id]


STRANGE = '{"id": "x", "outcome": "passed", "details": []}'


@pytest.mark.parametrize("text", ["", "\n", "not json\n", "[]\n{}\n3\n", STRANGE, "\x00\xff"])
def test_damaged_journal_is_empty(work: Path, file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text, "latin-1")
    assert Journal(work, "abc").known == {}


def test_forget_removes_journal(work: Path, file: Path) -> None:
    journal = Journal(work, "abc")
    journal.add(ONE, found(ONE))
    journal.forget()
    assert Journal(work, "abc").known == {} and not file.exists()
    Journal(work, "abc").forget()
