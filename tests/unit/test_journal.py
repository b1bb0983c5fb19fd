"""The journal of `kvtool verify --matrix`: what was found out is neither lost nor believed wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtool.result import CheckOutcome
from kvtool.verify.checks import Check, Finding
from kvtool.verify.journal import Journal

ONE = Check("kv-check/a/1", "kv-check", Path("a.gguf"), args=("-fa", "on"))
TWO = Check("kv-check/b/1", "kv-check", Path("b.gguf"))


def found(check: Check, outcome: CheckOutcome = CheckOutcome.PASSED) -> Finding:
    return Finding(check.id, "kv-check", "plain", outcome, "same", grown=True, seconds=1.5, details={"values": 3})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "work" / "matrix.jsonl"


def test_what_was_found_out_is_known_to_the_next_run(file: Path) -> None:
    journal = Journal(file, "abc")
    journal.add(ONE, found(ONE))
    journal.add(TWO, found(TWO, CheckOutcome.SKIPPED))
    expected = {ONE.id: found(ONE), TWO.id: found(TWO, CheckOutcome.SKIPPED)}
    assert Journal(file, "abc").known([ONE, TWO]) == expected


def test_a_failure_runs_again(file: Path) -> None:
    Journal(file, "abc").add(ONE, found(ONE, CheckOutcome.FAILED))
    assert Journal(file, "abc").known([ONE]) == {}


def test_other_programs_know_nothing(file: Path) -> None:
    Journal(file, "abc").add(ONE, found(ONE))
    assert Journal(file, "def").known([ONE]) == {}
    # and what they said is gone: going back must not bring up a mixture
    assert Journal(file, "abc").known([ONE]) == {}


def test_other_arguments_are_another_check(file: Path) -> None:
    Journal(file, "abc").add(ONE, found(ONE))
    assert Journal(file, "abc").known([replace(ONE, args=("-fa", "off"))]) == {}


@pytest.mark.parametrize("left", [1, 20, 60])
def test_a_line_that_was_cut_off_is_left_out(file: Path, left: int) -> None:
    journal = Journal(file, "abc")
    journal.add(ONE, found(ONE))
    journal.add(TWO, found(TWO))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:left])
    again = Journal(file, "abc")
    assert list(again.known([ONE, TWO])) == [ONE.id]
    again.add(TWO, found(TWO))
    assert list(Journal(file, "abc").known([ONE, TWO])) == [ONE.id, TWO.id]


@pytest.mark.parametrize("text", ["", "\n", "not json\n", '{"programs": "abc"}\n[]\n{}\n3\n', "\x00\xff"])
def test_a_file_that_is_no_journal_is_an_empty_one(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text, "latin-1")
    assert Journal(file, "abc").known([ONE]) == {}


def test_a_complete_run_leaves_only_what_others_found(file: Path) -> None:
    journal = Journal(file, "abc")
    journal.add(ONE, found(ONE))
    journal.add(TWO, found(TWO))
    journal.forget([ONE])
    assert list(Journal(file, "abc").known([ONE, TWO])) == [TWO.id]
    journal.forget([TWO])
    assert not file.exists()
