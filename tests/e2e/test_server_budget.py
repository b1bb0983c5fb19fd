"""How much a server's caches may be: --kv-budget, --kv-auto-quant, --kv-cache-tokens, --kv-cache-demand-paged."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtool.errors import VerifyError
from kvtool.verify import models
from kvtool.verify.projector import projector
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.projector import MARKER, see
from tests.e2e.servers import completion, part, refusal, serving, spoken, until_it_generates, until_logged, weights

PLAIN = ("-np", "1", "--cache-ram", "0", "--no-warmup")


@pytest.fixture(scope="module")
def model(real: Real) -> Path:
    return spoken(real, "llama-dense")


@pytest.fixture(scope="module")
def wide(real: Real) -> Path:
    """A model of 64 KiB a cell, trained on 262144."""
    return models.cache_model(models.QWEN35_27B, real.tree / "build" / "verify")


def props(server: LlamaServer) -> Any:
    return server.http.get("/props").json()


def n_ctx(server: LlamaServer) -> int:
    return int(props(server)["default_generation_settings"]["n_ctx"])


@pytest.mark.parametrize(
    ("args", "cells"),
    [
        (("--kv-budget", "100"), range(1400, 1601)),  # 100 MiB of f16, less what the compute buffers grow by
        (("--kv-budget", "100", "--kv-auto-quant", "f16,q8_0,q4_0"), range(5000, 5690)),
        (("--kv-budget", "100", "--kv-auto-quant", "q8_0"), range(2700, 3012)),
        (("--kv-budget", "100000"), (262144,)),
        (("--kv-budget", "100", "-c", "4096"), (4096,)),
        (("--kv-budget", "100", "-c", "0"), (262144,)),  # all that the model has, by request
        (("--kv-budget", "100", "--kv-cache-tokens", "512"), (512,)),
        (("--kv-cache-tokens", "1024"), (1024,)),
        (("--kv-cache-tokens", "1024", "-c", "8192"), (1024,)),
        (("--kv-cache-tokens", "8192", "-c", "1024"), (1024,)),
        (("--kv-cache-tokens", "1000000"), (262144,)),
    ],
)
def test_the_size_of_the_context(
    real: Real, wide: Path, tmp_path: Path, args: tuple[str, ...], cells: range | tuple[int, ...]
) -> None:
    with serving(real, wide, tmp_path / "log", *PLAIN, "--no-jinja", *args, "--kv-dynamic") as server:
        assert n_ctx(server) in cells


def test_cells_over_all_slots(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "8192", "-np", "4", "--no-kv-unified", "--kv-cache-tokens", "2048", "--kv-dynamic")
    with serving(real, model, tmp_path / "log", *args) as server:
        assert n_ctx(server) == 512
        assert props(server)["kv_cache"]["target"]["cells_max"] == 2048


def test_what_a_server_says_of_its_budget(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "4096", *PLAIN, "--metrics", "--kv-budget", "64", "--kv-auto-quant", "f16,q8_0,q4_0")
    with serving(real, model, tmp_path / "log", *args) as server:
        completion(server, prompt(1, 300), 4)
        said = props(server)["kv_budget"]
        assert said["types"] == ["f16", "q8_0", "q4_0"]
        assert said["bytes"] == 64 * 1024 * 1024
        assert (said["down_total"], said["up_total"]) == (0, 0)
        assert "llamacpp:kv_budget_down_total 0" in server.get("/metrics")
        assert props(server)["kv_cache"]["target"]["cells"] < 4096  # it implies --kv-dynamic
    with serving(real, model, tmp_path / "log", "-c", "4096", *PLAIN, "--kv-cache-demand-paged") as server:
        assert props(server)["kv_cache"]["target"]["cells"] < 4096
        assert "kv_budget" not in props(server)


def test_the_environment(real: Real, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "KV_BUDGET": "100",
        "KV_AUTO_QUANT": "q4_0",
        "KV_CACHE_TOKENS": "3000",
        "KV_CACHE_DEMAND_PAGED": "1",
    }.items():
        monkeypatch.setenv(f"LLAMA_ARG_{name}", value)
    with serving(real, wide, tmp_path / "log", *PLAIN, "--no-jinja") as server:
        said = props(server)
        assert said["kv_budget"]["types"] == ["q4_0"]
        assert n_ctx(server) == 3072  # whole blocks of 256


# --- within it -----------------------------------------------------------------------------------------------------

MIB = 1024 * 1024
LADDER = ("--kv-auto-quant", "f16,q8_0,q4_0")


@pytest.fixture(scope="module")
def talking(real: Real, wide: Path) -> Path:
    """The wide model with a vocabulary."""
    return models.spoken(wide, real.tree / "models" / models.VOCABULARY, real.tree / "build" / "verify")


class Watched:
    """A server of at most this many MiB. taken: the most that was seen."""

    def __init__(self, server: LlamaServer, mib: int) -> None:
        self.server, self.mib, self.taken = server, mib, 0

    def ask(self, slot: int, words: int, **more: Any) -> dict[str, Any]:
        answer = completion(self.server, prompt(slot, words), 8, id_slot=slot, **more)
        self.look()
        return answer

    def look(self) -> tuple[str, int, int]:
        """The type of K, and how often the cells went down and up."""
        said = props(self.server)
        budget, caches = said["kv_budget"], said["kv_cache"].values()
        assert sum(cache["committed_bytes"] for cache in caches) <= budget["committed_bytes"] <= self.mib * MIB
        self.taken = max(self.taken, budget["committed_bytes"])
        return said["kv_cache"]["target"]["type_k"], budget["down_total"], budget["up_total"]


@contextlib.contextmanager
def within(real: Real, model: Path, tmp_path: Path, mib: int, *args: str | Path) -> Iterator[Watched]:
    fixed = ("-c", "16384", "-np", "2", "--cache-ram", "0", "--no-warmup", "--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "log", *fixed, "--kv-budget", str(mib), *args) as server:
        yield Watched(server, mib)


@pytest.mark.parametrize(
    ("storage", "mib", "most"),
    [("inplace", 64, 2200), ("copy", 96, 2600)],  # by copy a block of 256 cells is always beyond those in use
)
def test_idle_slots_first_then_precision(
    real: Real, talking: Path, tmp_path: Path, storage: str, mib: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    with within(real, talking, tmp_path, mib, *LADDER, "--kv-unified") as watched:
        watched.ask(0, 500)
        assert watched.look() == ("f16", 0, 0)
        watched.ask(1, 650)  # the two have no place at f16
        assert watched.look() == ("f16", 0, 0)
        until_logged(watched.server, "purging slot 0")
        watched.ask(1, 1300)
        assert watched.look() == ("q8_0", 1, 0)
        watched.ask(1, most)
        assert watched.look() == ("q4_0", 2, 0)
        assert watched.taken > 32 * MIB
        for slot in (0, 1):
            watched.server.slot("erase", slot)
        watched.ask(0, 500)
        assert watched.look() == ("f16", 2, 1)


def test_a_plain_limit(real: Real, talking: Path, tmp_path: Path) -> None:
    with within(real, talking, tmp_path, 64, "--kv-unified") as watched:
        watched.ask(0, 500)
        answer = watched.server.http.post("/completion", json={"prompt": prompt(1, 1300), "id_slot": 1})
        assert refusal(answer)[:2] == (400, "exceed_context_size_error")  # another time is no better
        assert watched.look() == ("f16", 0, 0)
        assert watched.ask(1, 500)["tokens_predicted"] == 8


def test_a_draft_counts(real: Real, model: Path, tmp_path: Path) -> None:
    draft = ("-md", model, "--spec-type", "draft-simple", "-np", "1")
    loaded = weights(model)
    with within(real, model, tmp_path, 2 + loaded, *LADDER, *draft) as watched:
        for words in (300, 600, 1200):  # 2 KiB a cell in each of the two
            watched.ask(0, words)
        assert watched.look()[1] > 0
        assert 0 <= loaded * MIB - props(watched.server)["kv_budget"]["loaded_bytes"] < MIB
        watched.server.post("/speculative", {"action": "unload"})
        freed = watched.taken
        watched.look()
        said = props(watched.server)["kv_budget"]
        assert said["committed_bytes"] < freed - (loaded - 1) * MIB
        assert said["loaded_bytes"] == 0


# --- with what comes and goes --------------------------------------------------------------------------------------


class Seeing(Watched):
    """A server whose projector comes and goes."""

    def load(self) -> int:
        part(self.server, "mmproj", "load")
        loaded = int(props(self.server)["kv_budget"]["loaded_bytes"])
        assert loaded == self.server.http.get("/mmproj").json()["planned_bytes"] > 8 * MIB
        self.look()
        return loaded

    def unload(self) -> None:
        part(self.server, "mmproj", "unload")
        assert props(self.server)["kv_budget"]["loaded_bytes"] == 0


@pytest.fixture
def seeing(real: Real, talking: Path, tmp_path: Path) -> Iterator[Seeing]:
    sight = projector(talking, real.tree / "build" / "verify")
    args = (*LADDER, "--kv-unified", "--mmproj", sight, "--mmproj-lazy")
    with within(real, talking, tmp_path, 96, *args) as watched:
        yield Seeing(watched.server, watched.mib)


def test_idle_slots_make_room_for_the_projector(seeing: Seeing) -> None:
    seeing.ask(1, 800)
    seeing.ask(0, 600)
    assert "purging" not in seeing.server.log
    seeing.load()
    assert seeing.look() == ("f16", 0, 0)
    until_logged(seeing.server, "purging slot 0")
    assert seeing.ask(1, 800)["timings"]["cache_n"] > 700
    seeing.unload()


def test_what_idle_slots_gave_up_for_the_projector_comes_back(real: Real, talking: Path, tmp_path: Path) -> None:
    parts = ("--kv-unified", "--mmproj", projector(talking, real.tree / "build" / "verify"), "--mmproj-lazy")
    with within(real, talking, tmp_path, 96, *parts, "--no-cache-idle-slots", "--cache-ram", "200") as watched:
        watched.ask(0, 600)
        watched.ask(1, 800)
        part(watched.server, "mmproj", "load")
        part(watched.server, "mmproj", "unload")
        until_logged(watched.server, "purging slot 0")
        again = completion(watched.server, prompt(0, 600) + " river", 8)
        assert again["timings"]["cache_n"] >= 600


def test_a_running_slot_makes_room_for_the_projector(seeing: Seeing) -> None:
    """With its precision; a new conversation begins at the first rung when the projector is gone."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(completion, seeing.server, prompt(0, 1420), 500, id_slot=0)
        until_it_generates(seeing.server, running)
        assert seeing.look() == ("f16", 0, 0)
        seeing.load()
        assert not running.done()
        assert seeing.look() == ("q8_0", 1, 0)
        assert running.result()["tokens_predicted"] == 500
    seeing.unload()
    seeing.server.slot("erase", 0)
    seeing.ask(0, 1000)
    assert seeing.look() == ("f16", 1, 1)


