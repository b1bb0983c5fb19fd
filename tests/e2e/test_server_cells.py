"""Test a server whose cache has too few cells for all requests, although there is enough memory.

Also test that the cells of a slot are freed when its prompt or its state is replaced.
"""

from __future__ import annotations

import json
import math
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtool.errors import VerifyError
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.adapter import adapter
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving, until_logged, weights

NO_CACHE = ("--cache-ram", "0", "--no-warmup")


def cells_used(server: LlamaServer) -> int:
    return int(json.loads(server.get("/props"))["kv_cache"]["target"]["cells_used"])


def test_batch_without_cells_keeps_prompt_cache(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "1024", "-np", "3", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "64", "--kv-dynamic")
    texts = [prompt(n, words) for n, words in ((1, 250), (2, 120), (3, 260), (4, 700))]
    with serving(real, model, tmp_path / "log", *args, "--no-warmup") as server:
        for text, slot in zip(texts, (0, 0, 1, 2), strict=True):
            completion(server, text, 4, id_slot=slot)
        until_logged(server, "purging slot")
        # the first prompt was saved; the second was removed to make room for the last one
        for text in (texts[0], texts[2]):
            assert completion(server, f"{text} more", 1)["timings"]["cache_n"] > 100
        assert "dropping the prompt cache" not in server.log


def embeddings(server: LlamaServer, texts: list[str]) -> list[list[float]]:
    rows: list[dict[str, Any]] = server.http.post("/embedding", json={"content": texts}).raise_for_status().json()
    return [row["embedding"][0] for row in sorted(rows, key=lambda row: row["index"])]


def test_pooled_prompt_is_not_split(real: Real, model: Path, tmp_path: Path) -> None:
    """Send two prompts together while earlier prompts use most cells.

    Each embedding must be computed over its whole prompt.
    """
    pooled = ("--embeddings", "--pooling", "mean", "-b", "2048", "-ub", "2048")
    args = ("-c", "1200", "-np", "2", "--kv-unified", *pooled, *NO_CACHE, "--slot-save-path", tmp_path)
    texts = [prompt(n, 480) for n in (1, 2)]
    with serving(real, model, tmp_path / "log", *args) as server:
        expected = []
        for text in texts:
            for slot in (0, 1):
                server.slot("erase", slot)
            expected += embeddings(server, [text])
        for slot in (0, 1):
            server.slot("erase", slot)
        embeddings(server, [prompt(n, 240) for n in (3, 4)])
        for one, other in zip(embeddings(server, texts), expected, strict=True):
            assert math.dist(one, other) < 1e-3


def test_adapter_change_frees_all_cells(real: Real, model: Path, tmp_path: Path) -> None:
    lora = adapter(model, tmp_path / "lora.gguf", "blk.0.attn_q.")
    args = ("-c", "1024", "-np", "2", "--kv-unified", "--kv-dynamic", "--lora", lora, *NO_CACHE)
    with serving(real, model, tmp_path / "log", *args) as server:
        completion(server, prompt(1, 100), 4, id_slot=1, lora=[{"id": 0, "scale": 1.0}])
        assert cells_used(server) > 100
        wrong = {"prompt": prompt(1, 100), "id_slot": 1, "lora": [{"id": 0, "scale": 0.0}], "grammar": "root ::= bad x"}
        assert server.http.post("/completion", json=wrong).status_code == 400
        completion(server, "a", 1, id_slot=0)  # the server reports the numbers of the last batch
        assert cells_used(server) < 50


def test_empty_state_frees_all_cells(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "512", "-np", "2", "--kv-unified", "--kv-dynamic", "--slot-save-path", tmp_path, *NO_CACHE)
    with serving(real, model, tmp_path / "log", *args) as server:
        server.slot("save", 1, "empty")
        completion(server, prompt(1, 150), 4, id_slot=0)
        server.slot("restore", 0, "empty")
        assert cells_used(server) == 0
        assert completion(server, prompt(2, 150), 4, id_slot=1)["tokens_predicted"] == 4


