"""Test a server that is never idle: its parts, types and clients change, and a monitor always reads its state.

Most of the possible mistakes are between threads. A sanitizer finds them best (`ci/nightly.sh tsan`), and runs more
rounds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from kvtool.verify.server import LlamaServer, RefusedError
from kvtool.verify.texts import prompt
from tests.e2e.conftest import SANITIZED, Real
from tests.e2e.projector import is_unloaded, see
from tests.e2e.servers import completion, n_deferred, part, refusal, serving, until, until_it_generates, weights

pytestmark = pytest.mark.timeout(3600 if SANITIZED else 300)

ROUNDS = 50 if SANITIZED else 10
DEPARTURES = 200 if SANITIZED else 40
WATCHED = ("/slots", "/metrics", "/props", "/health", "/mmproj", "/speculative")
DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")
Args = tuple[str | Path, ...]
STORED = pytest.mark.parametrize("storage", ["inplace", "copy"])


@contextlib.contextmanager
def busy(real: Real, model: Path, log: Path, *args: str | Path) -> Iterator[LlamaServer]:
    """Run a server whose clients open a connection for each request.

    If several threads shared a pool of connections, a thread could close the connection of another one.
    """
    with serving(real, model, log, *args) as server:
        server.http.headers["Connection"] = "close"
        yield server


@contextlib.contextmanager
def meanwhile(*jobs: Callable[[], object]) -> Iterator[None]:
    """Repeat each job in a thread of its own while the block runs.

    Then raise the exception of a job, if there was one.
    """
    done = threading.Event()

    def again(job: Callable[[], object]) -> None:
        job()  # run it at least once, even if the thread starts late
        while not done.is_set():
            job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(again, job) for job in jobs]
        try:
            yield
        finally:
            done.set()
        for job in running:
            job.result()


def watch(server: LlamaServer) -> None:
    for path in WATCHED:
        answer = server.http.get(path)
        # 501 for the last two paths, if the server does not have them
        assert answer.status_code in (200, 501), answer.text
    time.sleep(0.05)


def requantize(server: LlamaServer, rng: random.Random, *keys: str) -> None:
    name = rng.choice(["f16", "q8_0", "q4_0", "f32", "bf16"])
    assert server.post("/requantize_kvcache", dict.fromkeys(keys, name))["success"]


def settled(server: LlamaServer) -> None:
    """Wait until all slots are idle, and erase them."""
    until(lambda: not any(slot["is_processing"] for slot in json.loads(server.get("/slots"))))
    for slot in json.loads(server.get("/slots")):
        server.slot("erase", slot["id"])


def ask(server: LlamaServer, rng: random.Random, n_predict: int) -> httpx.Response:
    """Send one of a few prompts that begin alike, to any slot, with or without the prompt cache."""
    body = {
        "prompt": prompt(1, rng.choice([20, 150])) + prompt(rng.randrange(4), rng.randrange(60)),
        "n_predict": n_predict,
        "temperature": 0.0,
        "ignore_eos": True,
        "id_slot": rng.randrange(-1, 4),
        "cache_prompt": rng.random() < 0.8,
    }
    return server.http.post("/completion", json=body)


def disconnect(server: LlamaServer, rng: random.Random) -> None:
    """Read a part of a stream, perhaps nothing, and disconnect."""
    body = {"prompt": prompt(rng.randrange(8), 60), "n_predict": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/completion", json=body) as answer:
        assert answer.status_code == 200
        for _ in zip(range(rng.randrange(12)), answer.iter_lines(), strict=False):
            pass


@pytest.mark.usefixtures("marker")
def test_parts_change_under_load(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    """Load and unload the projector and the draft model, while eight clients send images and four do not."""
    args = (
        "-c",
        "8192",
        "-np",
        "6",
        "--no-kv-unified",
        "--kv-dynamic",
        "--metrics",
        "--mmproj",
        mmproj,
        "-md",
        model,
        *DRAFT,
    )
    texts = [prompt(seed, 40) for seed in range(4)]
    written: list[tuple[int, str]] = []
    seen: list[httpx.Response] = []

    def answered() -> list[httpx.Response]:
        return [answer for answer in seen if answer.status_code == 200]

    def one_more_is_seen() -> None:
        before = len(answered())
        until(lambda: len(answered()) > before)

    def write(server: LlamaServer, number: int) -> None:
        answer = completion(server, texts[number], 60, id_slot=number, cache_prompt=False)
        written.append((number, answer["content"]))

    def look_at(server: LlamaServer, client: int) -> None:
        seen.append(see(server, client, n_predict=2, id_slot=4 + client % 2, cache_prompt=False))
        if seen[-1].status_code != 200:
            time.sleep(0.05)

    with busy(real, model, tmp_path / "log", *args) as server:
        expected = [completion(server, text, 60, id_slot=slot)["content"] for slot, text in enumerate(texts)]
        clients = [partial(write, server, number) for number in range(4)]
        clients += [partial(look_at, server, client) for client in range(8)]
        with meanwhile(partial(watch, server), *clients):
            for _ in range(ROUNDS):
                for name in ("mmproj", "speculative"):
                    part(server, name, "unload", timeout_ms=60000)
                for name in ("speculative", "mmproj"):
                    part(server, name, "load")
                one_more_is_seen()
    assert {number for number, _ in written} == {0, 1, 2, 3}
    assert all(text == expected[number] for number, text in written)
    assert all(answer.json()["tokens_predicted"] == 2 for answer in answered())
    for answer in seen:
        if answer.status_code == 503:
            assert refusal(answer)[1] == "unavailable_error"
            assert answer.headers["Retry-After"] == "1"
        elif answer.status_code != 200:
            assert is_unloaded(answer)


@pytest.fixture
def common(tmp_path: Path) -> Args:
    """Return the arguments of a server whose slots can be erased at the end."""
    return ("-c", "8192", "-np", "4", "--metrics", "--kv-share-prefix", "--slot-save-path", tmp_path)


@STORED
@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_types_change_under_load(
    real: Real, model: Path, tmp_path: Path, common: Args, monkeypatch: pytest.MonkeyPatch, unified: str, storage: str
) -> None:
    """Change the types of cells during four streams, with a draft model, shared prompts, and a prompt cache in RAM."""
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    args = (*common, unified, "--kv-dynamic", "-md", model, *DRAFT)
    rng = random.Random(1)

    def stream(server: LlamaServer, rng: random.Random) -> None:
        assert ask(server, rng, 60).json()["tokens_predicted"] == 60

    with busy(real, model, tmp_path / "log", *args) as server:
        clients = [partial(stream, server, random.Random(seed)) for seed in range(4)]
        with meanwhile(partial(watch, server), *clients):
            for _ in range(ROUNDS):
                requantize(server, rng, "ctk", "ctv")
                requantize(server, rng, "ctkd", "ctvd")
        settled(server)


@STORED
def test_insufficient_budget_under_load(
    real: Real, model: Path, tmp_path: Path, common: Args, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """Expect that slots lose their cells, that cells get smaller types, and that some requests get a clear error."""
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    # the draft model and 2 MiB
    ladder = ("--kv-budget", str(2 + weights(model)), "--kv-auto-quant", "f16,q8_0,q4_0")
    args = (*common, "--kv-unified", *ladder, "-md", model, *DRAFT)

    def load(server: LlamaServer, rng: random.Random) -> None:
        answer = ask(server, rng, 300)
        if answer.status_code != 200:
            assert refusal(answer)[:2] in ((503, "out_of_memory_error"), (500, "server_error")), answer.text

    with busy(real, model, tmp_path / "log", *args) as server:
        clients = [partial(load, server, random.Random(seed)) for seed in range(4)]
        with meanwhile(partial(watch, server), *clients):
            deadline = time.monotonic() + 120
            for number in itertools.count():
                time.sleep(0.1)
                try:
                    part(server, "speculative", "unload" if number % 2 == 0 else "load", timeout_ms=60000)
                except RefusedError as err:  # a running request needs the memory, so the part stays unloaded
                    assert number % 2 == 1 and "the budget has no room for the" in err.why
                down = json.loads(server.get("/props"))["kv_budget"]["down_total"]
                if number + 1 >= ROUNDS and (down > 0 or time.monotonic() > deadline):
                    break
        settled(server)
        assert down > 0
        assert completion(server, prompt(1, 100), 8)["tokens_predicted"] == 8


@STORED
def test_clients_disconnect_under_load(
    real: Real, model: Path, tmp_path: Path, common: Args, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """Disconnect in the middle of a stream.

    No slot may hang, and the next client must get the same text as the first.
    """
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    args = (*common, "--kv-unified", "--kv-dynamic")
    rng = [random.Random(seed) for seed in range(DEPARTURES)]
    with busy(real, model, tmp_path / "log", *args) as server:
        first = completion(server, prompt(9, 100), 40, id_slot=0)["content"]
        with (
            meanwhile(partial(watch, server), partial(ask, server, random.Random(1), 20)),
            ThreadPoolExecutor(8) as pool,
        ):
            list(pool.map(partial(disconnect, server), rng))
        settled(server)
        assert completion(server, prompt(9, 100), 40, id_slot=0)["content"] == first


def test_waiting_request_keeps_slot_intact(real: Real, model: Path, tmp_path: Path) -> None:
    """Send a request whose prompt is in the prompt cache. The prompt must be restored only when the slot is free."""
    with busy(real, model, tmp_path / "log", "-c", "4096", "-np", "1") as server, ThreadPoolExecutor() as pool:
        completion(server, prompt(1, 100), 8, id_slot=0)
        expected = completion(server, prompt(2, 100), 400, id_slot=0, cache_prompt=False)["content"]
        completion(server, prompt(1, 100), 8, id_slot=0)
        running = pool.submit(completion, server, prompt(2, 100), 400, id_slot=0, cache_prompt=False)
        until_it_generates(server, running)
        waiting = pool.submit(completion, server, prompt(1, 100), 8, id_slot=0)
        assert running.result()["content"] == expected
        assert waiting.result()["timings"]["cache_n"] >= 100


def test_request_after_slotless_task_runs(real: Real, model: Path, tmp_path: Path) -> None:
    """Queue a request after a task that needs no slot. No other request ends later, so only this task can start it."""
    args = ("-c", "4096", "-np", "1", "--metrics", "--slot-save-path", tmp_path)
    with busy(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(completion, server, prompt(1, 50), 2000, id_slot=0)
        until_it_generates(server, running)
        erased = pool.submit(server.http.post, "/slots/0?action=erase")
        until(lambda: n_deferred(server) == 1)
        waiting = pool.submit(completion, server, prompt(2, 50), 8)
        until(lambda: n_deferred(server) == 2)
        assert running.result()["tokens_predicted"] == 2000
        assert erased.result(timeout=60).status_code == 200
        assert waiting.result(timeout=60)["tokens_predicted"] == 8
