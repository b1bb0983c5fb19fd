"""Run a llama-server of the patched tree with test models, and send single requests."""

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
from kvtool.machine import kib_of
from kvtool.verify import models
from kvtool.verify.server import START_SECONDS, LlamaServer, free_port, json_of_events, llama_server
from tests.e2e.conftest import SANITIZED, Real

T = TypeVar("T")

memory_is_plain = pytest.mark.skipif(
    sys.platform != "linux" or SANITIZED,
    reason="the memory is measured or limited as on Linux, without a sanitizer",
)


@contextlib.contextmanager
def serving(real: Real, model: Path, log: Path, *args: str | Path) -> Iterator[LlamaServer]:
    with llama_server(real.bin / "llama-server", model, ("-t", "1", *map(str, args)), log) as server:
        yield server


@contextlib.contextmanager
def routing(real: Real, log: Path, *args: str | Path) -> Iterator[LlamaServer]:
    """Run a router: a server without a model."""
    port = free_port()
    argv = [real.bin / "llama-server", "--host", "127.0.0.1", "--port", str(port), "-t", "1", *args]
    with process.spawn(argv, stdout=log) as running, LlamaServer(running, port, log) as server:
        server.wait_ready(START_SECONDS)
        # after a forwarded answer, a router closes the connection, so do not reuse it
        server.http.headers["Connection"] = "close"
        yield server


def completion(server: LlamaServer, prompt: str, n_predict: int, **more: Any) -> dict[str, Any]:
    """Send one /completion at temperature 0. The end-of-text token is ignored."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True, **more}
    return server.post("/completion", body)


def at_once(server: LlamaServer, prompts: Sequence[Any], n_predict: int) -> list[dict[str, Any]]:
    """Send several prompts as completion() does, but in one request.

    With separate requests, one could end before the next begins.
    """
    body = {"prompt": prompts, "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True}
    answers: list[dict[str, Any]] = server.http.post("/completion", json=body).raise_for_status().json()
    return answers


def resident(server: LlamaServer) -> int:
    """Return the resident bytes of the server's process. The system must report them."""
    taken = server.resident()
    assert taken is not None
    return taken


def anonymous(server: LlamaServer) -> int:
    """Return the bytes of the server's anonymous memory (memory that no file provides), in RAM and in swap (Linux)."""
    parts = [kib_of(f"/proc/{server.process.pid}/status", name) for name in ("RssAnon", "VmSwap")]
    return sum(part for part in parts if part is not None)


def events(
    server: LlamaServer, path: str, body: dict[str, Any], leaves: Callable[[], bool] = lambda: False
) -> list[Any]:
    """Return the JSON of each `data:` line of a streaming request, until the stream ends or leaves() returns True."""
    # llama-server closes the connection at the end of a stream, and a pool of connections would notice that too late
    close = {"Connection": "close"}
    with server.http.stream("POST", path, json={**body, "stream": True}, headers=close) as answer:
        assert answer.status_code == 200, answer.read()
        return list(itertools.takewhile(lambda _: not leaves(), json_of_events(answer)))


def until(met: Callable[[], T]) -> T:
    """Call `met` until its result is true, and return the result."""
    deadline = time.monotonic() + 120
    while not (said := met()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.05)
    return said


def part(server: LlamaServer, name: str, action: str, **more: Any) -> dict[str, Any]:
    """Load or unload a part of the server ("mmproj" or "speculative"), and return the answer."""
    answer = server.post(f"/{name}", {"action": action, **more})
    assert (answer["success"], answer["state"]) == (True, f"{action}ed")
    return answer


def weights(model: Path) -> int:
    """Return the size of the weights of a model in MiB, rounded up.

    The file is larger, because it also has a vocabulary.
    """
    return -(-sum(int(tensor.n_bytes) for tensor in models.read_model(model).tensors) // (1024 * 1024))


@contextlib.contextmanager
def short_of_addresses(server: LlamaServer, more: int) -> Iterator[None]:
    """Limit the address space of the server to `more` bytes more than it has now (Linux)."""
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
    """Return the number of generated tokens of the request in a slot."""
    return int(server.http.get("/slots").json()[slot].get("next_token", [{}])[0].get("n_decoded") or 0)


def n_waiting(server: LlamaServer) -> int:
    """Return the number of requests that wait for cells, or that are paused."""
    return sum(slot.get("is_waiting", False) for slot in server.http.get("/slots").json())


def n_deferred(server: LlamaServer) -> int:
    """Return the number of requests that wait for a slot. The server must run with --metrics."""
    return int(float(server.get("/metrics").split("\nllamacpp:requests_deferred ")[1].split()[0]))


def until_it_generates(server: LlamaServer, request: Future[Any]) -> None:
    """Wait until slot 0 generates tokens."""
    while not generated(server):
        assert not request.done()


def until_logged(server: LlamaServer, said: str) -> None:
    """Wait until a text is in the server's log.

    Another thread writes the log, so the text may arrive after the answer. The log is complete when the server has
    ended.
    """
    until(lambda: said in server.log)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """Return the HTTP status, the type and the message of an error."""
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    return answer.status_code, error["type"], error["message"]
