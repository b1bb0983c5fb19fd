"""Test unloading and loading the image projector of a running server, and the requests that arrive at the same time."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtool.verify.projector import image_url
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.projector import APART, act, is_unloaded, looking, projector_of_width, see, state
from tests.e2e.servers import (
    completion,
    memory_is_plain,
    n_deferred,
    refusal,
    resident,
    serving,
    short_of_addresses,
    until,
    until_it_generates,
)

MIB = 1024 * 1024


pytestmark = pytest.mark.usefixtures("marker")


@pytest.fixture
def server(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    args = (*APART, "--mmproj", mmproj, "--slot-save-path", tmp_path, "--metrics")
    with serving(real, model, tmp_path / "log", *args) as running:
        yield running


def test_image_answer_survives_reload(server: LlamaServer) -> None:
    before = [see(server, seed, id_slot=seed).json()["content"] for seed in (1, 2)]
    assert before[0] != before[1], "the projector must affect the answer"
    for _ in range(2):
        act(server, "unload")
        assert is_unloaded(see(server, 1))
        act(server, "load")
        assert before == [see(server, seed, id_slot=seed, cache_prompt=False).json()["content"] for seed in (1, 2)]


def test_unload_keeps_cache(server: LlamaServer) -> None:
    """Continue, save and restore a conversation with images without the projector.

    Images occupy positions, which the server must count even without the projector.
    """
    question = {"prompt": looking(1, 2, before=prompt(1, 30)), "id_slot": 0, "n_predict": 0}
    n_prompt = server.post("/completion", question)["timings"]["prompt_n"]
    act(server, "unload")
    saved = server.slot("save", 0, "image.bin")
    # this prompt has no image, so the slot's cache is cut before the image
    text = completion(server, prompt(2, 40), 16, id_slot=0)["content"]
    act(server, "load")
    assert completion(server, prompt(2, 40), 16, id_slot=1)["content"] == text
    act(server, "unload")
    assert server.slot("restore", 0, "image.bin")["n_restored"] == saved["n_saved"] == n_prompt
    act(server, "load")
    again = server.post("/completion", question)
    assert (again["timings"]["cache_n"], again["timings"]["prompt_n"]) == (n_prompt - 1, 1)


def test_conversation_with_unloads_is_equal(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    def chat(running: LlamaServer, history: list[dict[str, Any]]) -> str:
        body = {"messages": history, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "id_slot": 0}
        text: str = running.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return text

    def conversation(running: LlamaServer, *, actions: bool) -> list[str]:
        turns: list[Any] = [
            "Where does the river end?",
            "And the road?",
            [{"type": "text", "text": "Here:"}, image_url(1)],
            "Which colour?",
        ]
        history: list[dict[str, Any]] = []
        said = []
        for turn, action in zip(turns, ("unload", "unload", "load", "load"), strict=True):
            if actions:
                act(running, action)
            history.append({"role": "user", "content": turn})
            said.append(chat(running, history))
            history.append({"role": "assistant", "content": said[-1]})
        if actions:
            act(running, "unload")
            resent = running.http.post("/v1/chat/completions", json={"messages": history, "max_tokens": 4})
            assert is_unloaded(resent)
        return said

    args = (*APART, "--mmproj", mmproj, "--chat-template", "chatml")
    with serving(real, model, tmp_path / "log", *args) as running:
        expected = conversation(running, actions=False)
    with serving(real, model, tmp_path / "log", *args) as running:
        assert conversation(running, actions=True) == expected


def test_refused_image_leaves_no_stream(server: LlamaServer) -> None:
    """Send a streamed request that is refused. Its stream must not be in the list that a client can continue later."""
    act(server, "unload")
    body = {"prompt": looking(1), "n_predict": 4, "stream": True}
    assert is_unloaded(server.http.post("/completion", json=body, headers={"X-Conversation-Id": "refused"}))
    found = server.http.post("/v1/streams/lookup", json={"conversation_ids": ["refused"]})
    assert (found.status_code, found.json()) == (200, [])


def test_unload_waits_for_users(server: LlamaServer) -> None:
    def in_use(pool: ThreadPoolExecutor) -> Future[httpx.Response]:
        """Use every slot for a hundred images."""
        body = {"prompt": [looking(*range(100))] * 4, "n_predict": 8, "ignore_eos": True, "cache_prompt": False}
        request = pool.submit(server.http.post, "/completion", json=body)
        until(lambda: all(slot["is_processing"] for slot in json.loads(server.get("/slots"))))
        assert not request.done()
        return request

    def all_answered(request: Future[httpx.Response]) -> bool:
        return [answer["tokens_predicted"] for answer in request.result().json()] == [8] * 4

    with ThreadPoolExecutor(2) as pool:
        request = in_use(pool)
        answer = server.http.post("/mmproj", json={"action": "unload", "timeout_ms": 0})
        assert refusal(answer)[:2] == (503, "unavailable_error")
        assert answer.headers["Retry-After"] == "1"
        assert all_answered(request)
        assert state(server)["state"] == "loaded"

        request = in_use(pool)
        unload = pool.submit(act, server, "unload", timeout_ms=60000)
        while (now := state(server)["state"]) == "loaded":
            assert not unload.done()
        assert now == "unloading"
        for other in (see(server, 1), server.http.post("/mmproj", json={"action": "unload"})):
            assert refusal(other) == (503, "unavailable_error", "the multimodal projector is being unloaded, try again")
            assert other.headers["Retry-After"] == "1"
        assert unload.result()["state"] == "unloaded"
        assert all_answered(request)


def test_unload_while_request_waits_for_slot(server: LlamaServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        text = pool.submit(completion, server, prompt(1, 40), 2000, id_slot=0)
        until_it_generates(server, text)
        waiting = pool.submit(see, server, 1, id_slot=0)
        while n_deferred(server) != 1:
            assert not text.done()
        act(server, "unload")
        assert not text.done()
        assert text.result()["tokens_predicted"] == 2000
        assert is_unloaded(waiting.result())


def test_refused_request_is_not_user(server: LlamaServer) -> None:
    code, _, message = refusal(see(server, 1, grammar="root ::= ["))
    assert (code, message) == (400, "Failed to initialize samplers: failed to parse grammar")
    act(server, "unload")


def test_request_after_images_is_not_user(server: LlamaServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(see, server, 1, n_predict=2000, id_slot=0)
        until_it_generates(server, request)
        # a request also uses the projector for a moment while it is tokenized
        until(lambda: state(server)["n_users"] == 0)
        act(server, "unload", timeout_ms=0)
        assert not request.done()
        assert request.result().json()["tokens_predicted"] == 2000


def test_children_of_prompt_are_not_users(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    """Use n_cmpl. The additional completions wait for the prompt, but must not count as users of the projector."""
    args = ("-c", "8192", "-np", "3", "--kv-unified", "-b", "16", "--cache-ram", "0", "--mmproj", mmproj)
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": looking(1, after=prompt(1, 7000)), "n_predict": 8, "n_cmpl": 3, "ignore_eos": True}
        request = pool.submit(server.http.post, "/completion", json=body)
        until(lambda: all(slot["is_processing"] for slot in json.loads(server.get("/slots"))))
        until(lambda: state(server)["n_users"] == 0)
        slots = json.loads(server.get("/slots"))
        assert [slot["next_token"][0]["n_decoded"] for slot in slots if slot["is_processing"]] == [0] * 3
        act(server, "unload", timeout_ms=0)
        assert [answer["tokens_predicted"] for answer in request.result().json()] == [8] * 3


@memory_is_plain
def test_unload_releases_memory(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *APART, "--mmproj", mmproj, "--mmproj-lazy") as server:

        def use() -> dict[str, Any]:
            taken: dict[str, Any] = act(server, "load")["taken"]
            assert see(server, 1).status_code == 200
            return taken

        use()  # the first use allocates memory that stays: threads, code, buffers of the client
        act(server, "unload")
        before = resident(server)
        for _ in range(5):
            taken = use()["resident_bytes"]
            freed = act(server, "unload")["freed"]["resident_bytes"]
            assert min(taken, freed) > mmproj.stat().st_size
            assert resident(server) < before + MIB


def test_clients_see_projector_state(real: Real, model: Path, server: LlamaServer, tmp_path: Path) -> None:
    def modalities(running: LlamaServer) -> Any:
        return json.loads(running.get("/props"))["modalities"]["vision"]

    assert (modalities(server), state(server)["state"]) == (True, "loaded")
    assert "mmproj" not in json.loads(server.get("/props"))
    assert json.loads(server.get("/health")) == {"status": "ok"}
    assert act(server, "load")["taken"]["resident_bytes"] == 0
    act(server, "unload")
    assert (modalities(server), state(server)["state"]) == (False, "unloaded")
    assert act(server, "unload")["freed"]["resident_bytes"] == 0
    assert refusal(server.http.post("/mmproj", json={"action": "swap"}))[0] == 400
    with serving(real, model, tmp_path / "blind", *APART) as blind:
        code, kind, message = refusal(blind.http.post("/mmproj", json={"action": "load"}))
        assert (code, kind) == (501, "not_supported_error")
        assert "--mmproj" in message
        assert refusal(blind.http.get("/mmproj"))[0] == 501
        assert refusal(see(blind, 1))[2].startswith("Multimodal data provided, but model does not support")


def test_projector_state_survives_sleep(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    args = (*APART, "--mmproj", mmproj, "--sleep-idle-seconds", "1")

    def asleep(server: LlamaServer) -> None:
        until(lambda: json.loads(server.get("/props"))["is_sleeping"])

    with serving(real, model, tmp_path / "log", *args) as server:
        expected = see(server, 1).json()["content"]
        asleep(server)
        assert state(server)["state"] == "sleeping"
        assert see(server, 1).json()["content"] == expected
        act(server, "unload")
        asleep(server)
        assert is_unloaded(see(server, 1))
        taken = act(server, "load")["taken"]["resident_bytes"]
        assert sys.platform != "linux" or taken > mmproj.stat().st_size
        assert see(server, 1).json()["content"] == expected


class Lazy:
    """Hold a server and the file of its projector. Tests change this file; `whole` is its original content."""

    def __init__(self, server: LlamaServer, file: Path, whole: bytes) -> None:
        self.server, self.file, self.whole = server, file, whole

    def fails(self, content: bytes | None = None) -> str:
        """Try to load the projector, which must fail, and return the error message. The server must continue.

        content: written to the file of the projector before the attempt; None leaves the file unchanged
        """
        if content is not None:
            self.file.write_bytes(content)
        code, kind, message = refusal(self.server.http.post("/mmproj", json={"action": "load"}))
        assert (code, kind) == (500, "server_error")
        assert state(self.server) == {**state(self.server), "state": "unloaded", "n_users": 0}
        assert is_unloaded(see(self.server, 1))
        assert completion(self.server, "Once", 4)["tokens_predicted"] == 4
        return message


@contextlib.contextmanager
def lazy(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> Iterator[Lazy]:
    file, whole = tmp_path / "projector.gguf", mmproj.read_bytes()
    file.write_bytes(whole)
    with serving(real, model, tmp_path / "log", *APART, "--mmproj", file, "--mmproj-lazy") as server:
        yield Lazy(server, file, whole)


def test_changed_projector_file_is_refused(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    other = projector_of_width(tmp_path / "other.gguf", 64).read_bytes()
    with lazy(real, model, mmproj, tmp_path) as it:
        assert is_unloaded(see(it.server, 1))
        it.file.unlink()
        assert "No such file" in it.fails()
        for cut in (0, 100, 1000):
            assert "not a GGUF file, or truncated" in it.fails(it.whole[:cut])
        size = len(it.whole)
        assert f"truncated, {size - 100000} of " in it.fails(it.whole[:-100000])
        assert "not the one that the server was started with" in it.fails(other)
        it.file.write_bytes(it.whole)
        act(it.server, "load")
        assert see(it.server, 1).status_code == 200


@memory_is_plain
def test_projector_of_other_model_is_refused(real: Real, model: Path, tmp_path: Path) -> None:
    other = projector_of_width(tmp_path / "other.gguf", 64)
    with lazy(real, model, other, tmp_path) as it:
        it.fails()
        before = resident(it.server)
        for _ in range(5):
            assert "mismatch between text model" in it.fails()
        assert resident(it.server) < before + other.stat().st_size


@memory_is_plain
def test_load_without_memory_fails(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    with lazy(real, model, mmproj, tmp_path) as it:
        for more in range(10, 234, 16):  # first too few addresses for the weights, then for a scheduler
            with short_of_addresses(it.server, more * MIB):
                answer = it.server.http.post("/mmproj", json={"action": "load"})
                if answer.status_code == 200:
                    break
                assert refusal(answer)[:2] == (503, "out_of_memory_error")
                assert "not enough memory for the multimodal projector" in answer.text
            assert state(it.server)["state"] == "unloaded"
            assert completion(it.server, "Once", 4)["tokens_predicted"] == 4
        assert more > 100
        act(it.server, "load")
        assert see(it.server, 1).status_code == 200


def test_lazy_start_needs_file(real: Real, model: Path, tmp_path: Path) -> None:
    from kvtool.errors import VerifyError

    with (
        pytest.raises(VerifyError, match="did not start"),
        serving(real, model, tmp_path / "log", "--mmproj", tmp_path / "none.gguf", "--mmproj-lazy"),
    ):
        pass
