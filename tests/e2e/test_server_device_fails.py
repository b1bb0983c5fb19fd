"""Let a device fail during a change of types, so that all cells are lost. No text may continue from lost cells."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e import broken
from tests.e2e.budgets import LADDER, within
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, events, refusal, serving, until, until_it_generates, until_logged, weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the broken library is linked by Linux's rules")

TEXT = prompt(1, 300)
FAILS = broken.Edit(
    "src/llama-kv-convert.cpp",
    "is_failed = !compute(part(from), part(to), n_rot, matrix);",
    "is_failed = true;",
)


@pytest.fixture(scope="module")
def library(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fails")
    broken.build(real, [(FAILS,)], out)
    return out


@pytest.fixture(autouse=True)
def device_fails(real: Real, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device fail in each change to another type."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}:{real.bin}")
    monkeypatch.setenv(broken.VARIABLE, "1")


@pytest.mark.parametrize("kind", [("--kv-dynamic",), ("--kv-dynamic", "--no-kv-unified"), ()])
@pytest.mark.parametrize("toy", ["llama-dense", "gemma3-dense", "qwen35-dense"])
def test_texts_after_failed_requantize(real: Real, tmp_path: Path, toy: str, kind: tuple[str, ...]) -> None:
    args = ("-c", "8192", "-np", "3", "--cache-ram", "0", "--no-warmup", "--slots", *kind)
    body = {"prompt": prompt(2, 50), "n_predict": 3000, "temperature": 0.0, "ignore_eos": True, "id_slot": 0}
    smaller = ("-ctk", "q8_0", "-ctv", "q8_0")  # the types that the cells have after the change
    with serving(real, real.text_model(toy), tmp_path / "log", *args, *smaller) as server:
        expected = completion(server, f"{TEXT} the", 40, id_slot=1)["content"]
    with serving(real, real.text_model(toy), tmp_path / "log", *args) as server, ThreadPoolExecutor(1) as pool:
        for slot in (1, 2):
            completion(server, TEXT, 0, id_slot=slot)
        text = pool.submit(events, server, "/completion", body)
        until_it_generates(server, text)
        said = refusal(server.http.post("/requantize_kvcache", json={"ctk": "q8_0", "ctv": "q8_0"}))
        assert said[:2] == (500, "server_error") and "the device failed, and all cells are empty" in said[2]
        assert text.result()[-1]["error"]["code"] == 500
        for slot in (1, 2, 0):
            answer = completion(server, f"{TEXT} the", 40, id_slot=slot)
            assert (answer["content"], answer["timings"]["cache_n"]) == (expected, 0)
        assert completion(server, f"{TEXT} the", 40, id_slot=1)["timings"]["cache_n"] > 200
    assert "the cells of sequence 0 were lost" in server.log


def test_batch_after_failed_budget_change(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    with within(real, large_cell_model, tmp_path, 64, *LADDER, "--kv-unified") as watched:
        expected = watched.ask(0, 500)["content"]
        ask = {"prompt": prompt(0, 1300), "n_predict": 8, "id_slot": 0}
        answer = watched.server.http.post("/completion", json=ask)
        assert refusal(answer) == (500, "server_error", "Compute error.")
        assert watched.ask(0, 500)["content"] == expected
        assert watched.look()[0] == "f16"  # empty cells get the type f16 again
        assert watched.ask(1, 500)["tokens_predicted"] == 8


@pytest.mark.parametrize("toy", ["llama-dense", "gemma3-dense", "deepseek2-moe"])
@pytest.mark.parametrize("args", [(), ("--seqs", "2"), ("--storage", "copy")], ids=["one", "streams", "by-copy"])
def test_sequences_continue_without_cells(real: Real, toy: str, args: tuple[str, ...]) -> None:
    argv = [str(real.bin / "kv-check"), "-m", str(real.toys / f"{toy}.gguf"), "--quick", "--checks", "lost", *args]
    said = json.loads(subprocess.run(argv, capture_output=True, text=True).stdout)
    assert [(c["name"], c["status"]) for c in said["checks"]] == [("lost", "same")], said["reason"]


@pytest.mark.parametrize("kind", [("--kv-dynamic",), ()], ids=["dynamic", "static"])
def test_draft_recomputes_lost_prompt(real: Real, model: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    """Expect that the target's text does not change, and that the draft model processes its lost prompt again."""
    draft = ("-md", str(model), "--spec-type", "draft-simple", "--spec-draft-n-max", "4", *kind)
    with serving(real, model, tmp_path / "log", "-c", "4096", "-np", "2", "--no-warmup", *draft) as server:
        expected = [completion(server, f"{TEXT} the", 40, id_slot=slot)["content"] for slot in (0, 1)]
        for slot in (0, 1):
            completion(server, TEXT, 0, id_slot=slot)
        assert refusal(server.http.post("/requantize_kvcache", json={"ctkd": "q8_0", "ctvd": "q8_0"}))[0] == 500
        for slot in (0, 1):
            answer = completion(server, f"{TEXT} the", 40, id_slot=slot)
            assert answer["content"] == expected[slot]
            assert answer["timings"]["cache_n"] > 200 and answer["timings"]["draft_n_accepted"] > 0


