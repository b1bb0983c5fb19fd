"""Test a pool of cells that is too small for all slots: which slots wait, lose their cells or end."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.budgets import LADDER
from tests.e2e.conftest import Real
from tests.e2e.servers import (
    at_once,
    completion,
    generated,
    n_deferred,
    n_waiting,
    refusal,
    serving,
    until,
    until_logged,
)

POOL = ("-np", "4", "--kv-unified", "--no-warmup", "--no-cache-idle-slots")
SMALL = (*POOL, "-c", "512")
N = 150  # tokens that a request generates; three requests with their prompts fill the pool


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
def test_request_that_fits_alone_finishes(real: Real, toy: str, args: tuple[str, ...], tmp_path: Path) -> None:
    model = real.text_model(toy)
    draft = ("-md", model) if args == DRAFT else ()
    with serving(real, model, tmp_path / "log", *SMALL, *args, *draft) as server:
        all_finish(at_once(server, [prompt(i, 30 + 20 * (i % 4)) for i in range(6)], N))
        assert all(not slot["is_processing"] for slot in server.http.get("/slots").json())
    assert "paused" in server.log and "resumed" in server.log


def test_pool_within_budget(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    args = (*POOL, "-c", "16384", "--kv-budget", "16")  # 64 KiB for each cell
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        all_finish(at_once(server, [prompt(i, 50) for i in range(6)], 80), 80)
    assert "resumed" in server.log


@pytest.mark.parametrize(("requests", "words", "n_predict"), [(2, 50, 400), (3, 80, 300)])
def test_copy_pool_keeps_spare_block(
    real: Real,
    large_cell_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    words: int,
    n_predict: int,
) -> None:
    """Use growth by copy, which needs a spare block. So the pool cannot allocate all cells that the budget allows.

    Idle slots free cells for paused requests. If there is no room for a paused request, it is not tried again with each
    batch.
    """
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")
    with serving(real, large_cell_model, tmp_path / "log", *POOL, "-c", "16384", "--kv-budget", "64") as server:
        all_finish(at_once(server, [prompt(i, words) for i in range(requests)], n_predict), n_predict)
    assert "resumed" in server.log
    assert server.log.count("error loading state") < 30


def test_paused_request_continues(real: Real, model: Path, tmp_path: Path) -> None:
    prompts = [prompt(i, 40) for i in range(4)]
    with serving(real, model, tmp_path / "roomy", *POOL, "-c", "8192") as server:
        expected = [a["content"] for a in at_once(server, prompts, N)]
    with serving(real, model, tmp_path / "log", *SMALL) as server:
        answers = [a["content"] for a in at_once(server, prompts, N)]
    assert "resumed" in server.log
    assert answers == expected


def test_request_ends_without_pause_memory(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *SMALL, "--cache-ram", "0") as server:
        answers = at_once(server, [prompt(i, 40) for i in range(4)], N)
    ended = [a for a in answers if a["truncated"]]
    assert [a["tokens_predicted"] for a in answers if not a["truncated"]] == [N] * (4 - len(ended))
    assert 1 <= len(ended) <= 2
    for answer in ended:
        assert (answer["stop_type"], answer["content"] != "") == ("limit", True)


def test_paused_and_saved_share_cache_ram(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    """Let --cache-ram be too small for both the prompt of an idle slot and a paused request. A cell has 64 KiB."""
    args = ("-np", "3", "-c", "1024", "--kv-unified", "--no-warmup", "--no-cache-idle-slots", "--cache-ram", "44")
    texts = [prompt(1, 100), prompt(2, 250), prompt(3, 450)]
    with serving(real, large_cell_model, tmp_path / "log", *args) as server, ThreadPoolExecutor() as pool:
        answers = []
        for slot, n_predict in enumerate((800, 100, 200)):
            answers.append(pool.submit(completion, server, texts[slot], n_predict, id_slot=slot))
            until(lambda: server.log.count("processing task") == len(answers))
        all_finish([answers[0].result()], 800)
        all_finish([answers[1].result()], 100)
        all_finish([answers[2].result()], 200)
        until_logged(server, "resumed")
        until_logged(server, "purging slot 1")
        assert completion(server, f"{texts[1]} river", 1)["timings"]["cache_n"] < 50


def test_single_request_exceeding_pool(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *SMALL) as server, ThreadPoolExecutor() as pool:
        long = pool.submit(completion, server, prompt(1, 40), -1)
        short = pool.submit(completion, server, prompt(2, 40), N)
        assert long.result()["truncated"]
        all_finish([short.result()])


def test_client_disconnects_while_paused(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *POOL, "-c", "4096") as server, ThreadPoolExecutor() as pool:
        other = pool.submit(completion, server, prompt(1, 40), 3300)
        until_logged(server, "processing task")
        body = {"prompt": prompt(9, 2500), "n_predict": 1500, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/completion", json=body, headers={"Connection": "close"}) as answer:
            assert answer.status_code == 200
            until_logged(server, "paused, n_tokens")
            assert n_waiting(server) == 1
        until_logged(server, "cancel task")  # the server checks once in a second whether the client is connected
        assert not other.done()
        all_finish([other.result()], 3300)
        all_finish([completion(server, prompt(3, 40), N)])
    assert "resumed" not in server.log


@pytest.mark.parametrize("first", [0, 3])
def test_waiting_requests_keep_order(real: Real, model: Path, tmp_path: Path, first: int) -> None:
    """Expect that a short prompt does not overtake a long prompt that arrived first.

    The short prompt would fit into the pool at once.
    """
    args = (*POOL, "-c", "2048")
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor() as pool:
        for slot in range(4):  # slots are used in this order
            completion(server, prompt(9, 10), 0, id_slot=abs(first - slot))
        running = pool.submit(completion, server, prompt(1, 40), 1900)
        until(lambda: any(slot["is_processing"] for slot in server.http.get("/slots").json()))
        waiting = pool.submit(at_once, server, [prompt(2, 1980), prompt(2, 20)], 8)
        until(lambda: n_waiting(server) == 2)
        all_finish([running.result()], 1900)
        all_finish(waiting.result(), 8)
    places = [int(n) for n in re.findall(r"has a place now, n_tokens = (\d+)", server.log)]
    assert len(places) == 2 and places[0] > 400 > places[1]


def test_idle_slots_are_cleared_in_order(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *SMALL) as server:
        for slot in (2, 0, 1):
            completion(server, prompt(slot, 60), 8, id_slot=slot)
        completion(server, prompt(7, 250), 100, id_slot=3)
        until(lambda: server.log.count("stop processing") == 4)  # this is the last line that a slot logs
        assert [slot for slot in range(4) if f"purging slot {slot}" in server.log] == [2]
        back = completion(server, prompt(2, 60) + " river", 8)  # this conversation was saved before
        assert back["timings"]["cache_n"] >= 60


def test_prompt_beyond_budget_is_refused(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    def ask(server: LlamaServer, words: int) -> httpx.Response:
        return server.http.post("/completion", json={"prompt": prompt(1, words), "n_predict": 4, "ignore_eos": True})

    args = (*POOL, "-c", "16384", "--kv-budget", "16")
    with serving(real, large_cell_model, tmp_path / "log", *args, "--kv-auto-quant", "f16,q8_0") as server:
        assert ask(server, 120).status_code == 200
        status, kind, message = refusal(ask(server, 700))
        assert (status, kind) == (400, "exceed_context_size_error")
        assert "exceeds what --kv-budget 16 holds" in message
        assert ask(server, 120).status_code == 200


def test_restored_prompt_receives_room(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    """Restore a saved prompt while other prompts use all cells.

    The idle slot must be cleared to make room. Its prompt is too large to be saved in --cache-ram.
    """
    args = (*POOL, "-np", "2", "-c", "2048", "--cache-ram", "150")  # 64 KiB for each cell
    long, first, second = ("Once upon a time " + prompt(i, n) for i, n in ((3, 1300), (1, 800), (2, 800)))
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        for slot, text in enumerate((long, first, second)):
            completion(server, text, 0, id_slot=slot % 2)
        answer = completion(server, long, 8)
        all_finish([answer], 8)
        assert answer["timings"]["cache_n"] > 1300


def test_waiting_children_release_cells(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", "-c", "1024", "-np", "2", "--kv-unified", "--no-warmup") as server:
        completion(server, prompt(1, 700), 4, id_slot=1)
        body = {"prompt": prompt(5, 700), "n_predict": 8, "temperature": 0.0, "ignore_eos": True, "n_cmpl": 2}
        answer = server.http.post("/completion", json=body)
        assert answer.status_code == 200, answer.text
        assert [a["tokens_predicted"] for a in answer.json()] == [8, 8]


@pytest.mark.parametrize("limit", [("-c", "1024", "--kv-dynamic"), ("-c", "4096", "--kv-budget", "64", *LADDER)])
def test_idle_slots_yield_to_restored_slot(
    real: Real, large_cell_model: Path, tmp_path: Path, limit: tuple[str, ...]
) -> None:
    """Restore a slot file while an idle slot uses most of the 1024 cells.

    The idle slot must be cleared. The cells must not change to smaller types, which would make room but lose precision.
    """
    files = ("-np", "2", "--kv-unified", "--no-warmup", "--slot-save-path", tmp_path, "--cache-ram", "0")
    with serving(real, large_cell_model, tmp_path / "log", *files, *limit) as server:
        completion(server, prompt(1, 400), 0, id_slot=0)
        server.slot("save", 0, "slot.bin")
        server.slot("erase", 0)
        completion(server, prompt(2, 800), 0, id_slot=1)
        assert server.slot("restore", 0, "slot.bin")["n_restored"] >= 400
        assert completion(server, prompt(1, 400), 1, id_slot=0)["timings"]["cache_n"] >= 400
        assert server.http.get("/props").json().get("kv_budget", {}).get("down_total", 0) == 0
        # a damaged file must not change another slot
        (tmp_path / "broken.bin").write_bytes((tmp_path / "slot.bin").read_bytes()[:1000000])
        completion(server, prompt(2, 100), 0, id_slot=1)
        broken = server.http.post("/slots/0", params={"action": "restore"}, json={"filename": "broken.bin"})
        assert refusal(broken)[0] == 400
        assert completion(server, prompt(2, 100), 1, id_slot=1)["timings"]["cache_n"] >= 100


def test_shifted_slots_need_no_more_cells(real: Real, model: Path, tmp_path: Path) -> None:
    """Expect that a waiting request can use the cells that a context shift has freed."""
    args = (*POOL, "-c", "1024", "-np", "3", "--kv-unified-per-slot", "512", "--context-shift")
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor() as pool:
        others = [pool.submit(completion, server, prompt(slot, 450), 6000, id_slot=slot) for slot in (0, 2)]
        until(lambda: generated(server, 0) and generated(server, 2))
        assert completion(server, prompt(6, 200), 5, id_slot=1)["tokens_predicted"] == 5
        assert not any(other.done() for other in others)
        server.process.kill()


def test_idle_slots_keep_cells_for_hopeless_request(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *POOL, "-c", "4096", "--cache-ram", "0") as server:
        completion(server, prompt(3, 150), 1, id_slot=0)
        with ThreadPoolExecutor() as pool:
            pool.submit(completion, server, prompt(2, 2200), 1500, id_slot=2)
            until(lambda: generated(server, 2))
            pool.submit(completion, server, prompt(6, 2000), 2, id_slot=1)
            until_logged(server, "waits for cells")
            assert generated(server, 2) and server.http.get("/slots").json()[0]["n_prompt_tokens"] > 150
            server.process.kill()
    assert "purging" not in server.log


def test_dropped_drafts_are_not_counted(real: Real, model: Path, tmp_path: Path) -> None:
    """Use the target as its own draft model.

    Every drafted token is accepted, except those that are dropped without cells.
    """
    with serving(real, model, tmp_path / "log", *SMALL, "-md", model, *DRAFT) as server:
        for answer in at_once(server, [prompt(i, 40) for i in range(4)], N):
            timings = answer["timings"]
            assert timings["draft_n"] == timings["draft_n_accepted"]


def test_hopeless_restore_keeps_idle_slots(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*POOL, "-c", "4096", "--kv-dynamic", "--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor(1) as pool:
        completion(server, prompt(3, 3700), 0, id_slot=2)
        server.slot("save", 2, "file")
        server.slot("erase", 2)
        completion(server, prompt(4, 60), 0, id_slot=1)
        running = pool.submit(completion, server, prompt(5, 400), 3000, id_slot=0)
        until(lambda: generated(server))
        answer = server.http.post("/slots/2", params={"action": "restore"}, json={"filename": "file"})
        assert answer.status_code != 200
        assert server.http.get("/slots").json()[1]["n_prompt_tokens"] > 50
        assert not running.done()
        server.process.kill()


def test_request_for_any_slot_takes_idle(real: Real, model: Path, tmp_path: Path) -> None:
    """Expect that a request for any slot gets the idle slot.

    A request for the busy slot, which waits for a longer time, must not prevent this.
    """
    args = ("-np", "2", "--kv-unified", "-c", "4096", "--no-warmup", "--metrics")
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor(4) as pool:
        long = pool.submit(completion, server, prompt(0, 10), 3000, id_slot=0)
        until(lambda: generated(server, 0))
        pool.submit(completion, server, prompt(1, 10), 1000, id_slot=1)
        until(lambda: generated(server, 1))
        pool.submit(completion, server, prompt(2, 10), 2, id_slot=0)
        until(lambda: n_deferred(server) == 1)
        pool.submit(completion, server, prompt(3, 10), 2).result()
        assert not long.done()
        server.process.kill()


def test_slot_number_wraps_around(real: Real, model: Path, tmp_path: Path) -> None:
    """Use two slots, so that the number 3 means slot 1."""
    args = ("-np", "2", "--kv-unified", "-c", "4096", "--no-warmup", "--metrics")
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor(4) as pool:
        pool.submit(completion, server, prompt(0, 10), 2500, id_slot=0)
        until(lambda: generated(server, 0))
        pool.submit(completion, server, prompt(1, 10), 1000, id_slot=1)
        until(lambda: generated(server, 1))
        named = pool.submit(completion, server, prompt(2, 10), 40, id_slot=3)
        until(lambda: n_deferred(server) == 1)
        other = pool.submit(completion, server, prompt(3, 10), 2)
        answers = [named.result(), other.result()]
        first, then = (answer["tokens_evaluated"] + answer["tokens_predicted"] - 1 for answer in answers)

        def ended() -> list[int]:
            return [int(n) for n in re.findall(r"stop processing: n_tokens = (\d+)", server.log)]

        until(lambda: {first, then} <= set(ended()))
        assert ended().index(first) < ended().index(then)
        server.process.kill()
