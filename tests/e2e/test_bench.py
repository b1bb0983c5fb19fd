"""Test the numbers that kvtool bench counts, but not its times.

It uses the real build and test models of three memory classes.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.e2e.conftest import Real, kvtool

QUICK = ("bench", "--quick", "--ctx", "2048", "--rounds", "2")


@pytest.fixture(scope="module", params=["llama-dense", "gemma3-dense", "deepseek2-moe"])
def benched(request: pytest.FixtureRequest, real: Real, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run kvtool bench with the patched libllama as its own baseline, so that two libraries are in one process."""
    out = tmp_path_factory.mktemp("bench")
    baseline = ("--baseline", str(real.bin)) if sys.platform == "linux" else ()
    toy = real.toys / f"{request.param}.gguf"
    code, document = kvtool(*QUICK, "--model", str(toy), "--out", str(out), *baseline)
    assert code == 0, document
    assert (out / "bench.md").is_file() and (out / "memory.svg").is_file()
    return document


def depths(document: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    return [r for r in document["rows"] if r["mode"] == mode and r["moment"] == "depth"]


def test_static_cache_commits_everything(benched: dict[str, Any]) -> None:
    assert all(d["committed"] == d["reserved"] and d["growths"] == 0 for d in depths(benched, "static"))


@pytest.mark.parametrize("mode", ["copy", "in-place"])
def test_dynamic_cache_grows_with_use(benched: dict[str, Any], mode: str) -> None:
    first, last = depths(benched, mode)
    assert first["committed"] < first["reserved"]
    assert last["growths"] > first["growths"] and last["committed"] > first["committed"]
    assert all(d["used"] <= d["committed"] <= d["reserved"] for d in depths(benched, mode))


def test_only_copy_storage_copies(benched: dict[str, Any]) -> None:
    assert depths(benched, "copy")[-1]["copied"] > 0
    assert depths(benched, "in-place")[-1]["copied"] == 0


def test_growing_calls_are_separated(benched: dict[str, Any]) -> None:
    for speed in benched["speeds"]:
        assert speed["rounds"] == 2
        assert (speed["growing"] is None) == (speed["growths"] == 0)
        assert speed["mode"] != "in-place" or speed["growths"] > 0


def test_every_bar_is_measured(benched: dict[str, Any]) -> None:
    assert [b["name"] for b in benched["bars"] if b["met"] is None] == []


def test_types_are_compared_at_all_depths(real: Real) -> None:
    toy = str(real.toys / "llama-dense.gguf")
    code, document = kvtool("bench", "--attention", "--quick", "--bin", str(real.bin), "--model", toy)
    assert code == 0, document
    calls = [(kind, depth) for kind in ("prompt", "generate") for depth in (512, 2048)]
    found = [(s["type"], s["base"], s["kind"], s["depth"], s["rounds"]) for s in document["speeds"]]
    assert found == [(name, "f16", *call, 2) for name in ("q8_0", "q4_0") for call in calls]


def test_server_answers_all_chats(real: Real) -> None:
    code, document = kvtool("bench", "--serve", "--quick", "--chats", "3", "--bin", str(real.bin))
    assert code == 0, document
    static, dynamic, *shared = document["rows"]
    for row in document["rows"]:
        assert (row["requests"], row["errors"]) == (6, 0), row
        assert 0 < row["computed"] < row["prompt_tokens"], "a second turn continues the first"
    assert static["used"] is None and 0 < dynamic["used"] <= dynamic["committed"]
    for row in shared:
        assert row["computed"] < dynamic["computed"] and row["used"] < dynamic["used"]


def test_type_changes_within_budget(real: Real) -> None:
    toy = str(real.toys / "llama-dense.gguf")
    code, document = kvtool("bench", "--types", "--quick", "--ctx", "65536", "--model", toy, "--bin", str(real.bin))
    assert code == 0, document
    types = ["f16 to q8_0", "q8_0 to f16", "f16 to q4_0"]
    assert [(c["mode"], c["types"]) for c in document["changes"]] == [
        (m, t) for m in ("in-place", "copy") for t in types
    ]
    assert all((c["before"] > c["after"]) == (c["types"] != "q8_0 to f16") for c in document["changes"])
    static, alone, ladder = document["held"]
    assert static["tokens"] == alone["tokens"] < ladder["tokens"] and ladder["type"] == "q4_0"
    assert {loss["model"] for loss in document["losses"]} == {
        "llama-dense",
        "qwen35-dense",
        "gemma3-dense",
        "lfm2-dense",
    }
    timed = "peak", "time / memcpy"  # these figures depend on the machine
    assert [b["name"] for b in document["bars"] if b["met"] is not True and not b["name"].startswith(timed)] == []
