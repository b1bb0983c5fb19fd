"""Test the JSON and JUnit reports of kvtool verify, and its next steps."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvtool import cli
from kvtool.console import Console
from kvtool.errors import DiskError
from kvtool.result import CheckOutcome
from kvtool.verify import report
from kvtool.verify.checks import Finding
from tests.unit.verifying import document, run


@pytest.mark.usefixtures("here")
def test_json_is_frozen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_TOYS", "same@llama")
    assert run("--models", "same*", "--json") == 0
    data = document(capsys)
    assert list(data) == ["command", "ok", "tag", "mode", "bin_dir", "classes", "findings", "junit", "seconds"]
    assert (data["command"], data["ok"], data["mode"], data["junit"]) == ("verify", True, "full", None)
    one = {"runs": 1, "same": 1, "grown": 1, "not_run": 0, "failed": 0}
    assert data["classes"] == [{"memory_class": "plain", "models": 1, "variants": {"fa-on": one, "fa-off/quick": one}}]
    found = data["findings"][0]
    assert list(found) == ["id", "kind", "group", "outcome", "status", "reason", "grown", "seconds", "details"]
    assert (found["id"], found["outcome"], found["grown"]) == ("kv-check/same@llama/fa-on", "passed", True)
    assert found["details"] == {
        "arch": "fake",
        "cells_start": 256,
        "cells_end": 512,
        "growths": [[256, 512]],
        "checks": {"prompt": "same"},
        "reasons": {},
        "values": 300,
    }


def test_junit_is_valid(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_TOYS", "same@llama differs static-fails")
    assert run("--models", "*", "--junit", "reports/verify.xml") == 8
    root = ET.parse(here / "reports" / "verify.xml").getroot()
    suite = root.find("testsuite")
    assert suite is not None
    counts = {k: suite.get(k) for k in ("name", "tests", "failures", "skipped")}
    assert counts == {"name": "kv-check", "tests": "6", "failures": "2", "skipped": "2"}
    failure = next(iter(suite.iter("failure")))
    assert (failure.get("type"), failure.get("message")) == (
        "differs",
        "shift: decode 2, row 1, value 7: static 0.5, dynamic 0.25",
    )


def test_junit_escapes_model_text() -> None:
    found = Finding("completion/x", "completion", "", CheckOutcome.FAILED, "differs", "static '\x00\x1b]\ud800' <&>\"")
    text = report.as_junit([found])
    message = ET.fromstring(text.encode("utf-8")).find(".//failure")
    assert message is not None and "<&>" in (message.get("message") or "")


@pytest.mark.parametrize("option", ["--markdown", "--junit"])
def test_unwritable_report_fails_at_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setenv("FAKE_TOYS", "forever")
    (here / "file").touch()
    assert run("--matrix", option, "file/report") == 1
    assert "cannot write file/report" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--markdown", "--junit"])
def test_usage_error_leaves_no_report(here: Path, option: str) -> None:
    assert run("--matrix", option, "new/report", "--models", "none") == 2
    assert not Path("new/report").exists()


@pytest.mark.parametrize(
    ("id_", "again"),
    [
        ("kv-check/m/fa-on", "kvtool verify --models m"),
        ("kv-check/m/fa-off/quick", "kvtool verify --models m"),
        ("kv-check/m/fa-on/rpc", "the same command"),
        ("kv-check/m/retype/copy/fa-on", "the same command"),
        ("kv-check/m/draft", "the same command"),
        ("kv-check/grown", "the same command"),
    ],
)
def test_next_step_repeats_failed_check(id_: str, again: str) -> None:
    found = Finding(id_, "kv-check", "", CheckOutcome.FAILED, "differs")
    failure = report.Verified("v1", "full", Path(), (), (found,), None, 0.0).failure
    assert failure is not None and failure.next_step.startswith(f"{again} ")


def test_unwritten_report_with_failed_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Finding("kv-check/m/fa-on", "kv-check", "", CheckOutcome.FAILED, "differs")
    told = report.Verified("v1", "full", Path(), (), (found,), None, 0.0, error=DiskError("the disk is full"))
    assert told.to_json()["unwritten"] == "the disk is full"
    cli.show_result(Console(), told)
    assert capsys.readouterr().out.startswith("the disk is full\n")
