"""Test the comparison of texts with and without the flag.

The imitated programs write equal, different or unstable texts, do not grow, or fail on one side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtool.result import CheckOutcome
from kvtool.verify import conversation, parts, texts
from kvtool.verify.checks import Check, Finding
from tests import fakes

SCRIPT = conversation.Script(rounds=2, generate=8, shift=True)


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    return fakes.programs(tmp_path / "bin")


def complete(bin_dir: Path, name: str, timeout: float = 120.0) -> Finding:
    check = Check(f"completion/{name}", "completion", fakes.model(bin_dir.parent, name), timeout=timeout)
    return texts.completion(check, bin_dir / "llama-completion", bin_dir.parent)


@pytest.mark.parametrize(
    ("name", "status", "outcome"),
    [
        ("good", "same", CheckOutcome.PASSED),
        ("differs", "differs", CheckOutcome.FAILED),
        ("not-grown", "not-grown", CheckOutcome.FAILED),
        ("always-grows", "differs", CheckOutcome.FAILED),
        ("empty", "garbage", CheckOutcome.FAILED),
        ("hasty", "same", CheckOutcome.PASSED),  # most of its runs end before their text is written
        ("never-ends", "garbage", CheckOutcome.FAILED),
        ("static-fails", "static-fails", CheckOutcome.FAILED),
        ("dynamic-fails", "dynamic-fails", CheckOutcome.FAILED),
    ],
)
def test_completion_status(bin_dir: Path, name: str, status: str, outcome: CheckOutcome) -> None:
    found = complete(bin_dir, name)
    assert (found.status, found.outcome) == (status, outcome)


def test_text_difference_names_position(bin_dir: Path) -> None:
    assert complete(bin_dir, "differs").reason == "the texts differ from character 16: static '!', dynamic '?'"


def test_hanging_completion_times_out(bin_dir: Path) -> None:
    assert complete(bin_dir, "timeout", timeout=1.0).status == "timeout"


def test_environment_variable_alone(bin_dir: Path) -> None:
    def by_env(name: str) -> Finding:
        check = Check("completion/x", "completion", fakes.model(bin_dir.parent, name), by_env=True)
        return texts.completion(check, bin_dir / "llama-completion", bin_dir.parent)

    assert by_env("good").status == "same"
    assert by_env("no-variable").status == "not-grown"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("good", "same"),
        ("not-grown", "not-grown"),
        ("static-fails", "static-fails"),
        ("dynamic-fails", "dynamic-fails"),
        ("garbage", "garbage"),
        ("timeout", "timeout"),
    ],
)
def test_bench_status(bin_dir: Path, name: str, status: str) -> None:
    timeout = 1.0 if name == "timeout" else 120.0
    check = Check("bench/x", "bench", fakes.model(bin_dir.parent, name), timeout=timeout)
    found = texts.bench(check, bin_dir / "llama-bench")
    assert found.status == status
    assert (found.outcome is CheckOutcome.PASSED) == (status == "same")


def serve(bin_dir: Path, name: str, exact: bool = True) -> Finding:
    check = Check(f"server/{name}", "server", fakes.model(bin_dir.parent, name), exact=exact)
    return conversation.serve(check, bin_dir / "llama-server", bin_dir.parent, SCRIPT)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("name", "status", "outcome"),
    [
        ("good", "same", CheckOutcome.PASSED),
        ("differs", "differs", CheckOutcome.FAILED),
        ("slot-lost", "differs", CheckOutcome.FAILED),
        ("reuse-lost", "differs", CheckOutcome.FAILED),
        ("not-grown", "not-grown", CheckOutcome.FAILED),
        ("always-grows", "differs", CheckOutcome.FAILED),
        ("dies", "static-fails", CheckOutcome.FAILED),
        ("dynamic-dies", "dynamic-fails", CheckOutcome.FAILED),
        ("static-2-dies", "unstable", CheckOutcome.FAILED),
        ("http-500", "static-fails", CheckOutcome.FAILED),
        ("slots-500", "static-fails", CheckOutcome.FAILED),
        ("nonsense", "static-fails", CheckOutcome.FAILED),
    ],
)
def test_server_status(bin_dir: Path, name: str, exact: bool, status: str, outcome: CheckOutcome) -> None:
    found = serve(bin_dir, name, exact)
    assert (found.status, found.outcome) == (status, outcome), found.reason


def test_static_repeat_explains_dynamic_text(bin_dir: Path) -> None:
    # The imitated server gives one text at its first and third start, and another text at its second and fourth start.
    # The order is static-1, dynamic, static-2, static-3. So only static-3 gives the same text as the dynamic run.
    found = serve(bin_dir, "flips", exact=False)
    assert (found.status, found.details["static_runs"]) == ("same", 4 - 1)
    assert found.details["not_repeated_by_static"] > 0


def test_unstable_static_server_fails(bin_dir: Path) -> None:
    found = serve(bin_dir, "drifts", exact=False)
    assert (found.status, found.outcome) == ("unstable", CheckOutcome.FAILED)
    assert found.details["static_runs"] == conversation.STATIC_RUNS
    assert "proves nothing" in found.reason


def test_dynamic_only_text_differs(bin_dir: Path) -> None:
    found = serve(bin_dir, "rare", exact=False)
    assert (found.status, found.details["static_runs"]) == ("differs", conversation.STATIC_RUNS)


def test_flipping_exact_server_is_unstable(bin_dir: Path) -> None:
    assert serve(bin_dir, "drifts", exact=True).status == "unstable"


def test_misread_slot_file_differs(bin_dir: Path) -> None:
    found = serve(bin_dir, "other-file")
    assert found.status == "differs"
    assert "the other kind's slot file" in found.reason


class Parts:
    """Imitate a llama-server with a projector and a draft model. With --draft-lazy, they must be loaded first."""

    def __init__(self, args: list[str], grows: bool) -> None:
        self.has = set() if parts.LAZY[1] in args else {"speculative", "mmproj"}
        self.log = "resizing KV cache from 256 to 512 cells" if grows else ""

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != "/v1/chat/completions":
            self.has = self.has - {body.get("unload")} | {path[1:]}
            return {}
        text = isinstance(content := body["messages"][0]["content"], str)
        said = {"message": {"content": str(type(content))}}
        return {"choices": [said], "timings": {"draft_n": 1} if text and "speculative" in self.has else {}}


@pytest.mark.parametrize(
    ("grows", "status"), [((False, True), "same"), ((False, False), "not-grown"), ((True, True), "differs")]
)
def test_load_unload_in_growing_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: tuple[bool, bool], status: str
) -> None:
    @contextlib.contextmanager
    def serving(_binary: Path, _model: Path, args: list[str], _log: Path) -> Iterator[Parts]:
        yield Parts(args, grows[texts.FLAG in args])

    monkeypatch.setattr(parts, "llama_server", serving)
    monkeypatch.setattr(parts, "projector", lambda model, _work: model)
    binary = fakes.program(tmp_path / "llama-server", f"print({parts.LAZY!r})")
    check = Check("server/x/parts", "parts", fakes.model(tmp_path, "good"))
    assert parts.check_load_unload(check, binary, tmp_path).status == status


def test_server_help_crash_fails(tmp_path: Path) -> None:
    binary = fakes.program(tmp_path / "llama-server", "import os; os.abort()")
    found = parts.check_load_unload(Check("server/x/parts", "parts", tmp_path), binary, tmp_path)
    assert (found.status, found.outcome) == ("static-fails", CheckOutcome.FAILED)


def test_prompts_depend_on_seed() -> None:
    assert texts.prompt(1, 300) == texts.prompt(1, 300)
    assert texts.prompt(1, 300) != texts.prompt(2, 300)
    assert len(texts.prompt(1, 300).split()) == 300


def test_growths_from_log() -> None:
    log = "x: resizing KV cache from 256 to 512 cells\nx: resizing KV cache from 512 to 1024 cells (1.00 MiB)\n"
    assert texts.growths(log) == [[256, 512], [512, 1024]]