def test_a_projector_for_which_there_is_no_room(real: Real, talking: Path, tmp_path: Path) -> None:
    work = real.tree / "build" / "verify"
    large = projector(talking, work, width=1024)  # 68 MiB; another model's, which nobody gets to see
    with within(real, talking, tmp_path, 48, *LADDER, "--mmproj", large, "--mmproj-lazy") as watched:
        watched.ask(0, 100)
        for _ in range(2):
            code, kind, message = refusal(watched.server.http.post("/mmproj", json={"action": "load"}))
            assert (code, kind) == (503, "out_of_memory_error")
            assert "the budget has no room for the multimodal projector" in message
        assert watched.ask(0, 100)["timings"]["cache_n"] > 90
        assert watched.look() == ("f16", 0, 0)
        assert props(watched.server)["kv_budget"]["loaded_bytes"] == 0
    with (
        pytest.raises(VerifyError) as failed,
        within(real, talking, tmp_path, 34, "--mmproj", projector(talking, work)),
    ):
        pass
    assert "the budget has no room for the multimodal projector" in failed.value.output


def test_a_draft_on_demand_makes_room_for_the_projector(real: Real, model: Path, tmp_path: Path) -> None:
    sight = projector(model, real.tree / "build" / "verify")
    parts = ("--mmproj", sight, "--mmproj-lazy", "-md", model, "--spec-type", "draft-simple", "--draft-lazy-auto", "0")
    with within(real, model, tmp_path, weights(model) + 12, "-np", "1", *parts) as watched:
        http = watched.server.http
        first = watched.ask(0, 100)
        assert "draft_n" in first["timings"]
        part(watched.server, "mmproj", "load")
        watched.look()
        assert http.get("/speculative").json()["state"] == "unloaded"
        second = watched.ask(0, 100)  # a draft takes only what is free
        assert (second["content"], "draft_n" in second["timings"]) == (first["content"], False)
        assert http.get("/mmproj").json()["state"] == "loaded"
        part(watched.server, "mmproj", "unload")
        part(watched.server, "speculative", "load")
        assert "draft_n" in watched.ask(0, 100)["timings"]


