"""The journal of `kvtool verify --matrix`: what was found out is neither lost nor believed wrongly."""

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
    """The file of the journal of "abc"."""
    return work / "matrix-abc.jsonl"


def test_what_was_found_out_is_known_to_the_next_run(work: Path) -> None:
    journal = Journal(work, "abc")
    journal.add(ONE, found(ONE))
    journal.add(TWO, found(TWO))
    assert Journal(work, "abc").known == {ONE.id: found(ONE), TWO.id: found(TWO)}


@pytest.mark.parametrize("outcome", [CheckOutcome.FAILED, CheckOutcome.SKIPPED])
def test_what_did_not_pass_runs_again(work: Path, outcome: CheckOutcome) -> None:
    Journal(work, "abc").add(ONE, found(ONE, outcome))
    assert Journal(work, "abc").known == {}


def test_what_passed_in_part_runs_again(work: Path) -> None:
    Journal(work, "abc").add(ONE, found(ONE, reason="static fails in shift: timeout"))
    assert Journal(work, "abc").known == {}


def test_other_programs_know_nothing_and_take_nothing_away(work: Path) -> None:
    Journal(work, "abc").add(ONE, found(ONE))
    assert Journal(work, "def").known == {}
    assert list(Journal(work, "abc").known) == [ONE.id]


@pytest.mark.parametrize("left", [1, 20, 60])
def test_a_line_that_was_cut_off_is_left_out(work: Path, file: Path, left: int) -> None:
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
def test_a_file_that_is_no_journal_is_an_empty_one(work: Path, file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text, "latin-1")
    assert Journal(work, "abc").known == {}


def test_a_complete_run_leaves_nothing(work: Path, file: Path) -> None:
    journal = Journal(work, "abc")
    journal.add(ONE, found(ONE))
    journal.forget()
    assert Journal(work, "abc").known == {} and not file.exists()
    Journal(work, "abc").forget()
