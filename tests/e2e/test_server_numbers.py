"""Test the numbers about the memory of caches in /metrics and /props. They exist only with --kv-dynamic."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify import models
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving, until

ARGS = ("-c", "4096", "-np", "2", "--metrics", "--slots", "--cache-ram", "0")
LINE = re.compile(r'^llamacpp:kv_cache_(\w+)\{context="(\w+)"\} (\S+)$', re.MULTILINE)
SLOT_LINE = re.compile(r'^llamacpp:kv_cache_slot_(\w+)\{context="target",slot="(\d+)"\} (\d+)$', re.MULTILINE)
GAUGES = ("reserved_bytes", "committed_bytes", "used_bytes", "cells_max", "cells", "cells_used", "fragmentation")
COUNTERS = (
    *("grow_total", "shrink_total", "copied_bytes_total", "grow_seconds_total"),
    *("retype_total", "retype_seconds_total"),
)


def numbers(server: LlamaServer) -> dict[str, dict[str, str]]:
    """Return the numbers by context and name, in the form that /metrics prints."""
    out: dict[str, dict[str, str]] = {}
    for name, context, value in LINE.findall(server.http.get("/metrics").text):
        out.setdefault(context, {})[name] = value
    return out


def props(server: LlamaServer) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = server.http.get("/props").json()["kv_cache"]
    return out


def test_numbers_need_flag(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS) as server:
        completion(server, prompt(1, 50), 4)
        for path in ("/metrics", "/slots", "/props"):
            assert "kv_cache" not in server.http.get(path).text


def test_numbers_follow_growth_and_release(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, "--slot-save-path", tmp_path, "--kv-dynamic") as server:
        start = numbers(server)["target"]
        assert set(start) == {*GAUGES, *COUNTERS}
        completion(server, prompt(1, 1000), 4)
        grown = numbers(server)["target"]
        assert int(grown["committed_bytes"]) > int(start["committed_bytes"])
        assert int(grown["cells_used"]) > 1000 and int(grown["grow_total"]) > 0
        assert grown["reserved_bytes"] == start["reserved_bytes"]
        assert grown["cells_max"] == "4096"
        assert {k: v for k, v in props(server)["target"].items() if k in GAUGES} == {k: float(grown[k]) for k in GAUGES}
        unused = 1 - int(grown["used_bytes"]) / int(grown["committed_bytes"])
        assert 0 < float(grown["fragmentation"]) == pytest.approx(unused)
        server.slot("erase", 0)
        server.slot("erase", 1)
        gone = numbers(server)["target"]
        assert (gone["cells_used"], gone["used_bytes"]) == ("0", "0")
        assert int(gone["committed_bytes"]) < int(grown["committed_bytes"])
        assert int(gone["shrink_total"]) > 0
        types = {"type_k": "f16", "type_v": "f16"}
        assert all(types.items() <= slot["kv_cache"].items() for slot in server.http.get("/slots").json())
        assert types.items() <= props(server)["target"].items()


def slots(server: LlamaServer) -> list[dict[str, int]]:
    """Return the cells of the slots in the target's cache. /slots, /props and /metrics must agree."""
    out = [slot["kv_cache"]["target"] for slot in server.http.get("/slots").json()]
    assert props(server)["target"]["slots"] == out
    shown: list[dict[str, int]] = [{} for _ in out]
    for name, slot, value in SLOT_LINE.findall(server.http.get("/metrics").text):
        shown[int(slot)][name] = int(value)
    assert shown == out
    return out


