"""Test prompts with images in a pool of cells that is too small: they wait and continue like text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvtool.verify.projector import projector
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.projector import looking, merging_projector, see
from tests.e2e.servers import completion, generated, refusal, serving, until

N = 80  # tokens that a request generates
# while the first request generates 57 tokens, the second processes its text, then an image of two batches, of which one
# finds cells
TEXTS = (40, 390)


pytestmark = pytest.mark.usefixtures("marker")


def of_the_pool(real: Real, model: Path, n_cells: int) -> tuple[str | Path, ...]:
    mmproj = projector(model, real.work)
    return ("-np", "2", "--kv-unified", "--no-warmup", "-b", "8", "-c", str(n_cells), "--mmproj", mmproj)


def crossing(server: LlamaServer) -> httpx.Response:
    for slot in range(2):  # in this order they are taken, and get their part of each batch
        completion(server, "Once", 0, id_slot=slot)
    first, second = (prompt(seed, words) for seed, words in enumerate(TEXTS))
    body = {"prompt": [first, looking(1, before=second)], "n_predict": N, "temperature": 0.0, "ignore_eos": True}
    return server.http.post("/completion", json=body)


def contents(answer: httpx.Response) -> list[str]:
    return [one["content"] for one in answer.raise_for_status().json()]


@pytest.mark.parametrize("args", [(), ("--mmproj-lazy-auto", "0")], ids=["loaded", "on-demand"])
def test_image_waits_for_cells(real: Real, model: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    """Expect that an encoded image is discarded if the projector may be unloaded, and encoded again later."""
    with serving(real, model, tmp_path / "roomy", *of_the_pool(real, model, 4096), *args) as server:
        expected = contents(crossing(server))
    with serving(real, model, tmp_path / "log", *of_the_pool(real, model, 512), *args) as server:
        assert contents(crossing(server)) == expected
    assert "failed to decode mtmd chunk" in server.log
    assert "resumed" in server.log


@pytest.mark.parametrize(("toy", "args"), [("llama-dense", ("--cache-ram", "0")), ("qwen35-dense", ())])
def test_image_that_cannot_wait_gets_error(real: Real, toy: str, args: tuple[str, ...], tmp_path: Path) -> None:
    """Use no memory for paused requests, and a recurrent state that already contains a part of the image."""
    model = real.text_model(toy)
    with serving(real, model, tmp_path / "log", *of_the_pool(real, model, 512), *args) as server:
        status, kind, message = refusal(crossing(server))
        assert (status, kind) == (503, "out_of_memory_error")
        assert "the KV cache of 512 cells has no place left" in message
        assert see(server, 1).status_code == 200


def test_image_with_more_cells_than_positions(real: Real, tmp_path: Path) -> None:
    """Use M-RoPE: an image of 16 x 16 tokens has 16 positions.

    Its cells exist, so no room is reserved for them again.
    """
    model = real.text_model("qwen35-dense")
    mmproj = merging_projector(tmp_path / "projector.gguf", model)
    args = ("-np", "2", "--kv-unified", "--no-warmup", "-c", "1024", "--mmproj", mmproj)
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": looking(1, size=256), "n_predict": 150, "ignore_eos": True, "id_slot": 0}
        first = pool.submit(server.http.post, "/completion", json=body)
        until(lambda: generated(server) or first.done())
        assert completion(server, prompt(1, 540), 8, id_slot=1)["tokens_predicted"] == 8
        timings = first.result().raise_for_status().json()["timings"]
        assert timings["prompt_n"] > 256
    assert "waits for cells" not in server.log
