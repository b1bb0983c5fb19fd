"""Test a draft model and a target whose caches grow by copy. If the draft model gets no memory, no request may end.

A growth to 1280 cells needs six allocations. The first three are for the target: two layers and the compute buffers.
The next three are for the draft model. The prompt is longer than 768 cells, so that a smaller growth is not enough. The
target processes each batch first. A test model with an MTP layer has one layer with attention, so the draft's
allocations begin with the third.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.verify import drafts
from kvtool.verify.projector import projector
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.projector import looking, merging_projector
from tests.e2e.servers import completion, part, serving

ARGS = ("-c", "2048", "-np", "1", "--cache-ram", "0", "-lv", "4", "--spec-draft-n-max", "4")
WORDS = 850  # words in the prompt


def kind_of(real: Real, kind: str) -> tuple[Path, tuple[str | Path, ...]]:
    """Return a model, and the arguments that select its draft model."""
    if kind == "draft-mtp":
        return drafts.mtp_model(real.text_model(drafts.MTP_TOY), real.work), ()
    model = real.text_model("llama-dense")
    return model, ("-md", model)  # the model is its own draft model, so all drafted tokens are accepted


def answers(real: Real, log: Path, kind: str, *more: str, words: int = WORDS) -> tuple[list[dict[str, Any]], str]:
    model, draft = kind_of(real, kind)
    with serving(real, model, log, *ARGS, "--spec-type", kind, *draft, *more) as server:
        text = prompt(1, words)
        answered = [completion(server, text, 100), completion(server, text + " and the stone", 50)]
    return answered, server.log


def accepted(answer: dict[str, Any]) -> float:
    return float(answer["timings"]["draft_n_accepted"] / answer["timings"]["draft_n"])


@pytest.fixture(scope="module")
def expected(real: Real, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    seen, _ = answers(real, tmp_path_factory.mktemp("static") / "log", "draft-simple")
    assert min(map(accepted, seen)) > 0.95
    return [a["content"] for a in seen]


def fail(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_FAIL", which)


@pytest.mark.parametrize("which", ["4", "5"])
def test_draft_without_memory_catches_up(
    real: Real, expected: list[str], which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, which)
    seen, log = answers(real, tmp_path / "log", "draft-simple", "--kv-dynamic")
    assert "no memory for the draft" in log
    assert "draft: caught up" in log
    assert [a["content"] for a in seen] == expected
    assert min(map(accepted, seen)) > 0.95


def test_draft_never_gets_memory(
    real: Real, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "4+")
    seen, log = answers(real, tmp_path / "log", "draft-simple", "--kv-dynamic")
    assert "draft: still no memory" in log
    assert [a["content"] for a in seen] == expected
    assert not any("draft_n" in a["timings"] for a in seen)


def test_draft_lacks_tokens_of_cached_prompt(
    real: Real, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restore the prompt in another slot, in which the draft model cannot notice that tokens are missing."""
    args = ("-c", "4096", "-np", "2", "--no-kv-unified", "--cache-ram", "64", "-lv", "4", "--spec-draft-n-max", "4")
    drafting = ("--spec-type", "draft-simple", "-md", model)
    long = prompt(1, WORDS)
    others = [(prompt(2, 30), 4, 1), (prompt(3, 30), 4, 0)]
    asked = [(long[: len(long) // 4], 4, 0), (long, 4, 0), *others, (long + " and the stone", 20, 1)]

    def texts(log: Path, *more: str) -> tuple[list[str], str]:
        with serving(real, model, log, *args, *drafting, *more) as server:
            told = [completion(server, text, n, id_slot=slot)["content"] for text, n, slot in asked]
        return told, server.log

    whole, _ = texts(tmp_path / "static")
    fail(monkeypatch, "4+")
    told, log = texts(tmp_path / "log", "--kv-dynamic")
    assert "continues a conversation" in log
    # this message would mean a gap between the tokens of the draft model and the next token
    assert "failed to initialize batch" not in log
    assert told == whole


@pytest.mark.parametrize("kind", [(), ("--kv-dynamic",)], ids=["static", "dynamic"])
def test_restored_slot_clears_draft(real: Real, model: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    """Restore a slot file after the draft model has processed another prompt.

    The draft's cells of the other prompt must be removed.
    """
    args = ("-c", "4096", "-np", "1", "--cache-ram", "0", "--slot-save-path", str(tmp_path), *kind)
    drafting = ("--spec-type", "draft-simple", "-md", str(model), "--spec-draft-n-max", "4")
    long = prompt(1, WORDS)
    with serving(real, model, tmp_path / "log", *args, *drafting) as server:
        completion(server, long, 4)
        expected = completion(server, f"{long} and the stone", 20)["content"]
        completion(server, long, 4, cache_prompt=False)
        assert server.http.post("/slots/0?action=save", json={"filename": "slot"}).status_code == 200
        completion(server, prompt(2, 10), 4)
        assert server.http.post("/slots/0?action=restore", json={"filename": "slot"}).status_code == 200
        answer = completion(server, f"{long} and the stone", 20)
        assert answer["content"] == expected and answer["timings"]["draft_n_accepted"] > 0


@pytest.mark.parametrize(("which", "words"), [("3", WORDS + 516), ("4+", WORDS)])
def test_mtp_layer_without_memory(
    real: Real, which: str, words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a prompt whose last 516 tokens are computed in separate batches, because of checkpoints.

    The MTP layer finds no memory for the first of these batches.
    """
    whole, _ = answers(real, tmp_path / "static", "draft-mtp", words=words)
    fail(monkeypatch, which)
    seen, log = answers(real, tmp_path / "log", "draft-mtp", "--kv-dynamic", words=words)
    assert "no memory for the draft" in log
    assert [a["content"] for a in seen] == [a["content"] for a in whole]


@pytest.mark.usefixtures("marker")
@pytest.mark.parametrize(("kind", "which"), [("draft-simple", "4+"), ("draft-mtp", "3+")])
def test_image_without_memory_for_draft(
    real: Real, kind: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use an image of 16 cells.

    With it, more than 256 cells are used, so the cache grows by copy for the first time.
    """
    model, draft = kind_of(real, kind)
    args = (*ARGS, "--spec-type", kind, *draft, "--mmproj", projector(model, real.work))

    prompts: list[Any] = [looking(1, before=prompt(1, 240), after=f" what? {more}") for more in ("", "the stone")]
    prompts = [*prompts, prompt(3, 40)] if kind == "draft-simple" else prompts[:1]  # then the target has to grow again
    body = {"n_predict": 20, "temperature": 0.0, "ignore_eos": True}

    def answered(log: Path, *more: str) -> tuple[list[str], str]:
        with serving(real, model, log, *args, *more) as server:
            told = [server.post("/completion", {**body, "prompt": p})["content"] for p in prompts]
        return told, server.log

    whole, _ = answered(tmp_path / "static")
    fail(monkeypatch, which)
    told, log = answered(tmp_path / "log", "--kv-dynamic")
    assert "post-decode callback failed" not in log and "no memory for the draft" in log
    assert told == whole


@pytest.mark.usefixtures("marker")
@pytest.mark.parametrize("which", ["1+", "3+"])
def test_accepted_tokens_after_draft_lost_memory(
    real: Real, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a target that cannot remove accepted tokens. It decodes them again without the draft model."""
    model, dense = real.text_model("lfm2-dense"), real.text_model("llama-dense")
    fail(monkeypatch, which)
    draft = ("-md", dense, "--spec-type", "draft-simple", "--spec-draft-n-max", "4", "--spec-draft-p-min", "0")
    args = ("-c", "2048", "-np", "1", "--cache-ram", "0", "--kv-dynamic", "--mmproj", projector(model, real.work))
    with serving(real, model, tmp_path / "log", *args, *draft, "--spec-draft-sampling", "probabilistic") as server:
        body = {"prompt": looking(1, before=prompt(1, 200)), "n_predict": 252, "temperature": 1.0, "seed": 1}
        assert server.post("/completion", body | {"ignore_eos": True})["tokens_predicted"] == 252
    assert "no memory for the draft" in server.log


def test_missing_lookup_cache(real: Real, model: Path, tmp_path: Path) -> None:
    """Delete the file of the n-gram drafter. When the draft model is unloaded, all drafters are made again.

    The n-gram drafter then finds no file. The server must continue without the file.
    """
    cache = tmp_path / "cache"
    cache.touch()
    draft = ("-md", model, "--spec-type", "draft-simple,ngram-cache", "--lookup-cache-static", cache)
    with serving(real, model, tmp_path / "log", *ARGS, *draft) as server:
        cache.unlink()
        part(server, "speculative", "unload")
        assert completion(server, "hello", 4)["tokens_predicted"] == 4
        part(server, "speculative", "load")
        assert completion(server, "hello", 4)["tokens_predicted"] == 4
    assert "a lookup cache cannot be read any more" in server.log


@pytest.mark.usefixtures("marker")
def test_draft_after_image_with_gaps(real: Real, tmp_path: Path) -> None:
    """Use M-RoPE, with which an image has fewer positions than cells.

    The server must not conclude from this difference that the draft model lacks tokens.
    """
    model = real.text_model("qwen3vl-dense")
    mmproj = merging_projector(tmp_path / "projector.gguf", model)
    draft = ("-md", model, "--spec-type", "draft-simple")
    with serving(real, model, tmp_path / "log", *ARGS, *draft, "--mmproj", mmproj) as server:
        body = {"prompt": looking(1, before=prompt(1, 20)), "n_predict": 40, "temperature": 0.0, "ignore_eos": True}
        answer = server.post("/completion", body)
    assert accepted(answer) > 0.95
