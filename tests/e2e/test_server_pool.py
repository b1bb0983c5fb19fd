"""A pool of cells that is too small for all slots at once: who waits, who gives up cells, who ends."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, refusal, serving, spoken, spoken_wide

POOL = ("-np", "4", "--kv-unified", "--no-warmup", "--no-cache-idle-slots")
SMALL = (*POOL, "-c", "512")
N = 150  # tokens that a request generates: three of them with their prompts fill the pool


@pytest.fixture(scope="module")
def model(real: Real) -> Path:
    return spoken(real, "llama-dense")


def at_once(server: LlamaServer, prompts: Iterable[str], n_predict: int = N) -> list[dict[str, Any]]:
    """Four clients that take turns."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda text: completion(server, text, n_predict), prompts))


def wait_for(server: LlamaServer, said: str) -> None:
    deadline = time.monotonic() + 60
    while said not in server.log:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)


def all_finish(answers: list[dict[str, Any]], n_predict: int = N) -> None:
    assert [(a["tokens_predicted"], a["truncated"]) for a in answers] == [(n_predict, False)] * len(answers)


DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")


@pytest.mark.parametrize(
    ("toy", "args"),
    [
        ("llama-dense", ()),
        ("llama-dense", ("--kv-dynamic",)),
        ("llama-dense", ("--kv-dynamic", "--kv-share-prefix")),
        ("llama-dense", DRAFT),
        ("gemma2-dense", ("-ub", "16")),
        ("qwen35-dense", ("--kv-dynamic",)),
    ],
)
def test_who_fits_alone_finishes(real: Real, toy: str, args: tuple[str, ...], tmp_path: Path) -> None:
    model = spoken(real, toy)
    draft = ("-md", model) if args == DRAFT else ()
    with serving(real, model, tmp_path / "log", *SMALL, *args, *draft) as server:
        all_finish(at_once(server, [prompt(i, 30 + 20 * (i % 4)) for i in range(6)]))
        assert "paused" in server.log and "resumed" in server.log
        assert all(not slot["is_processing"] for slot in server.http.get("/slots").json())


def test_within_a_budget(real: Real, tmp_path: Path) -> None:
    args = (*POOL, "-c", "16384", "--kv-budget", "16")  # of 64 KiB a cell
    with serving(real, spoken_wide(real), tmp_path / "log", *args) as server:
        all_finish(at_once(server, [prompt(i, 50) for i in range(6)], 80), 80)
        assert "resumed" in server.log


def test_what_was_paused_goes_on_where_it_was(real: Real, model: Path, tmp_path: Path) -> None:
    prompts = [prompt(i, 40) for i in range(4)]
    with serving(real, model, tmp_path / "roomy", *POOL, "-c", "8192") as server:
        expected = [a["content"] for a in at_once(server, prompts)]
    with serving(real, model, tmp_path / "log", *SMALL) as server:
        answers = [a["content"] for a in at_once(server, prompts)]
        assert "resumed" in server.log
    assert answers == expected


def test_without_memory_for_what_is_paused_one_ends(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *SMALL, "--cache-ram", "0") as server:
        answers = at_once(server, [prompt(i, 40) for i in range(4)])
    ended = [a for a in answers if a["truncated"]]
    assert [a["tokens_predicted"] for a in answers if not a["truncated"]] == [N] * (4 - len(ended))
    assert 1 <= len(ended) <= 2
    for answer in ended:
        assert (answer["stop_type"], answer["content"] != "") == ("limit", True)


def test_one_that_has_the_pool_for_itself_and_needs_more(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *SMALL) as server, ThreadPoolExecutor() as pool:
        long = pool.submit(completion, server, prompt(1, 40), -1)
        short = pool.submit(completion, server, prompt(2, 40), N)
        assert long.result()["truncated"]
        all_finish([short.result()])


def test_a_client_that_leaves_while_its_request_is_paused(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *POOL, "-c", "2048") as server, ThreadPoolExecutor() as pool:
        other = pool.submit(completion, server, prompt(1, 40), 1800)
        wait_for(server, "processing task")
        body = {"prompt": prompt(9, 1000), "n_predict": 900, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/completion", json=body, headers={"Connection": "close"}) as answer:
            assert answer.status_code == 200
            wait_for(server, "paused, n_tokens")
            assert sum(slot.get("is_waiting", False) for slot in server.http.get("/slots").json()) == 1
        wait_for(server, "cancel task")  # the server looks once a second who is still there
        assert not other.done()
        all_finish([other.result()], 1800)
        all_finish([completion(server, prompt(3, 40), N)])
        assert "resumed" not in server.log


def test_who_waits_goes_in_turn(real: Real, model: Path, tmp_path: Path) -> None:
    """A long prompt that came first is not overtaken by short ones that would fit beside those that run."""
    with serving(real, model, tmp_path / "log", *SMALL) as server, ThreadPoolExecutor() as pool:
        asked = [pool.submit(completion, server, prompt(1, 40), 400)]
        wait_for(server, "processing task")
        for words in (480, 20):
            asked.append(pool.submit(completion, server, prompt(2, words), 8))
            wait_for(server, f"waits for cells, n_tokens = {words}"[:-1])  # a few tokens more than words
            assert sum(slot.get("is_waiting", False) for slot in server.http.get("/slots").json()) == len(asked) - 1
        for one in asked:
            assert not one.result()["truncated"]
        places = [int(n) for n in re.findall(r"has a place now, n_tokens = (\d+)", server.log)]
    assert len(places) == 2 and places[0] > 400 > places[1]


def test_idle_slots_first_and_the_one_that_was_used_last_is_the_last(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *SMALL) as server:
        for slot in (2, 0, 1):
            completion(server, prompt(slot, 60), 8, id_slot=slot)
        completion(server, prompt(7, 250), 100, id_slot=3)
        assert [slot for slot in range(4) if f"purging slot {slot}" in server.log] == [2]
        back = completion(server, prompt(2, 60) + " river", 8)  # it was saved before
        assert back["timings"]["cache_n"] >= 60


def test_a_prompt_that_no_budget_holds(real: Real, tmp_path: Path) -> None:
    def ask(server: LlamaServer, words: int) -> httpx.Response:
        return server.http.post("/completion", json={"prompt": prompt(1, words), "n_predict": 4, "ignore_eos": True})

    args = (*POOL, "-c", "16384", "--kv-budget", "16")
    with serving(real, spoken_wide(real), tmp_path / "log", *args, "--kv-auto-quant", "f16,q8_0") as server:
        assert ask(server, 120).status_code == 200
        status, kind, message = refusal(ask(server, 700))
        assert (status, kind) == (400, "exceed_context_size_error")
        assert "exceeds what --kv-budget 16 holds" in message
        assert ask(server, 120).status_code == 200
