"""Test how kv-check and the measurement of memory are run, with an imitated program that fails in every way."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from kvtool import machine
from kvtool.result import CheckOutcome
from kvtool.verify import runner
from kvtool.verify.checks import Check, Finding
from kvtool.verify.devices import IN_MEMORY
from tests import fakes

FAST = 120.0  # seconds for programs that end at once, because the machine may be busy


@pytest.fixture
def kv_check(tmp_path: Path) -> Path:
    return fakes.programs(tmp_path / "bin") / "kv-check"


def check_on(directory: Path, name: str, timeout: float = FAST) -> Check:
    return Check(f"kv-check/{name}/fa-on", "kv-check", fakes.model(directory, name), timeout=timeout)


@pytest.mark.parametrize(
    ("name", "status", "outcome"),
    [
        ("same", "same", CheckOutcome.PASSED),
        ("not-grown", "same-not-grown", CheckOutcome.PASSED),
        ("static-fails", "static-fails", CheckOutcome.SKIPPED),
        ("no-cache", "no-cache", CheckOutcome.SKIPPED),
        ("skipped", "skipped", CheckOutcome.SKIPPED),
        ("not-run", "not-run", CheckOutcome.FAILED),
        ("differs", "differs", CheckOutcome.FAILED),
        ("dynamic-fails", "dynamic-fails", CheckOutcome.FAILED),
        ("load-fails", "load-fails", CheckOutcome.FAILED),
        ("contradicts", "garbage", CheckOutcome.FAILED),
        ("contradicts-too", "garbage", CheckOutcome.FAILED),
        ("unheard", "garbage", CheckOutcome.FAILED),
        ("garbage", "garbage", CheckOutcome.FAILED),
        ("silent", "garbage", CheckOutcome.FAILED),
        ("exit-3", "crash", CheckOutcome.FAILED),
        ("crash", "crash", CheckOutcome.FAILED),
    ],
)
def test_status_of_each_ending(kv_check: Path, tmp_path: Path, name: str, status: str, outcome: CheckOutcome) -> None:
    found = runner.kv_check(check_on(tmp_path, name), kv_check)
    assert (found.status, found.outcome) == (status, outcome)


def test_hanging_run_times_out(kv_check: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_GRACE", 0.0)
    found = runner.kv_check(check_on(tmp_path, "timeout", timeout=1.0), kv_check)
    assert (found.status, found.outcome) == ("timeout", CheckOutcome.FAILED)
    assert "did not finish within 2 s" in found.reason and found.group == "other" and found.seconds > 1


def test_memory_class_from_log(kv_check: Path, tmp_path: Path) -> None:
    assert runner.kv_check(check_on(tmp_path, "iswa"), kv_check).group == "iSWA"


def test_findings_keep_check_order(kv_check: Path, tmp_path: Path) -> None:
    names = ["same", "differs", "crash", "static-fails", "same@2", "iswa"]
    seen: list[tuple[int, str]] = []
    found = runner.kv_checks(
        [check_on(tmp_path, n) for n in names],
        kv_check,
        [IN_MEMORY] * 2,
        lambda done, running: seen.append((done, running)),
    )
    assert [f.id.split("/")[1] for f in found] == names
    assert seen[-1][0] == len(names)
    assert any("same" in running for _, running in seen)


def memory(directory: Path, name: str, available: int | None = None, timeout: float = FAST) -> Finding:
    check = Check("memory/x/131072", "memory", fakes.model(directory, name), timeout=timeout)
    return runner.memory(check, directory / "bin" / "kv-check", available)


@pytest.mark.usefixtures("kv_check")
def test_memory_compares_both_sides(tmp_path: Path) -> None:
    found = memory(tmp_path, "slim")
    assert found.outcome is CheckOutcome.PASSED and found.seconds > 0
    assert (found.details["dynamic_bytes"], found.details["static_bytes"]) == (20 << 20, 8590 << 20)


@pytest.mark.usefixtures("kv_check")
def test_oversized_static_side_is_skipped(tmp_path: Path) -> None:
    found = memory(tmp_path, "slim", available=4 << 30)
    assert found.outcome is CheckOutcome.PASSED
    assert found.details["static_bytes"] is None
    assert "static not run: it needs 8.0 GiB and 4.0 GiB are available" in found.reason


@pytest.mark.usefixtures("kv_check")
@pytest.mark.parametrize(
    ("name", "status", "outcome"),
    [
        ("fat", "too-big", CheckOutcome.FAILED),
        ("mute", "garbage", CheckOutcome.FAILED),
        ("no-context", "static-fails", CheckOutcome.FAILED),
        ("dies-late", "dynamic-fails", CheckOutcome.FAILED),
        ("unknown", "skipped", CheckOutcome.SKIPPED),
    ],
)
def test_implausible_memory_fails(tmp_path: Path, name: str, status: str, outcome: CheckOutcome) -> None:
    found = memory(tmp_path, name)
    assert (found.status, found.outcome) == (status, outcome)


@pytest.mark.usefixtures("kv_check")
def test_memory_timeout_fails(tmp_path: Path) -> None:
    assert memory(tmp_path, "slow", timeout=1.0).status == "timeout"


def test_available_memory_is_bytes_or_none() -> None:
    free = machine.available_memory()
    assert free is None or free > 2**20


def test_cgroup_page_cache_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemAvailable: 1000 kB",
        "/sys/fs/cgroup/memory.max": "1000\n",
        "/sys/fs/cgroup/memory.current": "900\n",
        "/sys/fs/cgroup/memory.stat": "file 800\ninactive_file 700\n",
    }
    monkeypatch.setattr(machine, "_text", files.get)
    assert machine.available_memory() == 800
    files["/sys/fs/cgroup/memory.stat"] = "inactive_file 7000\n"
    assert machine.available_memory() == 1000


def test_finding_is_frozen(kv_check: Path, tmp_path: Path) -> None:
    found = runner.kv_check(check_on(tmp_path, "same"), kv_check)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.status = "differs"  # type: ignore[misc]


def test_interrupt_kills_running_checks(kv_check: Path, tmp_path: Path) -> None:
    checks = [check_on(tmp_path, "forever", timeout=3600), check_on(tmp_path, "forever@2", timeout=3600)]

    def interrupt(_done: int, running: str) -> None:
        if "forever" in running:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.kv_checks(checks, kv_check, [IN_MEMORY], interrupt)
    # the imitated program would sleep for an hour; if it still ran, its command line would be in the list
    listed = subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed
