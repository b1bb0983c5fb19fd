"""Test the report and the exit code of `kvtool doctor`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kvtool import cli
from kvtool.commands import doctor
from tests import fakes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVTOOL_TREE", str(tmp_path / "tree"))
    monkeypatch.setattr("kvtool.compile.toolchain.PREFIXES", (str(tmp_path / "usr"),))
    return tmp_path


def test_ready_machine_exits_0(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    doc = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in doc["checks"]] == [
        "python", "git", "C compiler", "C++ compiler", "cmake", "ninja", "ccache", "npm", "openssl", "disk", "tree",
        "cache",
    ]  # fmt: skip
    assert {check["name"] for check in doc["checks"] if not check["required"]} == {"ccache", "npm", "openssl"}
    assert list(doc["backends"]) == ["cpu", "metal", "cuda", "vulkan"]
    assert doc["backends"]["cpu"] == ""
    assert not (place / "cache").exists(), "the check changes nothing"


def test_console_prints_one_line_per_check(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ready: kvtool fetch" in out
    assert "C++ compiler" in out


def test_missing_tools_exit_7_with_hints(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert cli.run(["doctor", "--json"]) == 7
    doc = json.loads(capsys.readouterr().out)
    assert doc["ok"] is False
    assert doc["error"]["what"] == "not ready: git, C compiler, C++ compiler, cmake, ninja"
    for check in doc["checks"]:
        if not check["ok"]:
            assert [line.partition(":")[0] for line in check["how"].splitlines()] == [
                "Debian/Ubuntu",
                "macOS",
                "Windows",
            ]
    assert all(reason for reason in doc["backends"].values())


def test_optional_tools_may_be_missing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, **more: None if name in ("npm", "ccache") else real(name, **more))
    assert cli.run(["doctor"]) == 0
    assert "npm is optional; to get it" in capsys.readouterr().out


def test_full_disk_is_not_ready(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(place)._replace(free=doctor.NEEDED_BYTES - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    failure = doctor.diagnose(place / "tree", place / "cache").failure
    assert failure is not None and failure.what == "not ready: disk"
    assert failure.exit_code == 7


def test_unwritable_cache_is_not_ready(place: Path) -> None:
    (place / "file").touch()
    found = {check.name: check for check in doctor.diagnose(place / "tree", place / "file" / "cache").checks}
    assert not found["cache"].ok
    assert "KVTOOL_CACHE" in found["cache"].how


def test_old_git_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bin").mkdir()
    old = fakes.program(place / "bin" / "git", "print('git version 2.37.7')")
    monkeypatch.setenv("PATH", str(old.parent), prepend=os.pathsep)
    assert cli.run(["doctor", "--json"]) == 7
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == "not ready: git" and "2.38 is needed" in error["why"] and "git-core" in error["next"]


def test_requested_backend_is_required(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--vulkan", "--json"]) == 7
    assert "Vulkan headers" in json.loads(capsys.readouterr().out)["error"]["what"]


def test_doctor_outside_project(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("KVTOOL_PROJECT", str(place / "no-project"))
    assert cli.run(["doctor"]) == 0
