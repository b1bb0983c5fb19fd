"""Test prompts with images in a pool of cells that is too small. They must wait and continue as texts do."""

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
# While the first request generates 57 tokens, the second one processes its text. Then it processes an image in two
# batches, and only one of them finds cells.
TEXTS = (40, 390)


pytestmark = pytest.mark.usefixtures("marker")


def of_the_pool(real: Real, model: Path, n_cells: int) -> tuple[str | Path, ...]:
    mmproj = projector(model, real.work)
    return ("-np", "2", "--kv-unified", "--no-warmup", "-b", "8", "-c", str(n_cells), "--mmproj", mmproj)


def crossing(server: LlamaServer) -> httpx.Response:
    for slot in range(2):  # the slots are used in this order, and each gets its part of a batch
        completion(server, "Once", 0, id_slot=slot)
    first, second = (prompt(seed, words) for seed, words in enumerate(TEXTS))
    body = {"prompt": [first, looking(1, before=second)], "n_predict": N, "temperature": 0.0, "ignore_eos": True}
    return server.http.post("/completion", json=body)


def contents(answer: httpx.Response) -> list[str]:
    return [one["content"] for one in answer.raise_for_status().json()]


@pytest.mark.parametrize("args", [(), ("--mmproj-lazy-auto", "0")], ids=["loaded", "on-demand"])
def test_image_waits_for_cells(real: Real, model: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    """Expect that a request with an image waits for cells and then gives the same answer.

    If the server loads the projector on demand, it drops the encoded image in the meantime and encodes it again later.
    """
    with serving(real, model, tmp_path / "roomy", *of_the_pool(real, model, 4096), *args) as server:
        expected = contents(crossing(server))
    with serving(real, model, tmp_path / "log", *of_the_pool(real, model, 512), *args) as server:
        assert contents(crossing(server)) == expected
    assert "failed to decode mtmd chunk" in server.log
    assert "resumed" in server.log


@pytest.mark.parametrize(("toy", "args"), [("llama-dense", ("--cache-ram", "0")), ("qwen35-dense", ())])
def test_image_that_cannot_wait_gets_error(real: Real, toy: str, args: tuple[str, ...], tmp_path: Path) -> None:
    """Send an image that needs more cells than are free, in two cases in which its request cannot be paused.

    In the first case, --cache-ram 0 allows no memory for paused requests. In the second case, the recurrent state of
    the model already contains a part of the image, and cannot be set back.
    """
    model = real.text_model(toy)
    with serving(real, model, tmp_path / "log", *of_the_pool(real, model, 512), *args) as server:
        status, kind, message = refusal(crossing(server))
        assert (status, kind) == (503, "out_of_memory_error")
        assert "the KV cache of 512 cells has no place left" in message
        assert see(server, 1).status_code == 200


def test_image_with_more_cells_than_positions(real: Real, tmp_path: Path) -> None:
    """Use M-RoPE, where an image of 16 x 16 tokens has only 16 positions.

    Its cells are allocated already, so no room must be reserved for them again.
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
