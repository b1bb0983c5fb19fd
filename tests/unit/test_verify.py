"""Test kvtool verify from the command line, with imitated programs.

The tests read the table, the JSON, the JUnit file and the exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from kvtool import cli
from kvtool.commands import build, verify
from kvtool.result import CheckOutcome
from kvtool.verify import checks, matrix, models, plan, report
from kvtool.verify.checks import Check, Finding
from kvtool.verify.journal import Journal
from tests import fakes
from tests.unit.verifying import document, run, use_text_models

ALL = "same@llama not-grown@mamba static-fails@gpt2 no-cache@dream iswa@gemma"


def work_directory(here: Path) -> Path:
    """Return the folder in which verify works if no tree is applied."""
    return here.parent / "cache" / "verify"


@pytest.mark.usefixtures("here")
def test_all_checks_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_TOYS", ALL)
    assert run("--models", "*") == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    # the columns: class, models, runs (flash attention on and off), same, grew, not possible
    assert ["plain", "4", "8", "4", "2", "4"] in lines
    assert ["iSWA", "1", "2", "2", "2"] in lines
    assert ["all", "5", "10", "6", "4", "4"] in lines
    assert "same-not-grown (1): not-grown@mamba: why same-not-grown" in out
    assert "static-fails (1): static-fails@gpt2: why static-fails" in out
    assert "no-cache (1): no-cache@dream: why no-cache" in out
    assert "dynamic equals static: 6 checks passed, 4 not possible" in out


@pytest.mark.usefixtures("here")
def test_difference_exits_8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_TOYS", "same@llama differs")
    assert run("--models", "*") == 8
    captured = capsys.readouterr()
    assert "FAILED kv-check/differs/fa-on: differs: shift: decode 2, row 1, value 7" in captured.out
    assert "2 of 4 checks failed" in captured.err
    assert "kvtool verify --models differs" in captured.err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["dynamic-fails", "load-fails", "crash", "garbage", "contradicts"])
def test_each_failure_exits_8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    monkeypatch.setenv("FAKE_TOYS", f"same@llama {name}")
    assert run("--models", "*", "--json") == 8
    data = document(capsys)
    assert data["ok"] is False
    assert data["error"]["exit_code"] == 8
    assert [f["status"] for f in data["findings"] if f["outcome"] == "failed"]


def test_models_globs_by_comma(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_TOYS", "same@1 same@2 iswa zebra")
    assert run("--models", "same@1,is*", "--quick", "--json") == 0
    assert {f["id"].split("/")[1] for f in document(capsys)["findings"]} == {"same@1", "iswa"}


@pytest.mark.usefixtures("here")
def test_bad_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--models", "zebra*") == 2
    assert "no toy model is called zebra*" in capsys.readouterr().err
    assert run("--quick", "--matrix") == 2
    assert run("--jobs", "-1") == 2


def test_missing_program_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bin" / "kv-check").unlink()
    assert run("--models", "*") == 8
    assert "kv-check is not in" in capsys.readouterr().err


TWO = ("llama-dense", "qwen35-dense")


def test_quick_runs_every_kind(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_text_models(here, monkeypatch)
    assert run("--quick", "--json") == 0
    assert [f["id"] for f in document(capsys)["findings"]] == [
        "kv-check/llama-dense/fa-on/quick",
        "kv-check/qwen35-dense/fa-on/quick",
        "kv-check/llama-dense/fa-off/quick",
        "kv-check/qwen35-dense/fa-off/quick",
        *(
            f"kv-check/{toy}/retype/{how}"
            for toys, how in (
                (TWO, "inplace/fa-on"),
                (TWO, "copy/fa-on"),
                (TWO[:1], "streams/fa-on"),
                (TWO, "inplace/fa-off"),
                (TWO[1:], "copy-streams/fa-off"),
            )
            for toy in toys
        ),
        "completion/llama-dense",
        "completion/qwen35-dense",
        "completion/llama-dense/environment",
        "bench/llama-dense",
        "server/llama-dense/parts",
        "server/llama-dense/single",
        "server/llama-dense/batched",
        "server/qwen35-dense/single",
        "server/qwen35-dense/batched",
        "memory/Qwen3.5-27B/131072",
    ]


def test_full_runs_all_toys(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_text_models(here, monkeypatch)
    assert run("--json") == 0
    ids = [f["id"] for f in document(capsys)["findings"]]
    assert sum(i.startswith("kv-check/") for i in ids) == 3 * 2 + 3 * 5 + 3
    assert {"kv-check/grown", "kv-check/llama-dense/train", "kv-check/qwen35-dense-mtp/draft"} <= set(ids)
    assert "server/llama-dense/unified" in ids
    monkeypatch.setenv("FAKE_TOYS", "llama-dense not-grown@a not-grown@b")
    (here / "bin" / "libllama.so").write_bytes(b"new")
    assert run("--json") == 8
    failed = [f for f in document(capsys)["findings"] if f["outcome"] == "failed"]
    assert [f["id"] for f in failed] == ["kv-check/grown"]


@pytest.mark.parametrize(("how", "toys"), [("--quick", "not-grown"), ("--matrix", "same not-grown@a not-grown@b")])
def test_ungrown_models_fail(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, toys: str
) -> None:
    use_text_models(here, monkeypatch)
    monkeypatch.setenv("FAKE_TOYS", toys)
    monkeypatch.setattr(plan, "CLASS_TOYS", ("not-grown",))
    monkeypatch.setattr(matrix, "in_memory", one_by_one)
    assert run(how, "--json") == 8
    (failed,) = (f for f in document(capsys)["findings"] if f["outcome"] == "failed")
    assert failed["status"] == "not-grown"


def test_stale_tree_exits_4(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cpp/tools/kv-check").mkdir(parents=True)
    (here / "cpp/tools/kv-check/main.cpp").touch()
    assert cli.run(["verify", "--quick", "--json"]) == 4
    assert document(capsys)["error"]["code"] == "tree"


def test_verify_before_apply_creates_no_tree(here: Path) -> None:
    assert run("--models", "*") == 0
    assert not (here / "llama.cpp").exists() and any(work_directory(here).iterdir())


def test_build_is_locked_during_verify(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "cpp/tools/kv-check").mkdir(parents=True)
    (here / "cpp/tools/kv-check/main.cpp").touch()
    seen: list[bool] = []

    def is_free() -> bool:
        try:
            with filelock.FileLock(here / "kvtool.lock").acquire(blocking=False):
                return True
        except filelock.Timeout:
            return False

    def built(*_: object) -> SimpleNamespace:
        seen.append(is_free())
        return SimpleNamespace(build_dir=here, bin_dir=here / "bin")

    def verified(*_: object) -> list[Finding]:
        seen.append(is_free())
        return []

    monkeypatch.setattr(build, "build_project", built)
    monkeypatch.setattr(verify.Verification, "run", verified)
    assert cli.run(["verify", "--quick"]) == 8
    assert seen == [True, False] and is_free()
    with filelock.FileLock(here / "kvtool.lock"):
        assert cli.run(["verify", "--quick"]) == 8
    assert len(seen) == 3


def test_second_run_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = work_directory(here)
    work.mkdir(parents=True)
    with filelock.FileLock(work / "kvtool.lock"):
        assert run("--models", "*") == 8
    assert "another kvtool verify is running there" in capsys.readouterr().err


def test_classes_are_ordered() -> None:
    found = [
        Finding(f"kv-check/m/{name}", "kv-check", name, CheckOutcome.PASSED, "same")
        for name in ("zzz", "hybrid", "plain", "iSWA")
    ]
    assert [row.memory_class for row in report.class_rows(found)] == ["plain", "iSWA", "hybrid", "zzz"]


def test_class_toys_are_unique() -> None:
    assert len(set(checks.CLASS_TOYS)) == len(checks.CLASS_TOYS)
    assert set(checks.CHEAP_TOYS) < set(checks.CLASS_TOYS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("toys", "program"), [("timeout", "kv-check"), ("llama-dense", "llama-server")])
def test_interrupt_leaves_no_program(
    here: Path, monkeypatch: pytest.MonkeyPatch, toys: str, program: str, number: signal.Signals
) -> None:
    monkeypatch.setenv("FAKE_TOYS", toys)
    driver = here / "driver.py"
    driver.write_text(
        "import sys\nfrom pathlib import Path\nfrom kvtool import cli\nfrom kvtool.verify import models\n"
        "from tests import fakes\n"
        "models.text_model = lambda toy, words, work: fakes.model(work, 'never-ready')\n"
        "sys.argv[1:] = ['verify', '--bin', 'bin', *sys.argv[1:]]\ncli.main()\n"
    )
    vocabulary = here / "llama.cpp" / "models" / models.VOCABULARY
    vocabulary.parent.mkdir(parents=True)
    vocabulary.write_bytes(b"GGUF")
    fakes.program(here / "bin" / "llama-completion", "import sys; sys.exit(1)\n")
    which = ["--models", "*"] if program == "kv-check" else ["--quick"]

    def running(name: str) -> list[str]:
        listed = subprocess.run(["ps", "-A", "-ww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        return [line for line in listed.splitlines() if str(here / "bin" / name) in line]

    def restore_sigint() -> None:
        # a background job of a shell ignores SIGINT, and its children inherit that
        signal.signal(number, signal.SIG_DFL)

    env = {**os.environ, "PYTHONPATH": str(Path(verify.__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(driver), *which], env=env, preexec_fn=restore_sigint) as process:
        deadline = time.monotonic() + 60
        # look at least once, because a program may run only for a moment
        while not (there := running(program)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        assert there
        assert process.wait(120) == 130
    assert running("") == []


def test_interrupted_matrix_resumes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # "once" crashes in its second run, so the result of the first run must be used again
    monkeypatch.setenv("FAKE_TOYS", "once")
    monkeypatch.setattr(matrix, "in_memory", one_by_one)
    real, seen = Journal.add, []

    def interrupted(self: Journal, check: Check, finding: Finding) -> None:
        seen.append(check.id)
        if len(seen) == 2:
            raise KeyboardInterrupt
        real(self, check, finding)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", interrupted)
        assert run("--matrix", "--jobs", "1") == 130
    (journal,) = work_directory(here).glob("matrix-*.jsonl")
    capsys.readouterr()
    assert run("--matrix", "--jobs", "1", "--json") == 8
    captured = capsys.readouterr()
    assert "1 of 2 checks were done by an earlier run" in captured.err
    statuses = [f["status"] for f in json.loads(captured.out)["findings"]]
    # the second check was interrupted and has no result; the last finding is about growth
    assert statuses == ["same", "crash", "same"]
    assert not journal.exists()


def one_by_one(toys: Sequence[Path]) -> list[Check]:
    """Return two checks of each test model, instead of the hundreds of a matrix."""
    return [Check(f"kv-check/{t.stem}/matrix/f16-fa-on/{n}/inplace", "kv-check", t) for t in toys for n in ("1", "4")]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("toys", ["static-fails", "no-cache@dream skipped"])
def test_nothing_compared_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toys: str) -> None:
    monkeypatch.setenv("FAKE_TOYS", toys)
    assert run("--models", "*") == 8
    captured = capsys.readouterr()
    assert "nothing was compared" in captured.err
    assert "dynamic equals static" not in captured.out


def test_unwritable_report_prints_findings(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_findings: object) -> str:
        raise OSError("the disk is full")

    monkeypatch.setattr(verify, "as_junit", full)
    monkeypatch.setattr(matrix, "in_memory", one_by_one)
    assert run("--matrix", "--junit", "report.xml", "--json") == 1
    data = document(capsys)
    assert data["error"]["why"] == "the disk is full" and data["findings"] and "unwritten" not in data
    assert list(work_directory(here).glob("matrix-*.jsonl")), (
        "every finding is journaled, so that a second run is short"
    )
