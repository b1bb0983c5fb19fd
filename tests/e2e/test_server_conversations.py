"""Test that the server does not compute a conversation again that it has computed before.

The cases are from real reports.

The model is SmolLM2-135M-Instruct. Without a network, these tests are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.adapter import adapter
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving, until

MODES = {
    "static": ({}, ()),
    "in-place": ({}, ("--kv-dynamic",)),
    "by-copy": ({"LLAMA_KV_DYNAMIC_STORAGE": "copy"}, ("--kv-dynamic",)),
}


def text(tag: str, n: int) -> str:
    return f"{tag}: " + ", ".join(f"item {i} of {tag}" for i in range(n))


def cached(server: LlamaServer, text: str, n_predict: int = 1, **more: object) -> int:
    """Return the number of prompt tokens that were in the cache."""
    return int(completion(server, text, n_predict, **more)["timings"]["cache_n"])


def n_tokens(server: LlamaServer, text: str) -> int:
    return len(server.post("/tokenize", {"content": text})["tokens"])


def sleep(server: LlamaServer) -> None:
    until(lambda: server.http.get("/props").json()["is_sleeping"])


@contextmanager
def starting(
    real: Real, model: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *args: str | Path
) -> Iterator[LlamaServer]:
    env, more = MODES[mode]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with serving(real, model, tmp_path / "log", "--fit", "off", "--no-warmup", *args, *more) as server:
        yield server


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("how", ["plain", "prompt-only", "erased", "shared"])
def test_other_slot_continues_conversation(
    real: Real, smollm2: Path, mode: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["-c", "4096", "-np", "2", "--cache-ram", "512", "--slot-save-path", str(tmp_path)]
    if how == "shared":
        args += ["-kvu", "--kv-share-prefix"]
    with starting(real, smollm2, mode, tmp_path, monkeypatch, *args) as server:
        a, n_predict = text("A", 50), 0 if how == "prompt-only" else 1
        cached(server, a, n_predict, id_slot=0)
        cached(server, text("B", 50), n_predict, id_slot=0)
        if how == "erased":
            server.slot("erase", 0)
        assert cached(server, a, n_predict, id_slot=1) == n_tokens(server, a) - 1
        if how != "erased":
            assert cached(server, text("B", 50), n_predict, id_slot=1) == n_tokens(server, text("B", 50)) - 1


def test_idle_slot_gives_conversation_to_other(
    real: Real, smollm2: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("-c", "4096", "-np", "2", "--cache-ram", "512")
    with starting(real, smollm2, mode, tmp_path, monkeypatch, *args) as server:
        a = text("A", 50)
        cached(server, a, id_slot=0)
        assert cached(server, a, id_slot=1) == n_tokens(server, a) - 1


def test_released_slot_keeps_conversation(real: Real, smollm2: Path, tmp_path: Path) -> None:
    args = ("-c", "4096", "-np", "2", "--cache-ram", "512", "--fit", "off", "--kv-idle-release", "1")
    with serving(real, smollm2, tmp_path / "log", *args) as server:
        a = text("A", 50)
        cached(server, a, id_slot=0)
        cached(server, text("B", 50), id_slot=0)
        until(lambda: "giving back the cells of" in server.log)
        time.sleep(2.5)  # an earlier version dropped all conversations after 2 seconds
        assert cached(server, a, id_slot=1) == n_tokens(server, a) - 1
        assert cached(server, text("B", 50), id_slot=0) == n_tokens(server, text("B", 50)) - 1


def test_restored_file_yields_to_longer_state(
    real: Real, smollm2: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("-c", "8192", "-np", "1", "--cache-ram", "512", "--slot-save-path", tmp_path)
    with starting(real, smollm2, mode, tmp_path, monkeypatch, *args) as server:
        first, other = text("A", 60), text("B", 100)
        longer = first + text("more", 200)
        cached(server, first)
        server.slot("save", 0, "first.bin")
        cached(server, longer)
        cached(server, other)
        server.slot("restore", 0, "first.bin")
        assert cached(server, longer + " and") >= n_tokens(server, longer) - 2
        # restoring the other conversation must not lose this one
        assert cached(server, other) == n_tokens(server, other) - 1


def test_branch_keeps_conversation_it_left(
    real: Real, smollm2: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("-c", "4096", "-np", "1", "--cache-ram", "512")
    with starting(real, smollm2, mode, tmp_path, monkeypatch, *args) as server:
        common = text("common", 80)
        a, x = common + text("A", 60), common + text("X", 30)
        cached(server, a)
        cached(server, text("B", 60))
        assert cached(server, x) >= n_tokens(server, common) - 2
        assert cached(server, a) == n_tokens(server, a) - 1
        assert cached(server, x) == n_tokens(server, x) - 1


def test_large_conversation_stays_in_free_cells(
    real: Real, smollm2: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with starting(real, smollm2, mode, tmp_path, monkeypatch, "-c", "8192", "--cache-ram", "20") as server:
        a = text("A", 300)
        cached(server, a)
        cached(server, "hi")
        assert cached(server, a + " and") >= n_tokens(server, a) - 1


def test_sleep_keeps_conversations(
    real: Real, smollm2: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("-c", "4096", "-np", "2", "--cache-ram", "512", "--sleep-idle-seconds", "1")
    with starting(real, smollm2, mode, tmp_path, monkeypatch, *args) as server:
        for _ in range(2):
            cached(server, text("A", 50), id_slot=0)
            cached(server, text("B", 50), id_slot=1)
            sleep(server)
            assert cached(server, text("A", 50), id_slot=1) == n_tokens(server, text("A", 50)) - 1
            assert cached(server, text("B", 50), id_slot=0) == n_tokens(server, text("B", 50)) - 1


TOY = ("-c", "4096", "-np", "2", "-ub", "32", "--cache-ram", "512", "--no-warmup", "--sleep-idle-seconds", "1")
FIRST, SECOND = prompt(1, 150), prompt(2, 150)


def continues(server: LlamaServer, slot: int, expected: str, **more: object) -> bool:
    """Return True if the slot continues the first conversation, and computes at most one ubatch of the prompt."""
    answer = completion(server, f"{FIRST} river", 12, id_slot=slot, **more)
    return bool(answer["content"] == expected and answer["timings"]["prompt_n"] <= 32)


def computed(server: LlamaServer, **more: object) -> str:
    """Return the text that follows the first conversation, computed without a cache."""
    return str(completion(server, f"{FIRST} river", 12, cache_prompt=False, **more)["content"])


@pytest.mark.parametrize("toy", ["gemma2-dense", "qwen35-dense", "mamba2-dense"])  # window, hybrid, recurrent
@pytest.mark.parametrize("flag", ["--kv-dynamic", "--no-kv-unified"])
def test_models_with_checkpoints_continue(real: Real, toy: str, flag: str, tmp_path: Path) -> None:
    with serving(real, real.text_model(toy), tmp_path / "log", *TOY, flag) as server:
        expected = computed(server)
        completion(server, FIRST, 1, id_slot=0)
        completion(server, SECOND, 1, id_slot=0)
        assert continues(server, 1, expected)
        sleep(server)
        assert continues(server, 0, expected)


def test_draft_continues_with_conversation(real: Real, model: Path, tmp_path: Path) -> None:
    draft = ("--spec-type", "draft-simple", "-md", model, "--spec-draft-n-max", "4", "--kv-dynamic")
    with serving(real, model, tmp_path / "log", *TOY, *draft) as server:
        expected = computed(server)
        completion(server, FIRST, 1, id_slot=0)
        completion(server, SECOND, 1, id_slot=0)
        assert continues(server, 1, expected)
        sleep(server)
        answer = completion(server, f"{FIRST} river", 12, id_slot=0)
        assert answer["content"] == expected
        # the model is its own draft model, so all drafted tokens are accepted
        assert answer["timings"]["draft_n_accepted"] == answer["timings"]["draft_n"] > 0


def test_adapters_have_own_conversations(real: Real, model: Path, tmp_path: Path) -> None:
    lora = adapter(model, tmp_path / "lora.gguf", "blk")
    with serving(real, model, tmp_path / "log", *TOY, "--kv-dynamic", "--lora", lora) as server:
        scales = [[{"id": 0, "scale": scale}] for scale in (0.0, 1.0)]
        expected = [computed(server, lora=scale) for scale in scales]
        assert expected[0] != expected[1]
        for scale in scales:
            completion(server, FIRST, 1, id_slot=0, lora=scale)
            completion(server, SECOND, 1, id_slot=0, lora=scale)
        for _ in range(2):
            assert all(continues(server, 1, text, lora=scale) for text, scale in zip(expected, scales, strict=True))
            sleep(server)


def test_conversation_is_not_copied_for_an_unrelated_prefix(real: Real, smollm2: Path, tmp_path: Path) -> None:
    with serving(
        real, smollm2, tmp_path / "log", "-c", "8192", "-np", "1", "--cache-ram", "512", "--fit", "off"
    ) as server:
        cached(server, "a" + text("A", 300))
        cached(server, text("B", 20))
        assert cached(server, "a" + text("C", 20)) <= 1


def test_chats_in_turns_compute_only_new_tokens(real: Real, smollm2: Path, tmp_path: Path) -> None:
    """Let twelve chats take turns in four slots. The cells have room for three chats."""
    args = ("-c", "1792", "-np", "4", "-kvu", "--kv-dynamic", "--cache-ram", "512", "--fit", "off")
    with serving(real, smollm2, tmp_path / "log", *args) as server:
        chats: list[list[int]] = [[] for _ in range(12)]
        computed = new = 0
        for turn in range(4):
            for i, chat in enumerate(chats):
                before = max(0, len(chat) - 1)  # the last token of an answer is never in the cells
                chat += server.post("/tokenize", {"content": text(f"chat {i} turn {turn}", 10)})["tokens"]
                body = {"prompt": chat, "n_predict": 8, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
                answer = server.post("/completion", body)
                computed += answer["timings"]["prompt_n"]
                new += len(chat) - before
                chat += answer["tokens"]
        assert 3 * max(map(len, chats)) <= 1792 < 4 * min(map(len, chats))
        assert computed <= 1.02 * new


def host_bytes(server: LlamaServer) -> int:
    """Return the number of bytes that --cache-ram limits."""
    said = server.http.get("/props").json()["conversations"]
    return int(said["entry_bytes"] + said["checkpoint_bytes"] + said["paused_bytes"])


def test_cache_ram_limits_all_conversations(real: Real, smollm2: Path, tmp_path: Path) -> None:
    args = ("-c", "4096", "-np", "2", "--kv-dynamic", "--cache-ram", "20", "--fit", "off")
    with serving(real, smollm2, tmp_path / "log", *args) as server:
        for i in range(8):
            cached(server, text(f"chat {i}", 30))
            server.http.get("/metrics")
            assert host_bytes(server) <= 20 * 2**20
        said = server.http.get("/props").json()["conversations"]
        assert said["limit_bytes"] == 20 * 2**20 and said["entries"] >= 2
        assert cached(server, text("chat 6", 30)) == n_tokens(server, text("chat 6", 30)) - 1
        assert cached(server, text("chat 0", 30)) < 8  # the oldest chat was dropped


def test_checkpoints_count_in_the_limit(real: Real, tmp_path: Path) -> None:
    """Talk to a model with a sliding window. The checkpoints alone would exceed the limit of --cache-ram."""
    model = real.text_model("gemma2-dense")
    args = ("-c", "8192", "-np", "2", "--kv-dynamic", "--cache-ram", "1", "-ub", "16", "-cms", "16", "--no-warmup")
    with serving(real, model, tmp_path / "log", *args) as server:
        most = 0
        for turn in range(14):
            for name in "AB":
                cached(server, "".join(text(f"{name}{i}", 6) for i in range(turn + 1)))
                most = max(most, host_bytes(server))
        said = server.http.get("/props").json()["conversations"]
        assert said["checkpoint_bytes"] > 0 and most <= 2**20


def test_reports_count_hits_and_saved_tokens(real: Real, smollm2: Path, tmp_path: Path) -> None:
    args = ("-c", "4096", "-np", "2", "--kv-dynamic", "--cache-ram", "512", "--fit", "off", "--metrics", "--slots")
    with serving(real, smollm2, tmp_path / "log", *args) as server:
        a = text("A", 50)
        cached(server, a, id_slot=0)
        cached(server, text("B", 50), id_slot=0)
        saved = cached(server, a, id_slot=1)
        metrics = server.http.get("/metrics").text
        said = server.http.get("/props").json()["conversations"]
        assert (said["hits_total"], said["misses_total"], said["saved_tokens_total"]) == (1, 2, saved)
        assert "llamacpp:conversation_hits_total 1\n" in metrics
        assert all("checkpoint_bytes" in slot["conversations"] for slot in server.http.get("/slots").json())
