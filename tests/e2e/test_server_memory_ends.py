"""Let memory run out while a server works. The request that needs it gets a clear error, and all others continue.

LLAMA_KV_DYNAMIC_FAIL=N makes the N-th allocation of a growth fail, and N+ also all later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import at_once, completion, events, memory_is_plain, serving, short_of_addresses

APART = ("-c", "4096", "-np", "4", "--no-kv-unified", "--cache-ram", "0")
ONE = ("-c", "2048", "-np", "1", "--cache-ram", "0")
LONG = prompt(1, 600)


@pytest.fixture(params=["inplace", "copy"])
def no_growth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets all growths of a cache with the given number of streams fail from now on."""

    def fail(streams: int) -> None:
        in_place = request.param == "inplace"
        # K and V of two layers; with growth by copy, the start does not count as a growth
        at_start = 2 * 2 * streams if in_place else 0
        monkeypatch.setenv("LLAMA_KV_DYNAMIC_FAIL", f"{at_start + 1}+")
        if not in_place:
            monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")

    return fail


def together(server: LlamaServer, prompts: list[str], lengths: list[int]) -> list[Any]:
    def ask(slot: int) -> Any:
        body = {"prompt": prompts[slot], "n_predict": lengths[slot], "temperature": 0.0, "ignore_eos": True}
        return server.http.post("/completion", json={**body, "id_slot": slot}).json()

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, range(len(prompts))))


def test_only_growing_slot_ends(real: Real, model: Path, tmp_path: Path, no_growth: Callable[[int], None]) -> None:
    prompts = [prompt(i, 40) for i in range(4)]
    lengths = [1000, 150, 150, 150]
    with serving(real, model, tmp_path / "static", *APART) as server:
        expected = together(server, prompts, lengths)
    no_growth(4)
    with serving(real, model, tmp_path / "log", *APART, "--kv-dynamic") as server:
        answers = together(server, prompts, lengths)
        again = completion(server, prompts[0], 16, id_slot=0)
    assert [a["content"] for a in answers[1:]] == [e["content"] for e in expected[1:]]
    assert (answers[0]["stop_type"], answers[0]["truncated"]) == ("limit", True)
    assert 100 < answers[0]["tokens_predicted"] < 256
    assert expected[0]["content"].startswith(answers[0]["content"])
    assert expected[0]["content"].startswith(again["content"])


def test_out_of_memory_error_differs_from_too_long(
    real: Real, model: Path, tmp_path: Path, no_growth: Callable[[int], None]
) -> None:
    no_growth(1)
    with serving(real, model, tmp_path / "log", *ONE, "--kv-dynamic") as server:
        too_long = server.http.post("/completion", json={"prompt": prompt(2, 3000)})
        assert too_long.status_code == 400
        assert too_long.json()["error"]["type"] == "exceed_context_size_error"
        for more in ({}, {"n_predict": 0}):
            answer = server.http.post("/completion", json={"prompt": LONG, **more})
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "out_of_memory_error"
            assert "not enough memory" in answer.json()["error"]["message"]
        *_, last = events(server, "/completion", {"prompt": LONG})
        assert last["error"]["type"] == "out_of_memory_error"
        assert completion(server, prompt(3, 20), 8)["tokens_predicted"] == 8


