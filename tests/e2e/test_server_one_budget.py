"""Limit cells and conversations by one number: --kv-budget MIB --cache-ram budget."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify import devices
from kvtool.verify.server import LlamaServer, free_port
from kvtool.verify.texts import prompt
from tests.e2e.budgets import LADDER, MIB, props
from tests.e2e.conftest import Real
from tests.e2e.servers import anonymous, at_once, completion, memory_is_plain, serving, until

BUDGET = ("--cache-ram", "budget", "--fit", "off", "--no-warmup")
UNIFIED = ("--kv-unified",)
CELL = 64 * 1024  # bytes of a cell of large_cell_model
STREAMS = ("--no-kv-unified",)


def computed(server: LlamaServer, text: str) -> int:
    """Return the number of tokens of the prompt that the server computed."""
    return int(completion(server, text, 1)["timings"]["prompt_n"])


def in_use(server: LlamaServer) -> dict[str, Any]:
    """Return the numbers of the budget, after a check that they agree and that the sum is within the limit."""
    said = props(server)
    budget, stored = said["kv_budget"], said["conversations"]
    conversations = stored["entry_bytes"] + stored["checkpoint_bytes"] + stored["paused_bytes"]
    assert budget["conversation_bytes"] == conversations
    assert conversations <= budget["committed_bytes"] <= budget["bytes"]
    assert stored["limit_bytes"] <= budget["bytes"]
    return {**budget, "entries": stored["entries"]}


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("kind", [STREAMS, UNIFIED], ids=["streams", "unified"])
def test_conversations_fill_budget_and_yield_to_cells(
    real: Real,
    large_cell_model: Path,
    tmp_path: Path,
    storage: str,
    kind: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    args = (*BUDGET, *kind, "-c", "4096", "-np", "2", "--kv-budget", "192", *LADDER)
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        chats = [prompt(i, 120) for i in range(24)]  # about 10 MiB each
        for chat in chats:
            computed(server, chat)
            in_use(server)
        before = in_use(server)
        assert before["committed_bytes"] > 0.8 * before["bytes"]
        for chat in chats[-3:]:
            assert computed(server, chat) == 1
        assert computed(server, chats[0]) > 100  # the least recently used one was dropped
        long = prompt(100, 500)
        computed(server, long)
        after = in_use(server)
        assert after["entries"] < before["entries"]
        assert computed(server, chats[-1]) == 1
        assert computed(server, long) == 1
        assert after["down_total"] == 0  # conversations yield before the precision of the cells


@pytest.mark.parametrize("toy", ["llama-dense", "gemma2-dense", "qwen35-dense"])  # plain, window, hybrid
@pytest.mark.parametrize("kind", [STREAMS, UNIFIED], ids=["streams", "unified"])
def test_texts_stay_equal_at_the_limit(real: Real, tmp_path: Path, toy: str, kind: tuple[str, ...]) -> None:
    model = real.text_model(toy)
    chats = [prompt(i, 150) for i in range(8)]
    args, most = (*BUDGET, *kind, "-c", "4096", "-np", "2", "-ub", "32", "--kv-budget", "2"), 0
    with serving(real, model, tmp_path / "plain", "-c", "4096", "-np", "1", "--cache-ram", "0") as server:
        expected = [completion(server, chat, 8)["content"] for chat in chats]
    with serving(real, model, tmp_path / "log", *args) as server:
        for _ in range(3):
            for chat, content in zip(chats, expected, strict=True):
                assert completion(server, chat, 8)["content"] == content
                most = max(most, in_use(server)["conversation_bytes"])
        assert most > 0


@memory_is_plain
def test_reported_bytes_match_memory_of_process(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    """Compare the reported bytes with the memory of the process, after each request.

    The memory of the model and of the compute buffers is subtracted.
    """
    args = (*BUDGET, "-c", "4096", "-np", "2", "--kv-budget", "96")

    def both(server: LlamaServer) -> tuple[int, int]:
        cells = sum(cache["committed_bytes"] for cache in props(server)["kv_cache"].values())
        return anonymous(server), cells + in_use(server)["conversation_bytes"]

    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        for slot in range(2):  # the first request of each slot touches the compute buffers
            completion(server, prompt(slot, 130), 1, id_slot=slot)
        taken, reported = both(server)
        others = taken - reported
        for i in range(16):
            computed(server, prompt(2 + i, 120))
            taken, reported = both(server)
            assert abs(taken - others - reported) < 0.05 * reported
        assert reported > 0.8 * 96 * MIB


def test_large_conversation_is_restored_within_budget(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    """Restore an entry that needs more than half of the budget.

    The entry and the cells that are restored from it do not fit into the budget together.
    """
    args = (*BUDGET, "-c", "4096", "-np", "1", "--kv-budget", "96")
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        large = prompt(1, 800)
        assert computed(server, large) * CELL > 48 * MIB
        for _ in range(2):
            computed(server, prompt(2, 50))
            assert in_use(server)["conversation_bytes"] > 48 * MIB
            assert computed(server, large) == 1
            in_use(server)


def test_sleeping_server_stays_within_budget(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    args = (*BUDGET, "-c", "4096", "-np", "2", "--kv-budget", "128", "--sleep-idle-seconds", "1")
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        chats = [prompt(i, 120) for i in range(20)]
        for chat in chats:
            computed(server, chat)
        until(lambda: props(server)["is_sleeping"])
        assert in_use(server)["conversation_bytes"] > 90 * MIB  # it has no cells
        for chat in chats[-2:]:
            assert computed(server, chat) == 1
            in_use(server)


def test_draft_grows_in_place_of_conversations(real: Real, model: Path, tmp_path: Path) -> None:
    draft = ("--spec-type", "draft-simple", "-md", model, "--spec-draft-n-max", "4")
    mib = (model.stat().st_size + MIB - 1) // MIB + 2  # the weights of the draft count
    args = (*BUDGET, *draft, "-c", "4096", "-np", "2", "--kv-budget", str(mib), "-lv", "4")
    with serving(real, model, tmp_path / "log", *args) as server:
        for i in range(24):
            answer = completion(server, prompt(i, 200), 12)
            assert answer["timings"]["draft_n_accepted"] == answer["timings"]["draft_n"] > 0
            in_use(server)
        assert in_use(server)["conversation_bytes"] > 0
    assert "no memory for the draft" not in server.log


def test_two_long_requests_finish_without_conversations(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    """Let two requests grow at once until no conversation is left."""
    args = (*BUDGET, *UNIFIED, "-c", "4096", "-np", "2", "--kv-budget", "96")
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        for i in range(12):
            computed(server, prompt(i, 120))
        before = in_use(server)["entries"]
        answers = at_once(server, [prompt(20, 300), prompt(21, 300)], 300)
        assert [answer["tokens_predicted"] for answer in answers] == [300, 300]
        assert in_use(server)["entries"] < before


def refused(real: Real, model: Path, *args: str) -> str:
    """Return the output of a server that refuses to start."""
    argv: list[str | Path] = [real.bin / "llama-server", "-m", model, "-t", "1", "--fit", "off", "-c", "512", *args]
    argv += ["--host", "127.0.0.1", "--port", str(free_port())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--cache-ram", "budget"), "--cache-ram budget needs --kv-budget"),
        (("--cache-ram", "budgets", "--kv-budget", "8"), "budget"),
    ],
)
def test_budget_without_number_is_refused(real: Real, model: Path, args: tuple[str, ...], said: str) -> None:
    assert said in refused(real, model, *args)


def test_last_limit_of_conversations_applies(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "512", "--kv-budget", "8", "--no-warmup")
    with serving(real, model, tmp_path / "log", *args, "--cache-ram", "budget", "--cache-ram", "2") as server:
        assert props(server)["conversations"]["limit_bytes"] == 2 * MIB


@pytest.mark.timeout(1800)  # including the build, if it is the first test
def test_cells_of_device_are_refused(real: Real, model: Path, tmp_path: Path) -> None:
    with devices.device("rpc", real.bin, tmp_path, 1) as device:
        args = ("--kv-budget", "8", "--cache-ram", "budget", *device.tools)
        assert "the cells are in the memory of a device" in refused(real, model, *args)