@pytest.mark.parametrize("toy", ["llama-dense", "gemma2-dense", "qwen35-dense"])
def test_cells_per_slot(real: Real, toy: str, tmp_path: Path) -> None:
    args = ("-c", "2048", "-np", "4", "--kv-unified", "--metrics", "--no-cache-idle-slots", "--kv-dynamic")
    with serving(real, real.text_model(toy), tmp_path / "log", *args) as server:
        assert all(slot["cells"] == slot["runs"] == 0 for slot in slots(server))
        for slot_id in range(3):
            completion(server, prompt(slot_id, 50 + 10 * slot_id), 5, id_slot=slot_id)
        seen = slots(server)
        assert sum(slot["bytes"] for slot in seen) == int(numbers(server)["target"]["used_bytes"])
        held = [slot.get("n_prompt_tokens", 0) for slot in server.http.get("/slots").json()]
        assert [slot["cells"] for slot in seen] == held and held[0] < held[1] < held[2] and held[3] == 0
        assert [slot["runs"] for slot in seen] == [1, 1, 1, 0]
        assert any(slot["window_cells"] for slot in seen) == (toy == "gemma2-dense")
        assert all(slot["window_bytes"] <= slot["bytes"] for slot in seen)


def test_cells_of_busy_slots(real: Real, model: Path, tmp_path: Path) -> None:
    """Request several completions of one prompt. They share the cells of the prompt, and each adds cells of its own."""
    args = ("-c", "8192", "-np", "3", "--kv-unified", "--kv-dynamic")
    body = {"prompt": prompt(1, 100), "n_predict": 1000, "n_cmpl": 3, "temperature": 0.0, "ignore_eos": True}
    seen = set()
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(server.http.post, "/completion", json=body)
        while not answer.done():
            said = [slot["kv_cache"]["target"] for slot in server.http.get("/slots").json()]
            if shared := {slot["cells_shared"] for slot in said} - {0}:
                assert len(shared) == 1 and all(slot["cells"] >= slot["cells_shared"] for slot in said)
                seen.add((shared.pop(), said[0]["cells"]))
        evaluated = answer.result().json()[0]["tokens_evaluated"]
    assert {shared for shared, _ in seen} == {evaluated} and len(seen) > 3


def test_large_numbers_keep_all_digits(real: Real, no_vocab_model: Path, tmp_path: Path) -> None:
    """Use the reserved bytes of Qwen3.5-27B's cache.

    The default format of a double would not print all of their digits.
    """
    cells = 5120
    args = ("-c", str(cells), "-np", "1", "--metrics", "--no-warmup", "--no-jinja", "--kv-dynamic")
    with serving(real, no_vocab_model, tmp_path / "log", *args) as server:
        expected = str(cells * models.QWEN35_27B.bytes_per_cell())
        assert len(expected) > 6
        assert numbers(server)["target"]["reserved_bytes"] == expected


def test_draft_has_own_numbers(real: Real, model: Path, tmp_path: Path) -> None:
    draft = ("-md", model, "--spec-type", "draft-simple")
    with serving(real, model, tmp_path / "log", *ARGS, *draft, "--kv-dynamic") as server:
        completion(server, prompt(1, 1000), 4)
        seen = numbers(server)
        assert set(seen) == set(props(server)) == {"target", "draft"}
        assert int(seen["draft"]["cells_used"]) > 1000
        assert int(seen["draft"]["committed_bytes"]) > 0


def test_sleep_keeps_counters(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, "--sleep-idle-seconds", "1", "--kv-dynamic") as server:
        completion(server, prompt(1, 1000), 4)
        before = numbers(server)["target"]
        until(lambda: server.http.get("/props").json()["is_sleeping"])
        for asleep in (numbers(server)["target"], {k: str(v) for k, v in props(server)["target"].items()}):
            assert [float(asleep[name]) for name in GAUGES] == [0] * len(GAUGES)
            assert asleep.get("slots", "[]") == "[]"
            assert asleep["grow_total"] == before["grow_total"]
        completion(server, prompt(1, 1000), 4)
        awake = numbers(server)["target"]
        assert int(awake["grow_total"]) == 2 * int(before["grow_total"])
        assert float(awake["grow_seconds_total"]) > float(before["grow_seconds_total"])
