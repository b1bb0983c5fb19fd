"""kvtool bench on the real build: a small cache, so that it takes seconds; what is counted, never what is timed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import kvtool

QUICK = ("bench", "--quick", "--ctx", "4096", "--repeats", "1")


@pytest.fixture(scope="module", params=["qwen*", "gemma*", "deepseek*"])
def benched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench")
    code, document = kvtool(*QUICK, "--models", request.param, "--out", str(out))
    assert code == 0, document
    assert (out / "bench.md").is_file() and (out / "memory.svg").is_file()
    return document


def depths(document: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    return [d for d in document["summary"]["depths"] if d["mode"] == mode]


def bar(document: dict[str, Any], name: str, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = next(b for b in document["bars"] if (b["name"], b["mode"]) == (name, mode))
    return found


def test_a_static_cache_has_everything_from_the_start(benched: dict[str, Any]) -> None:
    assert all(d["committed"] == d["reserved"] and d["growths"] == 0 for d in depths(benched, "static"))


@pytest.mark.parametrize("mode", ["copy", "in-place"])
def test_a_dynamic_cache_grows_with_what_is_used(benched: dict[str, Any], mode: str) -> None:
    first, last = depths(benched, mode)[0], depths(benched, mode)[-1]
    assert first["committed"] < first["reserved"]
    assert last["growths"] > first["growths"] and last["committed"] > first["committed"]
    assert all(d["used"] <= d["committed"] <= d["reserved"] for d in depths(benched, mode))


def test_only_one_of_them_copies(benched: dict[str, Any]) -> None:
    assert depths(benched, "copy")[-1]["copied"] > 0
    assert bar(benched, "bytes copied", "in-place")["value"] == 0


def test_a_growth_is_caught_in_a_generated_token(benched: dict[str, Any]) -> None:
    assert bar(benched, "worst call with a growth / median", "in-place")["value"] is not None


def test_every_bar_is_measured(benched: dict[str, Any]) -> None:
    beyond = "KV committed / used"  # beyond 4096 cells, which this cache does not have
    assert [b["name"] for b in benched["bars"] if b["met"] is None and b["name"] != beyond] == []