@pytest.mark.parametrize("ladder", [(), LADDER])
def test_a_draft_on_demand_makes_room_for_the_cells(
    real: Real, talking: Path, model: Path, tmp_path: Path, ladder: tuple[str, ...]
) -> None:
    """Before a prompt is refused, and before they lose precision."""
    draft = ("--kv-unified", "-md", model, "--spec-type", "draft-simple", "--draft-lazy-auto", "0")
    with within(real, talking, tmp_path, 96, *ladder, *draft) as watched:

        def state() -> str:
            return str(watched.server.http.get("/speculative").json()["state"])

        assert "draft_n" in watched.ask(0, 300)["timings"]
        assert state() == "loaded"
        for words in (900, 1000):  # 57 MiB of f16, and more than the draft leaves
            assert watched.ask(0, words)["tokens_predicted"] == 8
            assert (watched.look(), state()) == (("f16", 0, 0), "unloaded")


@pytest.mark.parametrize("ladder", [(), LADDER])
def test_a_projector_on_demand_makes_room_for_the_cells(
    real: Real, talking: Path, tmp_path: Path, ladder: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_MEDIA_MARKER", MARKER)
    sight = projector(talking, real.tree / "build" / "verify")
    args = ("--kv-unified", "--mmproj", sight, "--mmproj-lazy-auto", "0")
    with within(real, talking, tmp_path, 64, *ladder, *args) as watched:

        def state() -> str:
            return str(watched.server.http.get("/mmproj").json()["state"])

        assert see(watched.server, 1, id_slot=0).status_code == 200
        assert state() == "loaded"
        assert watched.ask(0, 930)["tokens_predicted"] == 8  # 60 MiB of f16, and more than it leaves
        assert (watched.look(), state()) == (("f16", 0, 0), "unloaded")
        assert see(watched.server, 1, id_slot=0).status_code == 200


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kv-auto-quant", "f16,foo"), "Unsupported cache type: foo"),
        (("--kv-auto-quant", "f16,,q8_0"), "Unsupported cache type: "),
        (("--kv-auto-quant", "q8_0,f16"), "f16 does not take less than q8_0 before it"),
        (("--kv-auto-quant", "f16,bf16"), "bf16 does not take less than f16 before it"),
        (("--kv-auto-quant", "q4_0,iq4_nl"), "iq4_nl does not take less than q4_0 before it"),
        (("--kv-auto-quant", "f16"), "f16 does not take less than what the cache begins with"),
        (("--kv-auto-quant", "f16,q8_0", "-ctk", "q8_0", "-ctv", "q8_0"), "it begins with f16, the cache with less"),
        (("--kv-auto-quant", "f16,q8_0", "-fa", "off"), "q8_0 needs flash attention"),
        (("--kv-budget", "0"), "must be positive"),
        (("--kv-cache-tokens", "-5"), "must be positive"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_loaded(real: Real, args: tuple[str, ...], said: str) -> None:
    done = subprocess.run([real.bin / "llama-server", "-m", "none.gguf", *args], capture_output=True, text=True)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
