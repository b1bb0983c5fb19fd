"""Test a pool of cells with a memory budget and a projector that is loaded on demand.

A request that waits for cells must not keep the projector loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtool.verify.projector import projector
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.budgets import within
from tests.e2e.conftest import Real
from tests.e2e.projector import looking, see, state
from tests.e2e.servers import at_once, completion, n_deferred, part, refusal, until, until_it_generates, until_logged

MIB = 64  # 1024 cells, or about 870 with the projector
MORE = 96  # 1536 cells, or about 1380 with the projector
WAIT = 120  # seconds after which a waiting request counts as stuck
RUNS = 780  # tokens of a request that must run while others arrive, even on a busy machine
LONG = 1300  # the same for a server with MORE

pytestmark = pytest.mark.usefixtures("marker")


@pytest.fixture
def mmproj(real: Real, large_cell_model: Path, tmp_path: Path) -> Path:
    """Return the projector as a file that can be removed."""
    file = tmp_path / "projector.gguf"
    file.write_bytes(projector(large_cell_model, real.work).read_bytes())
    return file


@contextlib.contextmanager
def on_demand(
    real: Real, large_cell_model: Path, mmproj: Path, tmp_path: Path, *, mib: int = MIB, n_batch: int = 512
) -> Iterator[LlamaServer]:
    args = ("--kv-unified", "-np", "3", "-b", str(n_batch), "--cache-ram", "200", "--no-cache-idle-slots", "--metrics")
    with within(real, large_cell_model, tmp_path, mib, *args, "--mmproj", mmproj, "--mmproj-lazy-auto", "0") as watched:
        yield watched.server


@pytest.fixture
def slow(real: Real, large_cell_model: Path, mmproj: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    """Run a server on which one request generates many tokens while the prompt of another one is processed."""
    with on_demand(real, large_cell_model, mmproj, tmp_path, mib=MORE, n_batch=3) as running:
        yield running


@pytest.fixture
def server(real: Real, large_cell_model: Path, mmproj: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    with on_demand(real, large_cell_model, mmproj, tmp_path) as running:
        yield running


def paused_before_its_image(
    server: LlamaServer, pool: ThreadPoolExecutor
) -> tuple[Future[Any], Future[Any], Future[httpx.Response]]:
    """Start three requests: one generates, a text waits for its slot, and an image is paused.

    The text then waits for the memory of the projector.
    """
    see(server, 1)  # loads the projector
    running = pool.submit(completion, server, prompt(0, 30), LONG, id_slot=0)
    until_it_generates(server, running)
    text = pool.submit(completion, server, prompt(1, 1420), 8, id_slot=0)
    until(lambda: n_deferred(server) == 1)
    body = {"prompt": looking(1, before=prompt(2, 920)), "n_predict": 8, "ignore_eos": True, "id_slot": 1}
    image = pool.submit(server.http.post, "/completion", json=body)
    until_logged(server, "paused, n_tokens")
    assert not running.done()
    return running, text, image


def test_paused_image_releases_projector(slow: LlamaServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        running, text, image = paused_before_its_image(slow, pool)
        assert running.result(WAIT)["tokens_predicted"] == LONG
        assert text.result(WAIT)["tokens_predicted"] == 8
        assert image.result(WAIT).json()["tokens_predicted"] == 8
    until_logged(slow, "resumed")


def test_paused_image_without_projector_fails(slow: LlamaServer, mmproj: Path) -> None:
    """Delete the file of the projector while a request with an image is paused.

    The request fails, because the server has unloaded the projector and must load it again.
    """
    with ThreadPoolExecutor(3) as pool:
        _, text, image = paused_before_its_image(slow, pool)
        mmproj.unlink()
        assert text.result(WAIT)["tokens_predicted"] == 8
        code, kind, message = refusal(image.result(WAIT))
        assert (code, kind, "No such file" in message) == (500, "server_error", True)
    assert not any(slot["is_processing"] for slot in slow.http.get("/slots").json())


def test_waiting_image_releases_projector(server: LlamaServer) -> None:
    completion(server, "Once", 0, id_slot=0)
    answers = at_once(server, [prompt(0, 700), looking(1, before=prompt(1, 200))], 250)
    assert [(a["tokens_predicted"], a["truncated"]) for a in answers] == [(250, False)] * 2
    until_logged(server, "the memory of the multimodal projector is needed, unloaded")


def test_image_reclaims_cells_of_unstarted_slot(server: LlamaServer) -> None:
    """Let an image wait for memory while no request runs.

    The other slot has old cells and a new request that has not started. It is not idle, but must free its old cells.
    """
    with ThreadPoolExecutor(2) as pool:
        both = pool.submit(at_once, server, [prompt(0, 700), looking(1, before=prompt(1, 200))], 240)

        def with_a_place() -> list[int]:
            slots = server.http.get("/slots").json()
            return [slot["id"] for slot in slots if slot["is_processing"] and slot["n_prompt_tokens"] > 600]

        last = pool.submit(completion, server, prompt(2, 20), 8, id_slot=until(with_a_place)[0])
        assert [(a["tokens_predicted"], a["truncated"]) for a in both.result(WAIT)] == [(240, False)] * 2
        assert last.result(WAIT)["tokens_predicted"] == 8


def test_paused_text_reclaims_projector_memory(server: LlamaServer) -> None:
    """Load the projector while the text is paused. To resume the text, the projector must be unloaded."""
    with ThreadPoolExecutor(2) as pool:
        # the second request has about 900 cells when it is paused, and needs the whole pool later
        both = pool.submit(at_once, server, [prompt(0, 30), prompt(1, 810)], RUNS)
        until_logged(server, "paused, n_tokens")
        image = pool.submit(see, server, 1)
        until(lambda: state(server)["state"] == "loaded")
        running, text = both.result(WAIT)
        assert (running["tokens_predicted"], running["truncated"]) == (RUNS, False)
        assert text["tokens_predicted"] > 170
        assert image.result(WAIT).status_code == 200
    until_logged(server, "the memory of the multimodal projector is needed, unloaded")


def test_text_waits_for_projector_unload(slow: LlamaServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        body = {"prompt": looking(1, before=prompt(0, 1100)), "n_predict": 8, "ignore_eos": True, "id_slot": 0}
        image = pool.submit(slow.http.post, "/completion", json=body)
        until(lambda: slow.http.get("/slots").json()[0]["is_processing"])
        unload = pool.submit(part, slow, "mmproj", "unload", timeout_ms=60000)
        until(lambda: state(slow)["state"] != "loaded")
        assert completion(slow, prompt(1, 1420), 8, id_slot=1)["tokens_predicted"] == 8
        assert unload.result(WAIT)["state"] == "unloaded"
        assert image.result(WAIT).status_code == 200
