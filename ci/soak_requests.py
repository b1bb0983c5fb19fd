"""Make the random requests of ci/soak.py, and check the answers and refusals.

There are requests of clients, of an operator who changes the server, and of an observer who reads its state.
"""

from __future__ import annotations

import collections
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from kvtool.verify.projector import image_url
from kvtool.verify.server import REQUEST_SECONDS, LlamaServer
from kvtool.verify.texts import prompt

SLOTS = 4
TYPES = ("f16", "q8_0", "q4_0", "f32", "bf16")
WATCHED = ("/slots", "/metrics", "/props", "/health", "/mmproj", "/speculative")

Json = dict[str, Any]


class Unexpected(Exception):
    """Report that an answer, or the state after it, is wrong."""


class Soak:
    """Hold one server and the clients that send requests to it.

    tally: how often each kind of request had which outcome
    """

    def __init__(self, server: LlamaServer, seed: int) -> None:
        self.server, self.seed, self.saved = server, seed, set[int]()
        self.tally = collections.Counter[str]()
        self.failed = threading.Event()
        self._lock = threading.Lock()

    def count(self, what: str, end: str) -> None:
        with self._lock:
            self.tally[f"{what}: {end}"] += 1

    def client(self) -> httpx.Client:
        """Make a client that opens a connection for each request.

        llama-server closes a connection after the answer, and a pool of connections would notice that too late.
        """
        close = {"Connection": "close"}
        return httpx.Client(base_url=self.server.url, headers=close, timeout=REQUEST_SECONDS, trust_env=False)

    def request(self, http: httpx.Client, what: str, path: str, body: Json, *refusals: str) -> Json:
        """Send a request and return the answer; {} if it was refused.

        The reason for a refusal must be one of `refusals`, or a reason that is allowed for every request.
        """
        answer = http.post(path, json=body)
        if answer.status_code == 200:
            self.count(what, "answered")
            return dict(answer.json())
        self.count(what, refused(answer, what, body, refusals))
        return {}

    def together(self, jobs: list[Callable[[], None]]) -> None:
        """Run each function in its own thread. Raise the exception of a function that fails.

        If one function fails, the loops of until() in the other functions end before their next request.
        """

        def watched(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException:
                self.failed.set()
                raise

        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(watched, job) for job in jobs]
        for job in running:
            job.result()

    def until(self, end: float, act: Callable[[httpx.Client], None]) -> None:
        with self.client() as http:
            while time.monotonic() < end and not self.failed.is_set():
                act(http)


def refused(answer: httpx.Response, what: str, body: Json, refusals: tuple[str, ...]) -> str:
    """Return the name of the reason for a refusal. Raise Unexpected if this reason is not allowed for the request."""
    error = answer.json()["error"]
    kind, why = error["type"], error["message"]
    if answer.status_code == 503 and kind in ("unavailable_error", "out_of_memory_error"):
        if kind == "unavailable_error" and "Retry-After" not in answer.headers:
            raise Unexpected(f"{what}: {error} without Retry-After")
        return f"refused, {kind}"
    for known in refusals:
        if known in why:
            return f"refused, {known}"
    raise Unexpected(f"{what} {json.dumps(body)[:500]}: HTTP {answer.status_code}, {answer.text[:500]}")


# ---- clients ---------------------------------------------------------------------------------------------------------


def text(rng: random.Random) -> Json:
    """Return a request for a text with one of a few beginnings, for any slot, with or without the cache."""
    return {
        "prompt": f"{prompt(1, rng.choice([20, 150, 300]))} {prompt(rng.randrange(20), rng.randrange(80))}",
        "n_predict": rng.choice([0, 1, 8, 60, 200]),
        "temperature": rng.choice([0.0, 1.0]),
        "ignore_eos": True,
        "id_slot": rng.randrange(-1, SLOTS),
        "cache_prompt": rng.random() < 0.8,
    }


