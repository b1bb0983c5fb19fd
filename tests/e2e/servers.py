"""A llama-server of the patched tree on toy models, for the tests of one request and its answer."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from kvtool import process
from kvtool.verify import models
from kvtool.verify.server import START_SECONDS, LlamaServer, free_port, json_of_events, llama_server
from tests.e2e.conftest import SANITIZED, Real

T = TypeVar("T")

memory_is_plain = pytest.mark.skipif(
    sys.platform != "linux" or SANITIZED,
    reason="what is measured, or limited, is Linux's, and not a sanitizer's",
)


@contextlib.contextmanager
def serving(real: Real, model: Path, log: Path, *args: str | Path) -> Iterator[LlamaServer]:
    with llama_server(real.bin / "llama-server", model, ("-t", "1", *map(str, args)), log) as server:
        yield server


@contextlib.contextmanager
def routing(real: Real, log: Path, *args: str | Path) -> Iterator[LlamaServer]:
    """A server without a model of its own."""
    port = free_port()
    argv = [real.bin / "llama-server", "--host", "127.0.0.1", "--port", str(port), "-t", "1", *args]
    with process.spawn(argv, stdout=log) as running, LlamaServer(running, port, log) as server:
        server.wait_ready(START_SECONDS)
        server.http.headers["Connection"] = "close"  # it ends the connection with what it passes on, as below
        yield server


def completion(server: LlamaServer, prompt: str, n_predict: int, **more: Any) -> dict[str, Any]:
    """One /completion at temperature 0 that no end of text ends."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True, **more}
    return server.post("/completion", body)


def at_once(server: LlamaServer, prompts: Sequence[Any], n_predict: int) -> list[dict[str, Any]]:
    """As completion(), in one request: of several, one may have ended before the next comes."""
    body = {"prompt": prompts, "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True}
    answers: list[dict[str, Any]] = server.http.post("/completion", json=body).raise_for_status().json()
    return answers


def resident(server: LlamaServer) -> int:
    """Bytes of the process in memory, on a system that tells."""
    taken = server.resident()
    assert taken is not None
    return taken


def events(
    server: LlamaServer, path: str, body: dict[str, Any], leaves: Callable[[], bool] = lambda: False
) -> list[Any]:
    """What a streaming request is sent, the JSON of each `data:`, until it ends or the client leaves."""
    close = {"Connection": "close"}  # llama-server ends the connection with the stream, which a pool learns too late
    with server.http.stream("POST", path, json={**body, "stream": True}, headers=close) as answer:
        assert answer.status_code == 200, answer.read()
        return list(itertools.takewhile(lambda _: not leaves(), json_of_events(answer)))


def until(met: Callable[[], T]) -> T:
    """What it says when that is something."""
    deadline = time.monotonic() + 120
    while not (said := met()):
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.05)
    return said


def part(server: LlamaServer, name: str, action: str, **more: Any) -> dict[str, Any]:
    """Load or unload a part of the server (`mmproj`, `speculative`); its answer."""
    answer = server.post(f"/{name}", {"action": action, **more})
    assert (answer["success"], answer["state"]) == (True, f"{action}ed")
    return answer


def weights(model: Path) -> int:
    """MiB of them, rounded up; the file has a vocabulary besides."""
    return -(-sum(int(tensor.n_bytes) for tensor in models.read_model(model).tensors) // (1024 * 1024))


@contextlib.contextmanager
def short_of_addresses(server: LlamaServer, more: int) -> Iterator[None]:
    """The server can take this many bytes more, and no more (Linux)."""
    import resource

    assert sys.platform == "linux"
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text("ascii").split()[0])
    limit = (pages * resource.getpagesize() + more, resource.RLIM_INFINITY)
    before = resource.prlimit(server.process.pid, resource.RLIMIT_AS, limit)
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, before)


def generated(server: LlamaServer, slot: int = 0) -> int:
    """Tokens of the request that is in a slot."""
    return int(server.http.get("/slots").json()[slot].get("next_token", [{}])[0].get("n_decoded") or 0)


def n_waiting(server: LlamaServer) -> int:
    """Requests that wait for cells, or are paused."""
    return sum(slot.get("is_waiting", False) for slot in server.http.get("/slots").json())


def n_deferred(server: LlamaServer) -> int:
    """Requests that wait for a slot; of a server with --metrics."""
    return int(float(server.get("/metrics").split("\nllamacpp:requests_deferred ")[1].split()[0]))


def until_it_generates(server: LlamaServer, request: Future[Any]) -> None:
    """In slot 0."""
    while not generated(server):
        assert not request.done()


def until_logged(server: LlamaServer, said: str) -> None:
    """A thread of its own writes the log, after an answer even; all of it is there when the server has ended."""
    until(lambda: said in server.log)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error."""
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    return answer.status_code, error["type"], error["message"]
