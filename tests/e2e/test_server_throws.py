"""What an exception in the midst of a batch leaves behind: no token without its cells, and a server that goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e import broken
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving, until_logged

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library that throws is linked by Linux's rules")

FILE = "KV_THROWS"  # the file that is there while it is to throw


def throwing(what: str, then: str) -> str:
    return f'if (FILE * f = fopen(getenv("{FILE}"), "r")) {{ fclose(f); throw {what}; }} {then}'


# as sched_reserve() does, and a vector for a checkpoint
DECODE = broken.Edit(
    "src/llama-context.cpp",
    "output_swaps.clear();",
    throwing('std::runtime_error("failed to allocate compute pp buffers")', "output_swaps.clear();"),
    after="int llama_context::decode(",
)
CHECKPOINT = broken.Edit(
    "src/llama-context.cpp",
    "ctx->synchronize();",
    throwing("std::bad_alloc()", "ctx->synchronize();"),
    after="size_t llama_state_seq_get_data_ext(",
)
ARGS = ("-c", "4096", "-np", "2", "--no-kv-unified", "--cache-ram", "0", "--no-warmup", "--kv-dynamic")


@pytest.fixture(scope="module")
def library(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("throws")
    broken.build(real, [(DECODE,), (CHECKPOINT,)], out)
    return out


@pytest.fixture
def now(tmp_path: Path) -> Path:
    return tmp_path / "now"


@contextlib.contextmanager
def server_that_throws(
    real: Real, model: Path, library: Path, now: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LlamaServer]:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}:{real.bin}")
    monkeypatch.setenv(broken.VARIABLE, str(number))
    monkeypatch.setenv(FILE, str(now))
    with serving(real, model, now.with_name("log"), *ARGS) as server:
        yield server


def test_a_batch_that_throws_is_computed_when_it_comes_again(
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
def test_a_request_goes_on_without_a_checkpoint(
    real: Real, toy: str, library: Path, now: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompt(3, 700)
    with server_that_throws(real, real.spoken(toy), library, now, 2, monkeypatch) as server:
        expected = completion(server, text, 8, id_slot=1)
        now.touch()
        assert completion(server, text, 8, id_slot=0)["content"] == expected["content"]
        until_logged(server, "no memory for a context checkpoint")
        now.unlink()
        other = f"{prompt(3, 400)} {prompt(4, 100)}"  # needs one of further back, or none
        expected = completion(server, other, 8, id_slot=1)
        assert completion(server, other, 8, id_slot=0)["content"] == expected["content"]
