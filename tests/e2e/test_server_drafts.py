"""A draft beside a server's target, both with caches that grow by copy: memory that the draft lacks ends no request.

Of the allocations that growing to 1024 cells takes, the first three are the target's (two layers and the compute
buffers) and the next three the draft's: the prompt is longer than 512 cells, so that a smaller step would not do, and
the target has each batch first. A toy with an MTP layer has one layer of attention: the draft's begin with the third.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.verify import drafts
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving, spoken

ARGS = ("-c", "2048", "-np", "1", "--cache-ram", "0", "-lv", "4", "--spec-draft-n-max", "4")
ASKED = [(prompt(1, 600), 100), (prompt(1, 600) + " and the stone", 50)]


def answers(real: Real, log: Path, kind: str, *more: str) -> tuple[list[dict[str, Any]], str]:
    model = spoken(real, "llama-dense")
    draft: tuple[str, ...] = ("-md", str(model))  # drafts for itself: all that it drafts is accepted
    if kind == "draft-mtp":
        model = drafts.mtp(spoken(real, drafts.MTP_TOY), real.tree / "build" / "verify")
        draft = ()
    with serving(real, model, log, *ARGS, "--spec-type", kind, *draft, *more) as server:
        answered = [completion(server, text, n) for text, n in ASKED]
    return answered, server.log


def accepted(answer: dict[str, Any]) -> float:
    return float(answer["timings"]["draft_n_accepted"] / answer["timings"]["draft_n"])


@pytest.fixture(scope="module")
def expected(real: Real, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    seen, _ = answers(real, tmp_path_factory.mktemp("static") / "log", "draft-simple")
    assert min(map(accepted, seen)) > 0.95
    return [a["content"] for a in seen]


def fail(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_FAIL", which)


@pytest.mark.parametrize("which", ["4", "5"])
def test_a_draft_without_memory_catches_up(
    real: Real, expected: list[str], which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, which)
    seen, log = answers(real, tmp_path / "log", "draft-simple", "--kv-dynamic")
    assert "no memory for the draft" in log
    assert "draft: caught up" in log
    assert [a["content"] for a in seen] == expected
    assert min(map(accepted, seen)) > 0.95


def test_a_draft_that_never_gets_memory(
    real: Real, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "4+")
    seen, log = answers(real, tmp_path / "log", "draft-simple", "--kv-dynamic")
    assert "draft: still no memory" in log
    assert [a["content"] for a in seen] == expected
    assert not any("draft_n" in a["timings"] for a in seen)


@pytest.mark.parametrize("which", ["3", "4+"])
def test_an_mtp_layer_without_memory_goes_on(
    real: Real, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = answers(real, tmp_path / "static", "draft-mtp")
    fail(monkeypatch, which)
    seen, log = answers(real, tmp_path / "log", "draft-mtp", "--kv-dynamic")
    assert "no memory for the draft" in log
    assert [a["content"] for a in seen] == [a["content"] for a in whole]