def test_slot_file_with_excess_tokens(real: Real, model: Path, tmp_path: Path) -> None:
    """Refuse a slot file that lists more tokens than it has cells.

    Before, a prompt that continued these tokens ended all requests of its batch.
    """
    args = ("-c", "1024", "-np", "2", "--kv-unified", "--kv-dynamic", "--slot-save-path", tmp_path, *NO_CACHE)
    with serving(real, model, tmp_path / "log", *args) as server:
        completion(server, prompt(1, 100), 4, id_slot=0)
        n_cells = server.slot("save", 0, "slot")["n_saved"]
        saved = (tmp_path / "slot").read_bytes()
        state = saved[12 + 4 * int.from_bytes(saved[8:12], "little") :]
        for n_tokens, status in ((n_cells, 200), (n_cells + 1, 400)):
            tokens = (n_tokens, *[5] * n_tokens)
            (tmp_path / "other").write_bytes(saved[:8] + struct.pack(f"<{len(tokens)}I", *tokens) + state)
            answer = server.http.post("/slots/0", params={"action": "restore"}, json={"filename": "other"})
            assert answer.status_code == status, answer.text


def test_restore_restarts_idle_timer(real: Real, model: Path, tmp_path: Path) -> None:
    idle = ("--kv-idle-release", "6", "--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "log", "-c", "1024", "-np", "1", *idle, *NO_CACHE) as server:
        completion(server, prompt(1, 100), 4)
        server.slot("save", 0, "one")
        time.sleep(5)
        server.slot("restore", 0, "one")
        time.sleep(2.5)
        assert cells_used(server) > 100


@pytest.mark.parametrize("flag", [(), ("--kv-dynamic",)], ids=["static", "dynamic"])
@pytest.mark.parametrize("toy", ["lfm2-dense", "deepseek4-moe"])
def test_requests_with_cells_run_in_parallel(real: Real, tmp_path: Path, toy: str, flag: tuple[str, ...]) -> None:
    """Send two requests for which the pool has enough cells. None of them may wait for cells.

    One model has a sliding window in all layers. In the other model, a row belongs to several tokens.
    """
    args = ("-c", "2048", "-np", "2", "--kv-unified", *flag, *NO_CACHE)
    with serving(real, real.text_model(toy), tmp_path / "log", *args) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(completion, server, prompt(slot, 200), 24, id_slot=slot) for slot in (0, 1)]
        assert [request.result()["tokens_predicted"] for request in asked] == [24, 24]
        assert "waits for cells" not in server.log
        # the numbers count tokens, not rows
        if flag:
            cache = json.loads(server.get("/props"))["kv_cache"]["target"]
            assert 400 < cache["cells_used"] <= cache["cells"] <= cache["cells_max"] and cache["cells_max"] >= 2048


def test_first_draft_cells_count_in_budget(real: Real, model: Path, tmp_path: Path) -> None:
    mib = weights(model) + 2  # four streams of each context start with 2 MiB
    draft = ("-md", model, "--spec-type", "draft-simple", "--draft-lazy")
    args = ("-c", "4096", "-np", "4", "--no-kv-unified", "--kv-budget", str(mib), *draft, *NO_CACHE)
    with serving(real, model, tmp_path / "log", *args) as server:
        answer = server.http.post("/speculative", json={"action": "load"})
        assert answer.status_code == 503 and "the cells that the draft model begins with" in answer.text
        budget = json.loads(server.get("/props"))["kv_budget"]
        assert budget["committed_bytes"] <= budget["bytes"]
        assert completion(server, prompt(1, 50), 4)["tokens_predicted"] == 4


def test_start_above_budget_is_refused(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "8192", "-np", "4", "--no-kv-unified", "--kv-budget", "1", *NO_CACHE)
    with (
        pytest.raises(VerifyError, match="did not start"),
        serving(real, model, tmp_path / "log", *args),
    ):
        pass
    assert "--kv-budget is 1.00 MiB, and the KV cache begins with 2.00 MiB" in (tmp_path / "log").read_text()


def test_restored_sequence_uses_own_rows(real: Real, tmp_path: Path) -> None:
    """Expect that DeepSeek V4 restores only the rows of its sequence.

    It must not restore as many rows as the longest stream has.
    """
    args = ("-c", "8192", "-np", "4", "--kv-dynamic", "--slot-save-path", tmp_path, *NO_CACHE)
    with serving(real, real.text_model("deepseek4-moe"), tmp_path / "log", *args) as server:

        def cache() -> dict[str, int]:
            found: dict[str, int] = json.loads(server.get("/props"))["kv_cache"]["target"]
            return found

        completion(server, prompt(1, 300), 4, id_slot=1)
        before = cache()
        server.slot("save", 1, "one")
        server.slot("erase", 1)
        server.slot("restore", 1, "one")
        after = cache()
        assert after["committed_bytes"] <= before["committed_bytes"]
        assert after["used_bytes"] <= before["used_bytes"]
