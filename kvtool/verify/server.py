"""Start a llama-server on this machine, send requests to it, and end it in any case.

Nothing is compared here; conversation.py and parts.py do that. If the server does not start, dies or gives an unusable
answer, a VerifyError with the end of its log is raised.
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
# time until /health must answer 200; a busy machine needs most of it if the server has a sanitizer
START_SECONDS = 120.0
REQUEST_SECONDS = 300.0
PORT_TRIES = 3

# The tokens <0x80> to <0xFF> of models.VOCABULARY must not be generated. With random weights they would not form valid
# UTF-8, and servers from before v0.5.0 answer a text that is not valid UTF-8 with an error.
_NO_BYTES = [[token, False] for token in range(131, 259)]


class RefusedError(VerifyError):
    """Report that the server answered a request with an error, and is still running."""


class Request(NamedTuple):
    """Hold one /completion request at temperature 0.

    n_predict: the number of tokens to generate
    slot: the slot to use; -1 lets the server choose
    """

    prompt: str
    n_predict: int
    slot: int = -1


@dataclass(frozen=True)
class Answer:
    """Hold an answer, with the server's names for its fields.

    cache_n: the number of prompt tokens that were in the slot's cache already
    """

    content: str
    tokens: tuple[int, ...]
    tokens_evaluated: int
    cache_n: int = 0
    truncated: bool = False


def json_of_events(answer: httpx.Response) -> Iterator[Any]:
    """Yield the JSON of each event of a stream when it arrives. Raise ValueError if an event is not JSON."""
    for event in httpx_sse.EventSource(answer).iter_sse():
        if event.data != "[DONE]":
            yield event.json()


def free_port() -> int:
    """Return a port of this machine that nothing uses right now. Another process may take it before the caller does."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class LlamaServer(contextlib.ExitStack):
    """Control a running server.

    If it dies or answers with an error, a method raises VerifyError with the end of its log.

    process: the process of the server
    http: the client, for requests that have no method here
    """

    def __init__(self, running: process.Process, port: int, log: Path) -> None:
        super().__init__()
        self.process, self._log = running, log
        self.url = f"http://127.0.0.1:{port}"
        # ignore proxy settings of the environment, because the server is on this machine
        http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(REQUEST_SECONDS, connect=10), trust_env=False)
        self.http = self.enter_context(http)

    def resident(self) -> int | None:
        """Return the resident bytes of the process, None if the system does not report them."""
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
        """Wait until the model is loaded. Raise VerifyError if the server exits first or takes longer."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        why = f"not ready after {seconds:g} s" if self.process.poll() is None else ""
        raise self._failed("llama-server did not start", why)

    def post(self, path: str, body: dict[str, Any], **params: str) -> dict[str, Any]:
        """Send a POST request, and return the JSON of the answer.

        Raise RefusedError if the server answers with an error.
        """
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
        """Return the text at a path of the server. Raise VerifyError if the path does not exist."""
        try:
            return self.http.get(path).raise_for_status().text
        except httpx.HTTPError as err:
            raise self._failed(f"the server did not answer {path}", str(err)) from err

    def complete(self, request: Request) -> Answer:
        """Send one request, and return its answer.

        The server reuses the part of the prompt that is in the slot's cache.
        """
        asked = {"prompt": request.prompt, "n_predict": request.n_predict, "id_slot": request.slot}
        always = {"temperature": 0.0, "seed": 1, "cache_prompt": True, "ignore_eos": True, "return_tokens": True}
        data = self.post("/completion", {**asked, **always, "logit_bias": _NO_BYTES})
        try:
            return from_plain(Answer, {**data, **data.get("timings", {})})
        except (KeyError, TypeError) as err:
            raise self._failed("llama-server's answer is not a completion", f"{type(err).__name__}: {err}") from err

    def slot(self, action: str, slot: int, filename: str = "") -> dict[str, Any]:
        """Save, restore or erase a slot. `filename` is relative to --slot-save-path."""
        return self.post(f"/slots/{slot}", {"filename": filename} if filename else {}, action=action)


def together(ask: Callable[[_T], _R], what: Sequence[_T]) -> tuple[_R, ...]:
    """Call `ask` with each item at the same time, each in a thread of its own.

    Return the results in the order of the items.
    """
    pool = ThreadPoolExecutor(len(what))
    try:
        return tuple(pool.map(ask, what))
    finally:
        # do not wait for the threads: after Ctrl-C the server is ended soon, and that ends its requests
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def llama_server(binary: Path, model: Path, args: Sequence[str], log: Path) -> Iterator[LlamaServer]:
    """Yield a ready server on a free port of this machine. Its output is written to `log`.

    The server is ended on exit, also after Ctrl-C. Raises VerifyError if it does not become ready.
    """
    for attempt in range(PORT_TRIES):
        port = free_port()
        argv: list[str | Path] = [binary, "-m", model, "--host", "127.0.0.1", "--port", str(port), *args]
        with process.spawn(argv, stdout=log) as running, LlamaServer(running, port, log) as server:
            try:
                server.wait_ready(START_SECONDS)
            except VerifyError:
                if attempt + 1 < PORT_TRIES and "couldn't bind" in server.log:
                    # another program took the port between our test and the start of the server, so try another port
                    continue
                raise
            yield server
            return
