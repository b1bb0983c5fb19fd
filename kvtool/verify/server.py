"""Drive a llama-server on loopback: start it, talk to it, end it whatever happens.

Nothing here compares anything (conversation.py and parts.py do); a server that does not start, dies or answers nonsense
is a VerifyError that shows the end of its log.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import httpx_sse

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.machine import kib_of
from kvtool.result import from_plain

_T = TypeVar("_T")
_R = TypeVar("_R")
START_SECONDS = 120.0  # until /health answers 200; a loaded machine under a sanitizer needs most of it
REQUEST_SECONDS = 300.0
PORT_TRIES = 3

# models.VOCABULARY's tokens <0x80> to <0xFF> are never chosen: with random weights they make no UTF-8, and servers from
# before v0.5.0 answer text that is none with an error
_NO_BYTES = [[token, False] for token in range(131, 259)]


class RefusedError(VerifyError):
    """The server lives, and answered a request with an error."""


class Request(NamedTuple):
    """One /completion at temperature 0. slot: the slot to use, or -1 for the server's choice; n_predict in tokens."""

    prompt: str
    n_predict: int
    slot: int = -1


@dataclass(frozen=True)
class Answer:
    """What came back, in the server's words. cache_n: tokens of the prompt that the slot's cache had already."""

    content: str
    tokens: tuple[int, ...]
    tokens_evaluated: int
    cache_n: int = 0
    truncated: bool = False


def json_of_events(answer: httpx.Response) -> Iterator[Any]:
    """Yield the JSON of each event of a stream as it arrives. Raises ValueError if an event is not JSON."""
    for event in httpx_sse.EventSource(answer).iter_sse():
        if event.data != "[DONE]":
            yield event.json()


def free_port() -> int:
    """Return a port on loopback that nothing uses right now (another process may still use it first)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class LlamaServer(contextlib.ExitStack):
    """A running server. Methods raise VerifyError with the log's end when it dies or answers with an error.

    process: what runs; http: the client, for requests that have no method here.
    """

    def __init__(self, running: process.Process, port: int, log: Path) -> None:
        super().__init__()
        self.process, self._log = running, log
        self.url = f"http://127.0.0.1:{port}"
        # No proxy from the environment: loopback must stay loopback.
        http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(REQUEST_SECONDS, connect=10), trust_env=False)
        self.http = self.enter_context(http)

    def resident(self) -> int | None:
        """Return the resident bytes of the process, or None if the system does not report them."""
        return kib_of(f"/proc/{self.process.pid}/smaps_rollup", "Rss")

    @property
    def log(self) -> str:
        """Return the server's log so far."""
        return self._log.read_text("utf-8", "replace")

    def _failed(self, what: str, why: str = "", kind: type[VerifyError] = VerifyError) -> VerifyError:
        code = self.process.poll()
        died = "" if code is None else f"the server ended with exit code {code}"
        return kind(what, why="; ".join(filter(None, (why, died))), output=self.log[-3000:])

    def wait_ready(self, seconds: float) -> None:
        """Wait until the model is loaded. Raises VerifyError if the server exits first or needs longer."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        why = f"not ready after {seconds:g} s" if self.process.poll() is None else ""
        raise self._failed("llama-server did not start", why)

    def post(self, path: str, body: dict[str, Any], **params: str) -> dict[str, Any]:
        """Send a request, and return the JSON of the answer. Raises RefusedError for an error."""
        try:
            answer = self.http.post(path, json=body, params=params)
        except httpx.HTTPError as err:
            raise self._failed(f"llama-server did not answer {path}", f"{type(err).__name__}: {err}") from err
        data: Any = None
        with contextlib.suppress(ValueError):
            data = answer.json()
        if answer.status_code != 200 or not isinstance(data, dict):
            what = f"llama-server answered {path} with HTTP {answer.status_code}"
            raise self._failed(what, answer.text[:500], VerifyError if answer.status_code == 200 else RefusedError)
        return data

    def get(self, path: str) -> str:
        """Return the text at a path of the server. Raises VerifyError if the path does not exist."""
        try:
            return self.http.get(path).raise_for_status().text
        except httpx.HTTPError as err:
            raise self._failed(f"the server did not answer {path}", str(err)) from err

    def complete(self, request: Request) -> Answer:
        """Answer one request; the slot's own earlier cache is used when the prompts share a beginning."""
        asked = {"prompt": request.prompt, "n_predict": request.n_predict, "id_slot": request.slot}
        always = {"temperature": 0.0, "seed": 1, "cache_prompt": True, "ignore_eos": True, "return_tokens": True}
        data = self.post("/completion", {**asked, **always, "logit_bias": _NO_BYTES})
        try:
            return from_plain(Answer, {**data, **data.get("timings", {})})
        except (KeyError, TypeError) as err:
            raise self._failed("llama-server's answer is not a completion", f"{type(err).__name__}: {err}") from err

    def slot(self, action: str, slot: int, filename: str = "") -> dict[str, Any]:
        """Save, restore or erase a slot; filename is relative to --slot-save-path."""
        return self.post(f"/slots/{slot}", {"filename": filename} if filename else {}, action=action)


def together(ask: Callable[[_T], _R], what: Sequence[_T]) -> tuple[_R, ...]:
    """Ask all of it at once, each in a thread of its own; the answers in the order in which it was given."""
    pool = ThreadPoolExecutor(len(what))
    try:
        return tuple(pool.map(ask, what))
    finally:
        # Without waiting: on Ctrl-C the server is about to be ended, which ends the requests.
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def llama_server(binary: Path, model: Path, args: Sequence[str], log: Path) -> Iterator[LlamaServer]:
    """Yield a ready server on a free loopback port, its output in `log`. It ends on exit, also by Ctrl-C.

    Raises VerifyError if the server does not become ready.
    """
    for attempt in range(PORT_TRIES):
        port = free_port()
        argv: list[str | Path] = [binary, "-m", model, "--host", "127.0.0.1", "--port", str(port), *args]
        with process.spawn(argv, stdout=log) as running, LlamaServer(running, port, log) as server:
            try:
                server.wait_ready(START_SECONDS)
            except VerifyError:
                if attempt + 1 < PORT_TRIES and "couldn't bind" in server.log:
                    continue  # someone took the port between our look and the server's bind
                raise
            yield server
            return
