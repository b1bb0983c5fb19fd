"""Test --mmproj-lazy-auto: the first request with an image loads the projector.

The projector is unloaded when no request uses it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvtool.verify.projector import image, image_url
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.projector import APART, act, see, state
from tests.e2e.servers import (
    completion,
    n_deferred,
    refusal,
    resident,
    routing,
    serving,
    short_of_addresses,
    until,
)

MIB = 1024 * 1024


pytestmark = pytest.mark.usefixtures("marker")


def until_unloaded(server: LlamaServer) -> None:
    until(lambda: state(server)["state"] == "unloaded")


@contextlib.contextmanager
def on_demand(real: Real, model: Path, tmp_path: Path, mmproj: Path, seconds: int, *more: str) -> Iterator[LlamaServer]:
    args = (*APART, "--mmproj", str(mmproj), "--mmproj-lazy-auto", str(seconds), "--metrics", *more)
    with serving(real, model, tmp_path / "log", *args) as server:
        yield server


def test_first_image_loads_projector(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *APART, "--mmproj", mmproj) as server:
        expected = [see(server, seed).json()["content"] for seed in range(4)]
    with on_demand(real, model, tmp_path, mmproj, 1) as lazily:
        said = json.loads(lazily.get("/props"))
        assert (said["mmproj"], said["modalities"]["vision"]) == ("unloaded", True)
        assert completion(lazily, "Once", 4)["tokens_predicted"] == 4
        assert json.loads(lazily.get("/health")) == {"status": "ok", "mmproj": "unloaded"}
        for _ in range(2):
            with ThreadPoolExecutor(4) as pool:  # one request loads the projector for all of them
                answers = list(pool.map(lambda seed: see(lazily, seed, id_slot=seed, cache_prompt=False), range(4)))
            assert [answer.json()["content"] for answer in answers] == expected
            until_unloaded(lazily)
        if sys.platform == "linux":
            completion(lazily, "Once", 1)  # the projector is freed after it has been logged
            before = resident(lazily)
            # repeat, in case it is unloaded again
            until(lambda: see(lazily, 1).is_success and resident(lazily) > before + mmproj.stat().st_size)
            until_unloaded(lazily)
            until(lambda: resident(lazily) < before + MIB)


def test_chat_loads_projector(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    """Use endpoints that find images before the text is tokenized, and endpoints that only count tokens."""
    data = base64.b64encode(image(1)).decode()
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    with on_demand(real, model, tmp_path, mmproj, 0, "--chat-template", "chatml") as server:
        for path, picture in (("/v1/chat/completions", image_url(1)), ("/v1/messages/count_tokens", source)):
            content = [{"type": "text", "text": "Here:"}, picture]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
            answer = server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert state(server)["state"] == "loaded"
            act(server, "unload")


def test_text_does_not_keep_projector(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    done = False

    def write() -> int:
        n = 0
        while not done:
            n += completion(lazily, prompt(1, 20), 50, id_slot=0)["tokens_predicted"]
        return n

    with on_demand(real, model, tmp_path, mmproj, 1) as lazily, ThreadPoolExecutor(1) as pool:
        text = pool.submit(write)
        try:
            assert see(lazily, 1, id_slot=1).status_code == 200
            until_unloaded(lazily)
        finally:
            done = True
        assert text.result() % 50 == 0


def test_unloaded_while_request_waits(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    with on_demand(real, model, tmp_path, mmproj, 1) as server, ThreadPoolExecutor(5) as pool:
        expected = see(server, 1, id_slot=0).json()["content"]
        texts = []
        for waiting in range(2):
            texts.append(pool.submit(completion, server, prompt(waiting, 40), 1900, id_slot=0))
            while n_deferred(server) != waiting:
                assert not texts[0].done()
        last = pool.submit(see, server, 1, id_slot=0)
        until_unloaded(server)
        assert not last.done()
        assert last.result().json()["content"] == expected
        assert [text.result()["tokens_predicted"] for text in texts] == [1900] * 2


def test_load_failure_is_reported_to_image_request(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    file, whole = tmp_path / "projector.gguf", mmproj.read_bytes()
    file.write_bytes(whole)
    with on_demand(real, model, tmp_path, file, 60) as server:
        file.unlink()
        assert refusal(see(server, 1))[:2] == (500, "server_error")
        assert "No such file" in refusal(see(server, 1))[2]
        file.write_bytes(whole[:-100000])
        assert "truncated" in refusal(see(server, 1))[2]
        assert completion(server, "Once", 4)["tokens_predicted"] == 4
        file.write_bytes(whole)
        if sys.platform == "linux":
            with short_of_addresses(server, len(whole) // 2):
                assert refusal(see(server, 1))[:2] == (503, "out_of_memory_error")
        assert see(server, 1).status_code == 200


def test_wakeup_does_not_load_projector(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    with on_demand(real, model, tmp_path, mmproj, 0, "--sleep-idle-seconds", "1") as server:
        expected = see(server, 1).json()["content"]

        def is_loaded() -> bool:  # called until the server sleeps
            assert see(server, 1).json()["content"] == expected
            return bool(json.loads(server.get("/health")) == {"status": "ok", "mmproj": "loaded"})

        until(is_loaded)
        until_unloaded(server)  # the server sleeps; without that, the projector would stay loaded
        assert json.loads(server.get("/props"))["is_sleeping"]
        completion(server, "Once", 4)
        assert state(server)["state"] == "unloaded"
        assert see(server, 1).json()["content"] == expected


def test_router_forwards_projector_options(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    home = tmp_path / "models" / "toy"
    home.mkdir(parents=True)
    (home / "toy.gguf").symlink_to(model)
    (home / "mmproj-toy.gguf").symlink_to(mmproj)
    args = ("--models-dir", home.parent, *APART, "--mmproj-lazy-auto", "0")
    with routing(real, tmp_path / "log", *args) as server:
        completion(server, "Once", 4, model="toy")

        def said() -> str:
            return str(httpx.get(f"{server.url}/mmproj?model=toy", trust_env=False, timeout=60).json()["state"])

        assert said() == "unloaded"
        assert see(server, 1, model="toy").status_code == 200
        assert said() == "loaded"
        act(server, "unload", model="toy")
        assert said() == "unloaded"