def test_draft_recomputes_saved_prompt(real: Real, model: Path, large_cell_model: Path, tmp_path: Path) -> None:
    """Let a long prompt in another slot start a change of types, which fails. The draft model then loses all cells.

    The prompt was saved without the cells of the draft model, so the draft model must process it again.
    """
    draft = (
        "-md",
        large_cell_model,
        "--spec-type",
        "draft-simple",
        "--spec-draft-n-max",
        "4",
        "--no-kv-unified",
        *LADDER,
    )
    args = (
        "-c",
        "4096",
        "-np",
        "2",
        "--no-cache-idle-slots",
        "--no-warmup",
        "--kv-budget",
        str(weights(large_cell_model) + 64),
        *draft,
    )
    with serving(real, model, tmp_path / "log", *args) as server:
        completion(server, TEXT, 0, id_slot=1)
        completion(server, prompt(2, 900), 8, id_slot=0)
        until_logged(server, "the device failed, all cells are lost")
        completion(server, prompt(3, 100), 0, id_slot=1)
        before = server.log.count("caught up")
        answer = completion(server, f"{TEXT} the", 40, id_slot=1)
        assert answer["timings"]["cache_n"] > 200 and "draft_n" in answer["timings"]
        until(lambda: server.log.count("caught up") > before)


def lose_cells(server: LlamaServer) -> None:
    """Let a change to q8_0 fail, so that all cells are lost. Then change the types to f16 again.

    A saved prompt of f16 cells can then be restored without a conversion on the device.
    """
    for name, status in (("q8_0", 500), ("f16", 200)):
        assert server.http.post("/requantize_kvcache", json={"ctk": name, "ctv": name}).status_code == status


def test_prompt_without_cells_is_not_saved(real: Real, model: Path, tmp_path: Path) -> None:
    """Expect that a prompt whose cells are lost does not replace a saved prompt."""
    args = ("-c", "8192", "-np", "2", "--no-kv-unified", "--kv-dynamic", "--no-warmup")
    with serving(real, model, tmp_path / "log", *args) as server:
        completion(server, TEXT, 0, id_slot=0)
        completion(server, prompt(2, 300), 0, id_slot=1)  # each request saves the prompts of idle slots
        expected = completion(server, f"{TEXT} the", 40, id_slot=0)["content"]
        lose_cells(server)
        completion(server, prompt(3, 300), 0, id_slot=1)
        answer = completion(server, f"{TEXT} the", 40)
        assert (answer["content"], answer["timings"]["cache_n"] > 200) == (expected, True)


def test_file_of_prompt_without_cells(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "4096", "-np", "1", "--kv-dynamic", "--no-warmup", "--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "log", *args) as server:
        completion(server, TEXT, 8, id_slot=0)
        lose_cells(server)
        assert server.slot("save", 0, "lost.bin")["n_saved"] == 0
        assert server.slot("restore", 0, "lost.bin")["n_restored"] == 0
        assert completion(server, TEXT, 8, id_slot=0)["timings"]["cache_n"] == 0
