"""Test an exception in the middle of a batch. Every token keeps its cells, and the server continues."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e import broken
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, n_waiting, serving, until, until_it_generates, until_logged
from tests.e2e.speculative import CLEAR

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library that throws is linked by Linux's rules")

FILE = "KV_THROWS"  # while this file exists, the server throws an exception


def failing(how: str, then: str) -> str:
    return f'if (FILE * f = fopen(getenv("{FILE}"), "r")) {{ fclose(f); {how}; }} {then}'


THROW = 'throw std::runtime_error("failed to allocate compute pp buffers")'

# Throw as sched_reserve() and the vector of a checkpoint can.
DECODE = broken.Edit(
    "src/llama-context.cpp",
    "output_swaps.clear();",
    failing(THROW, "output_swaps.clear();"),
    after="int llama_context::decode(",
)
CHECKPOINT = broken.Edit(
    "src/llama-context.cpp",
    "ctx->synchronize();",
    failing("throw std::bad_alloc()", "ctx->synchronize();"),
    after="size_t llama_state_seq_get_data_ext(",
)
# Throw once in a batch that has no part of a waiting request.
ONCE = [
    broken.Edit(
        "src/llama-context.cpp",
        "memory_update(false);",
        failing(f'remove(getenv("{FILE}")); {how}', "memory_update(false);"),
        after="// handle any pending shifts/copies",
    )
    for how in (THROW, "return -3")
]
ARGS = ("-c", "4096", "-np", "2", "--no-kv-unified", "--cache-ram", "0", "--no-warmup", "--kv-dynamic")


@pytest.fixture(scope="module")
def library(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("throws")
    broken.build(real, [(DECODE,), (CHECKPOINT,), *((edit,) for edit in ONCE)], out)
    return out


@pytest.fixture
def now(tmp_path: Path) -> Path:
    return tmp_path / "now"


@contextlib.contextmanager
def server_that_throws(
    real: Real,
    model: Path,
    library: Path,
    now: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...] = ARGS,
) -> Iterator[LlamaServer]:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}:{real.bin}")
    monkeypatch.setenv(broken.VARIABLE, str(number))
    monkeypatch.setenv(FILE, str(now))
    with serving(real, model, now.with_name("log"), *args) as server:
        yield server


def test_repeated_prompt_after_exception(
    real: Real, model: Path, library: Path, now: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prompt(1, 200), f"{prompt(1, 200)} {prompt(2, 100)}"
    with server_that_throws(real, model, library, now, 1, monkeypatch) as server:
        expected = completion(server, second, 8, id_slot=1)
        had = completion(server, first, 0, id_slot=0)["tokens_evaluated"]
        now.touch()
        answer = server.http.post("/completion", json={"prompt": second, "n_predict": 8, "id_slot": 0})
        assert answer.status_code == 500, answer.text
        now.unlink()
        again = completion(server, second, 8, id_slot=0)
    assert again["content"] == expected["content"]
    assert again["timings"]["cache_n"] == had


@pytest.mark.parametrize("toy", ["gemma2-dense", "qwen35-dense"])  # a window, and a recurrent state
def test_request_continues_without_checkpoint(
    real: Real, toy: str, library: Path, now: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompt(3, 700)
    with server_that_throws(real, real.text_model(toy), library, now, 2, monkeypatch) as server:
        expected = completion(server, text, 8, id_slot=1)
        now.touch()
        assert completion(server, text, 8, id_slot=0)["content"] == expected["content"]
        until_logged(server, "no memory for a context checkpoint")
        now.unlink()
        other = f"{prompt(3, 400)} {prompt(4, 100)}"  # this text needs an older checkpoint, or none
        expected = completion(server, other, 8, id_slot=1)
        assert completion(server, other, 8, id_slot=0)["content"] == expected["content"]


@pytest.mark.parametrize("number", [3, 4], ids=["throws", "fails"])
@pytest.mark.parametrize(
    ("text", "more"),
    [
        (prompt(800, 1850), {"n_predict": 8}),
        (prompt(800, 1850), {"n_predict": 8, "n_cmpl": 2}),
        (CLEAR, {"n_predict": 900}),  # a part is computed together with another text
    ],
    ids=["waits", "waits-for-two-texts", "is-paused"],
)
def test_request_waiting_for_cells_survives(
    real: Real,
    model: Path,
    library: Path,
    now: Path,
    number: int,
    text: str,
    more: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(text: str, **more: int) -> list[Any]:
        body = {"prompt": text, "temperature": 0.0, "ignore_eos": True, **more}
        answer = server.http.post("/completion", json=body)
        texts = answer.json() if isinstance(answer.json(), list) else [answer.json()]
        return [answer.status_code, *(text.get("content") for text in texts)]

    args = ("-c", "2048", "-np", "4", "--kv-unified", "--no-warmup")
    with (
        server_that_throws(real, model, library, now, number, monkeypatch, args) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        expected = ask(text, **more)
        first = pool.submit(ask, prompt(300, 300), n_predict=2000, id_slot=0)
        until_it_generates(server, first)
        second = pool.submit(ask, text, **more)
        until(lambda: n_waiting(server))
        now.touch()
        assert first.result() == [500, None]
        assert second.result() == expected
    assert expected[0] == 200


@pytest.mark.parametrize("number", [3, 4], ids=["throws", "fails"])
def test_request_waiting_for_prefix_survives(
    real: Real, model: Path, library: Path, now: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("-c", "16384", "-np", "2", "-b", "16", "--kv-unified", "--kv-share-prefix", "--no-warmup", "--slots")
    body = {"prompt": prompt(1, 7000), "n_predict": 8}
    with (
        server_that_throws(real, model, library, now, number, monkeypatch, args) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        first, second = (pool.submit(server.http.post, "/completion", json={**body, "id_slot": n}) for n in (0, 1))
        until(lambda: all(slot["is_processing"] for slot in server.http.get("/slots").json()))
        now.touch()
        assert sorted(answer.result().status_code for answer in (first, second)) == [200, 500]
