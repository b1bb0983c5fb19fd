"""What a server says of the memory that its caches take: in /metrics and /props, and only with the flag."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify import models
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving, spoken

ARGS = ("-c", "4096", "-np", "2", "--metrics", "--slots", "--cache-ram", "0")
LINE = re.compile(r'^llamacpp:kv_cache_(\w+)\{context="(\w+)"\} (\S+)$', re.MULTILINE)
GAUGES = ("reserved_bytes", "committed_bytes", "used_bytes", "cells_max", "cells", "cells_used")
COUNTERS = (
    *("grow_total", "shrink_total", "copied_bytes_total", "grow_seconds_total"),
    *("retype_total", "retype_seconds_total"),
)


def numbers(server: LlamaServer) -> dict[str, dict[str, str]]:
    """By context and name, as /metrics writes them."""
    out: dict[str, dict[str, str]] = {}
    for name, context, value in LINE.findall(server.http.get("/metrics").text):
        out.setdefault(context, {})[name] = value
    return out


def props(server: LlamaServer) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = server.http.get("/props").json()["kv_cache"]
    return out


@pytest.fixture(scope="module")
def model(real: Real) -> Path:
    return spoken(real, "llama-dense")


def test_without_the_flag_there_is_nothing_new(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS) as server:
        completion(server, prompt(1, 50), 4)
        for path in ("/metrics", "/slots", "/props"):
            assert "kv_cache" not in server.http.get(path).text


def test_growth_and_what_goes_back(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, "--slot-save-path", tmp_path, "--kv-dynamic") as server:
        start = numbers(server)["target"]
        assert set(start) == {*GAUGES, *COUNTERS}
        completion(server, prompt(1, 1000), 4)
        grown = numbers(server)["target"]
        assert int(grown["committed_bytes"]) > int(start["committed_bytes"])
        assert int(grown["cells_used"]) > 1000 and int(grown["grow_total"]) > 0
        assert grown["reserved_bytes"] == start["reserved_bytes"]
        assert grown["cells_max"] == "4096"
        assert {k: v for k, v in props(server)["target"].items() if k in GAUGES} == {k: int(grown[k]) for k in GAUGES}
        server.slot("erase", 0)
        server.slot("erase", 1)
        gone = numbers(server)["target"]
        assert (gone["cells_used"], gone["used_bytes"]) == ("0", "0")
        assert int(gone["committed_bytes"]) < int(grown["committed_bytes"])
        assert int(gone["shrink_total"]) > 0
        types = {"type_k": "f16", "type_v": "f16"}
        assert [slot["kv_cache"] for slot in server.http.get("/slots").json()] == [types] * 2
        assert types.items() <= props(server)["target"].items()


def test_large_numbers_have_all_their_digits(real: Real, tmp_path: Path) -> None:
    """Reserved bytes of Qwen3.5-27B's cache: more digits than a double is printed with by default."""
    model = models.cache_model(models.QWEN35_27B, real.tree / "build" / "verify")
    cells = 5120
    args = ("-c", str(cells), "-np", "1", "--metrics", "--no-warmup", "--no-jinja", "--kv-dynamic")
    with serving(real, model, tmp_path / "log", *args) as server:
        expected = str(cells * models.QWEN35_27B.bytes_per_cell())
        assert len(expected) > 6
        assert numbers(server)["target"]["reserved_bytes"] == expected


def test_the_draft_has_numbers_of_its_own(real: Real, model: Path, tmp_path: Path) -> None:
    draft = ("-md", model, "--spec-type", "draft-simple")
    with serving(real, model, tmp_path / "log", *ARGS, *draft, "--kv-dynamic") as server:
        completion(server, prompt(1, 1000), 4)
        seen = numbers(server)
        assert set(seen) == set(props(server)) == {"target", "draft"}
        assert int(seen["draft"]["cells_used"]) > 1000
        assert int(seen["draft"]["committed_bytes"]) > 0


def test_sleep_takes_nothing_and_forgets_nothing(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, "--sleep-idle-seconds", "1", "--kv-dynamic") as server:
        completion(server, prompt(1, 1000), 4)
        before = numbers(server)["target"]
        deadline = time.monotonic() + 30
        while not server.http.get("/props").json()["is_sleeping"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for asleep in (numbers(server)["target"], {k: str(v) for k, v in props(server)["target"].items()}):
            assert [asleep[name] for name in GAUGES] == ["0"] * len(GAUGES)
            assert asleep["grow_total"] == before["grow_total"]
        completion(server, prompt(1, 1000), 4)
        awake = numbers(server)["target"]
        assert int(awake["grow_total"]) == 2 * int(before["grow_total"])
        assert float(awake["grow_seconds_total"]) > float(before["grow_seconds_total"])
