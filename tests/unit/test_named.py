"""Test kvtool verify --patch: it runs exactly the tests that series.toml names for a patch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool import cli
from kvtool.verify import named
from tests import fakes
from tests.unit.verifying import use_text_models

SERIES = """
[[patch]]
id = "cache"
why = "w"
tests = ["kv-check", "test-kv-good"]
[[patch]]
id = "tools"
why = "w"
tests = ["bench", "memory", "completion"]
[[patch]]
id = "unit"
why = "w"
tests = ["test-kv-good", "test-kv-bad"]
[[patch]]
id = "preset"
why = "w"
tests = ["preset"]
[[patch]]
id = "none"
why = "w"
[[patch]]
id = "typo"
why = "w"
tests = ["kv-chekc"]
"""


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add patches that name tests, and two unit tests."""
    use_text_models(here, monkeypatch)
    (here / "patches/series.toml").write_text(SERIES)
    (here / "cpp/tests").mkdir(parents=True)
    for name, code in (("good", 0), ("bad", 3)):
        (here / f"cpp/tests/test-kv-{name}.cpp").touch()
        fakes.program(here / f"bin/test-kv-{name}", f"import sys\nprint('assert {name}')\nsys.exit({code})\n")
    return here


def run(capsys: pytest.CaptureFixture[str], patch: str, *args: str) -> tuple[int, Any]:
    code = cli.run(["verify", "--bin", "bin", "--quick", "--patch", patch, "--json", *args])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
def test_only_named_tests_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(capsys, "cache")
    kinds = [f["kind"] for f in data["findings"]]
    assert (code, kinds[0], set(kinds)) == (0, "unit", {"unit", "kv-check"})
    assert data["findings"][0]["id"] == "unit/test-kv-good"
    code, data = run(capsys, "tools")
    assert (code, [f["kind"] for f in data["findings"]]) == (0, [*["completion"] * 3, "bench", "memory"])


@pytest.mark.usefixtures("here")
def test_failing_unit_test_exits_8(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run(capsys, "unit")
    assert code == 8 and [f["outcome"] for f in data["findings"]] == ["failed", "passed"]
    assert data["findings"][0]["reason"] == "exit code 3: assert bad"


def test_preset_is_read_by_cmake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def presets(*names: str, version: int = 4) -> None:
        entries = [{"name": name, "generator": "Ninja", "binaryDir": "build"} for name in names]
        text = json.dumps({"version": version, "configurePresets": entries})
        (here / "llama.cpp/CMakePresets.json").write_text(text)

    presets(named.PRESET)
    assert run(capsys, "preset")[0] == 0
    presets("other")
    code, data = run(capsys, "preset")
    assert code == 8 and named.PRESET in data["findings"][0]["reason"]
    presets(named.PRESET, named.PRESET)
    code, data = run(capsys, "preset")
    assert code == 8 and "cannot read" in data["findings"][0]["reason"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("patch", "says"),
    [("nope", "name one of: cache"), ("none", "names no test"), ("typo", "'kv-chekc'")],
)
def test_unrunnable_patch_is_usage_error(capsys: pytest.CaptureFixture[str], patch: str, says: str) -> None:
    code, data = run(capsys, patch)
    assert code == 2 and says in " ".join(str(value) for value in data["error"].values())


def test_only_needed_targets_are_built(here: Path) -> None:
    assert named.targets({"preset"}, here / "cpp") == ("kv-check",)
    assert named.targets({"server", "test-kv-bad"}, here / "cpp") == (
        "kv-check",
        "test-llama-archs",
        "llama-server",
        "test-kv-bad",
    )
    tools = {"llama-completion", "llama-bench", "llama-server"}
    assert set(named.targets(named.CHECK_KINDS, here / "cpp")) == {"kv-check", "test-llama-archs", *tools}


@pytest.mark.usefixtures("here")
def test_patch_and_models_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "cache", "--models", "llama*")[0] == 2