@pytest.mark.parametrize("sees", [False, True])
def test_repeated_prompt_continues(
    real: Real, model: Path, mmproj: Path, sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(real, model, tmp_path / "static", *ONE) as server:
        expected = completion(server, LONG, 16)["content"]
    files = ("--slot-save-path", tmp_path, *(("--mmproj", mmproj) if sees else ()))
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_FAIL", "1+")
    with serving(real, model, tmp_path / "log", *ONE, *files, "--kv-dynamic") as server:
        assert server.http.post("/completion", json={"prompt": LONG}).status_code == 503
        assert server.slot("save", 0, "slot.bin")["n_saved"] == 256
    monkeypatch.delenv("LLAMA_KV_DYNAMIC_FAIL")
    with serving(real, model, tmp_path / "again", *ONE, *files, "--kv-dynamic") as server:
        server.slot("restore", 0, "slot.bin")
        answer = completion(server, LONG, 16)
    assert answer["timings"]["cache_n"] == 256
    assert answer["content"] == expected


def test_stream_ends_with_length(real: Real, model: Path, tmp_path: Path, no_growth: Callable[[int], None]) -> None:
    no_growth(1)
    with serving(real, model, tmp_path / "log", *ONE, "--kv-dynamic") as server:
        body = {"prompt": prompt(4, 40), "max_tokens": 1000, "temperature": 0.0, "ignore_eos": True}
        *chunks, last = events(server, "/v1/completions", body)
    assert last["choices"][0]["finish_reason"] == "length"
    assert len(chunks) > 100


def test_unified_pool_serves_some_requests(
    real: Real, model: Path, tmp_path: Path, no_growth: Callable[[int], None]
) -> None:
    args = ("-c", "4096", "-np", "4", "--kv-unified", "--cache-ram", "0")
    prompts = [prompt(i, 20) for i in range(4)]
    no_growth(1)
    with serving(real, model, tmp_path / "log", *args, "--kv-dynamic") as server:
        answers = at_once(server, prompts, 120)
    # Texts are not compared: a request that continues uses cells of one that has ended, and attention adds in the order
    # of cells.
    assert any(a["tokens_predicted"] == 120 for a in answers)
    assert any(a["truncated"] for a in answers)
    for answer in answers:
        assert answer["stop_type"] == "limit"
        assert answer["content"]


def test_parent_ends_children(real: Real, model: Path, tmp_path: Path, no_growth: Callable[[int], None]) -> None:
    no_growth(1)
    args = ("-c", "4096", "-np", "4", "--kv-unified", "--cache-ram", "0", "--kv-dynamic")
    with serving(real, model, tmp_path / "log", *args) as server:
        answer = server.http.post("/completion", json={"prompt": LONG, "n_cmpl": 3})
        assert answer.status_code == 503, answer.text
        idle = [slot["is_processing"] for slot in server.http.get("/slots").json()]
        assert idle == [False] * 4
        assert completion(server, prompt(5, 20), 4)["tokens_predicted"] == 4


def test_restore_without_memory(real: Real, model: Path, tmp_path: Path, no_growth: Callable[[int], None]) -> None:
    files = ("--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "static", *ONE, *files, "-c", "4096") as server:
        completion(server, LONG, 0)
        server.slot("save", 0, "slot.bin")
        completion(server, prompt(1, 3000), 0)
        server.slot("save", 0, "large.bin")
    (tmp_path / "broken.bin").write_bytes((tmp_path / "slot.bin").read_bytes()[:1000])
    no_growth(1)
    with serving(real, model, tmp_path / "log", *ONE, *files, "--kv-dynamic") as server:

        def restore(name: str) -> tuple[int, str]:
            answer = server.http.post("/slots/0", params={"action": "restore"}, json={"filename": name})
            return answer.status_code, answer.json()["error"]["type"]

        assert restore("slot.bin") == (503, "out_of_memory_error")
        assert restore("large.bin") == (400, "invalid_request_error")
        assert restore("missing.bin") == (400, "invalid_request_error")
        assert restore("broken.bin") == (400, "invalid_request_error")
        assert completion(server, prompt(5, 20), 4)["tokens_predicted"] == 4


@pytest.mark.parametrize("toy", ["gemma2-dense", "qwen35-dense"])  # a window, and a recurrent state
def test_checkpoint_without_memory(real: Real, toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each allocation fail once. The server must never end, and its answers must be right."""
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")
    model = real.text_model(toy)
    asked = [LONG + tail for tail in ("", " river", " stone")]

    def ask(server: LlamaServer) -> list[Any]:
        body = {"n_predict": 8, "temperature": 0.0, "ignore_eos": True}
        return [server.http.post("/completion", json={**body, "prompt": p}) for p in asked]

    with serving(real, model, tmp_path / "static", *ONE) as server:
        expected = [a.json()["content"] for a in ask(server)]
    for n in range(1, 13):
        monkeypatch.setenv("LLAMA_KV_DYNAMIC_FAIL", str(n))
        with serving(real, model, tmp_path / f"log-{n}", *ONE, "--kv-dynamic") as server:
            for answer, whole in zip(ask(server), expected, strict=True):
                if answer.status_code == 503:
                    assert answer.json()["error"]["type"] == "out_of_memory_error"
                else:
                    assert whole.startswith(answer.json()["content"])


@memory_is_plain
@pytest.mark.parametrize("more", [0, 65536])
def test_slot_without_memory_for_draft(real: Real, tmp_path: Path, more: int) -> None:
    """Limit the memory of a server that drafts.

    It finds no memory for the outputs, for the candidates, or for a copy of the recurrent state to return to.
    """
    args = ("-c", "2048", "-np", "1", "--kv-dynamic", "--no-warmup", "--cache-ram", "0", "--ctx-checkpoints", "0")
    draft = ("-md", real.text_model("llama-dense"), "--spec-type", "draft-simple", "--spec-draft-n-max", "4")
    text = prompt(1, 150)
    with serving(real, real.text_model("qwen35-dense"), tmp_path / "log", *args, *draft) as server:
        for _ in range(4):
            completion(server, text, 1)
        with short_of_addresses(server, more):
            assert completion(server, text, 40)["tokens_predicted"] == 40
        assert completion(server, text, 40)["timings"]["draft_n"] > 0