def complete(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    body = text(rng)
    what = "no token" if body["n_predict"] == 0 else "text"
    if answer := soak.request(http, what, "/completion", body):
        judge(what, body, answer)


def stream(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    """Read a stream to its end. It may end with an error."""
    body = {**text(rng), "stream": True}
    with http.stream("POST", "/completion", json=body) as answer:
        said = answer.read()
    if answer.status_code != 200:
        soak.count("stream", refused(answer, "stream", body, ()))
        return
    last = events(said)[-1]
    if "error" in last:
        if last["error"]["type"] != "out_of_memory_error":
            raise Unexpected(f"stream {body}: {last}")
        soak.count("stream", "ended, out_of_memory_error")
    else:
        judge("stream", body, last)
        soak.count("stream", "answered")


def events(said: bytes) -> list[Json]:
    """Parse the events of a stream. Only a line feed ends a line, because a random text contains other line ends."""
    lines = [line.removeprefix(b"data: ") for line in said.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def judge(what: str, body: Json, last: Json) -> None:
    """Check that the answer has all tokens, or that it says that it was cut off."""
    if not last.get("stop") or (last["tokens_predicted"] != body["n_predict"] and not last["truncated"]):
        raise Unexpected(f"{what} {body}: {last}")


def look(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    """Chat about one or two images."""
    images = [image_url(rng.randrange(3)) for _ in range(rng.randint(1, 2))]
    words = {"type": "text", "text": prompt(rng.randrange(4), 20)}
    body = {
        "messages": [{"role": "user", "content": [words, *images]}],
        "max_tokens": rng.choice([0, 2, 20]),
        "id_slot": rng.randrange(-1, SLOTS),
    }
    soak.request(http, "image", "/v1/chat/completions", body, "is unloaded: POST /mmproj")


def go_away(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    """Disconnect after a few lines, or before the first line arrives."""
    body = {**text(rng), "n_predict": 400, "stream": True}
    timeout = httpx.Timeout(REQUEST_SECONDS, read=rng.choice([0.01, 0.1, REQUEST_SECONDS]))
    try:
        with http.stream("POST", "/completion", json=body, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
                refused(answer, "stream", body, ())
            for _ in zip(range(rng.randrange(12)), answer.iter_lines(), strict=False):
                pass
    except httpx.ReadTimeout:
        if timeout.read == REQUEST_SECONDS:
            raise
    soak.count("client", "went away")


def clients(soak: Soak, end: float, rng: random.Random) -> None:
    """Run clients one after the other."""
    while time.monotonic() < end and not soak.failed.is_set():
        with soak.client() as http:
            for _ in range(rng.randrange(5)):
                rng.choice([complete, complete, stream, look])(soak, http, rng)
            go_away(soak, http, rng)


# ---- an operator and an observer -------------------------------------------------------------------------------------


def operate(soak: Soak, rng: random.Random, http: httpx.Client) -> None:
    slot = rng.randrange(SLOTS)
    act = rng.choice(["erase", "save", "restore", "types", "draft's types", "load", "load", "unload", "swap"])
    part, other = rng.sample(["mmproj", "speculative"], 2)
    file = {"filename": f"slot-{slot}"}
    if act == "erase":
        soak.request(http, act, f"/slots/{slot}?action=erase", {})
    elif act == "save":
        if soak.request(http, act, f"/slots/{slot}?action=save", file):
            soak.saved.add(slot)
    elif act == "restore":
        if slot in soak.saved:
            soak.request(http, act, f"/slots/{slot}?action=restore", file, "No available space in KV cache")
    elif act in ("types", "draft's types"):
        keys = ("ctk", "ctv") if act == "types" else ("ctkd", "ctvd")
        types = dict.fromkeys(keys, rng.choice(TYPES))
        soak.request(http, act, "/requantize_kvcache", types, "there is no draft")
    else:
        body = {"action": "load", "unload": other} if act == "swap" else {"action": act}
        timeout = {"timeout_ms": rng.choice([0, 1000, 60000])}
        soak.request(http, f"{act} {part}", f"/{part}", {**body, **timeout})
    time.sleep(rng.random() / 4)


def watch(http: httpx.Client) -> None:
    for path in WATCHED:
        http.get(path).raise_for_status()
    time.sleep(0.05)
