"""Test the draft model of a running server: unload it, load it, and exchange it for the projector.

The text must stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.verify import models
from kvtool.verify.projector import projector
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, memory_is_plain, part, refusal, resident, serving, short_of_addresses
from tests.e2e.speculative import CLEAR, DRAFT, ONE, Lazy, accepted, act, check_drafts, drafting, state, unloading

MIB = 1024 * 1024


def test_running_text_is_equal(real: Real, model: Path, tmp_path: Path) -> None:
    text = CLEAR
    with serving(real, model, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 1000)["content"]
    with drafting(real, model, tmp_path / "log", *ONE) as server:
        answer = unloading(server, text, 1000)
    assert answer["content"] == expected
    check_drafts(answer, loaded=True)


NGRAM = ("--spec-ngram-simple-size-n", "1", "--spec-ngram-simple-size-m", "6")


@pytest.mark.parametrize("kinds", ["draft-simple", "draft-simple,ngram-simple"])
def test_redecoded_tokens_are_equal(real: Real, kinds: str, tmp_path: Path) -> None:
    """Use a target that cannot remove tokens. It decodes accepted tokens again, even after drafts of another kind."""
    model = real.text_model("qwen35-dense")
    other = models.text_model(
        real.toys / "qwen35-dense.gguf", real.tree / "models" / models.VOCABULARY, tmp_path, seed=2
    )
    text, few = prompt(1, 100), {"grammar": "root ::= [a-d]*"}  # with this grammar, n-grams are repeated
    with serving(real, model, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 400, **few)["content"]
    args = ("-md", other, "--spec-type", kinds, "--spec-draft-n-max", "4", *NGRAM, *ONE)
    with serving(real, model, tmp_path / "log", *args) as server:
        answer = unloading(server, text, 400, **few)
    assert answer["content"] == expected
    share = accepted(answer)
    assert share is not None
    assert share < 0.5


def test_loaded_draft_catches_up(real: Real, model: Path, tmp_path: Path) -> None:
    text = prompt(1, 300)
    with drafting(real, model, tmp_path / "log", *ONE, "--draft-lazy") as server:
        assert state(server) == "unloaded"
        first = completion(server, text, 50)
        assert accepted(first) is None
        act(server, "load")
        second = completion(server, text + first["content"], 50)
        assert second["timings"]["cache_n"] > 200
        check_drafts(second, loaded=True)
        act(server, "unload")
        assert accepted(completion(server, text, 50)) is None


@pytest.mark.parametrize("toy", ["llama-dense", "gemma2-dense", "qwen35-dense"])
def test_cached_prompts_with_and_without_draft(real: Real, toy: str, tmp_path: Path) -> None:
    """Save prompts with a draft model and restore them without it, and vice versa.

    Use checkpoints if the model needs them.
    """
    model = real.text_model(toy)
    texts = [prompt(seed, 200) for seed in (1, 2, 3)]
    args = ("-c", "2048", "-np", "1", "--cache-ram", "100", "--slot-prompt-similarity", "0.5")

    def talk(server: LlamaServer, *, actions: bool) -> list[str]:
        out = []
        for number in range(12):
            if actions and number % 2:
                act(server, "load" if state(server) == "unloaded" else "unload")
            text = texts[number % 3]
            for more, n in ((" and" * (number // 3), 24), (" the", 12)):
                answer = completion(server, text + more, n)
                out.append(answer["content"])
                if actions:
                    check_drafts(answer, loaded=state(server) == "loaded")
        return out

    with serving(real, model, tmp_path / "log", *args) as server:
        expected = talk(server, actions=False)
    with drafting(real, model, tmp_path / "log", *args) as server:
        assert talk(server, actions=True) == expected


@pytest.mark.parametrize("toy", ["gemma2-dense", "qwen35-dense"])
def test_checkpoint_without_draft(real: Real, toy: str, tmp_path: Path) -> None:
    """Restore a checkpoint after the draft model has processed more tokens than the checkpoint has.

    The draft model cannot remove the additional tokens.
    """
    model = real.text_model(toy)
    text = prompt(1, 300)
    with drafting(real, model, tmp_path / "log", *ONE, "--draft-lazy") as server:
        first = completion(server, text, 24)["content"]
        expected = completion(server, text + " the", 24)["content"]
        completion(server, text, 24)
        act(server, "load")
        completion(server, text + first + " and", 24)
        answer = completion(server, text + " the", 24)
    assert answer["timings"]["cache_n"] > 0
    assert answer["content"] == expected
    check_drafts(answer, loaded=True)


@memory_is_plain
def test_unload_releases_memory(real: Real, model: Path, tmp_path: Path) -> None:
    with drafting(real, model, tmp_path / "log", *ONE, "--draft-lazy", "--kv-dynamic") as server:

        def use() -> int:
            taken: int = act(server, "load")["taken"]["resident_bytes"]
            assert accepted(completion(server, prompt(1, 300), 50, cache_prompt=False)) is not None
            return taken

        use()  # the first use allocates memory that stays: threads, code, buffers of the client
        act(server, "unload")
        before = resident(server)
        for _ in range(5):
            taken = use()
            freed = act(server, "unload")["freed"]["resident_bytes"]
            assert min(taken, freed) > MIB
            assert resident(server) < before + MIB


@pytest.fixture
def lazy(real: Real, model: Path, tmp_path: Path) -> Iterator[Lazy]:
    file = tmp_path / "draft.gguf"
    file.write_bytes(model.read_bytes())
    with serving(real, model, tmp_path / "log", *ONE, "-md", file, *DRAFT, "--draft-lazy") as server:
        yield Lazy(server, file)


def test_wrong_draft_file_is_refused(real: Real, lazy: Lazy) -> None:
    lazy.file.unlink()
    assert "No such file" in lazy.fails()
    for cut in (0, 1000):
        lazy.file.write_bytes(lazy.whole[:cut])
        assert "not a GGUF file, or truncated" in lazy.fails()
    lazy.file.write_bytes(lazy.whole[:-1000])
    assert "truncated, " in lazy.fails()
    lazy.file.write_bytes((real.toys / "llama-dense.gguf").read_bytes())  # this model has another vocabulary
    assert "vocab type must match" in lazy.fails()
    lazy.file.write_bytes(lazy.whole.replace(b"llama", b"lloma"))
    assert "see its log" in lazy.fails()
    lazy.file.write_bytes(lazy.whole)
    act(lazy.server, "load")
    assert accepted(completion(lazy.server, prompt(1, 50), 20)) == 1


@memory_is_plain
def test_load_without_memory_fails(lazy: Lazy) -> None:
    completion(lazy.server, "Once", 4)
    with short_of_addresses(lazy.server, len(lazy.whole) // 2):
        code, kind, message = refusal(lazy.server.http.post("/speculative", json={"action": "load"}))
        assert (code, kind) == (503, "out_of_memory_error")
        assert "not enough memory for the draft model" in message
        assert completion(lazy.server, "Once", 4)["tokens_predicted"] == 4
    act(lazy.server, "load")
    assert accepted(completion(lazy.server, prompt(1, 50), 20)) == 1


def test_swap_draft_for_projector(real: Real, model: Path, tmp_path: Path) -> None:
    """Load the projector and unload the draft in one call, or change nothing."""
    mmproj = tmp_path / "projector.gguf"
    whole = projector(model, real.work).read_bytes()
    mmproj.write_bytes(whole)
    text = CLEAR
    with drafting(real, model, tmp_path / "log", *ONE, "--mmproj", mmproj, "--mmproj-lazy") as server:

        def states() -> tuple[str, str]:
            return str(json.loads(server.get("/mmproj"))["state"]), state(server)

        expected = completion(server, text, 40)["content"]
        assert states() == ("unloaded", "loaded")
        done = part(server, "mmproj", "load", unload="speculative")
        assert done["taken"]["resident_bytes"] > len(whole)
        assert done["unloaded"]["speculative"]["state"] == "unloaded"
        assert states() == ("loaded", "unloaded")
        assert completion(server, text, 40)["content"] == expected
        part(server, "speculative", "load", unload="mmproj")
        assert states() == ("unloaded", "loaded")
        answer = completion(server, text, 40)
        assert (answer["content"], accepted(answer)) == (expected, 1)
        mmproj.unlink()
        failed = server.http.post("/mmproj", json={"action": "load", "unload": "speculative"})
        assert refusal(failed)[:2] == (500, "server_error")
        assert states() == ("unloaded", "loaded")
        answer = completion(server, text, 40)
        assert (answer["content"], accepted(answer)) == (expected, 1)


def test_clients_see_draft_state(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ONE) as server:
        for answer in (server.http.get("/speculative"), server.http.post("/speculative", json={"action": "load"})):
            code, kind, message = refusal(answer)
            assert (code, kind) == (501, "not_supported_error")
            assert "--model-draft" in message
    with drafting(real, model, tmp_path / "log", *ONE) as server:
        assert "speculative" not in json.loads(server.get("/props"))
        assert json.loads(server.get("/health")) == {"status": "ok"}
        assert act(server, "load")["taken"]["resident_bytes"] == 0
        act(server, "unload")
        assert act(server, "unload")["freed"]["resident_bytes"] == 0
        for wrong in ({}, {"action": "swap"}, {"action": "load", "unload": "speculative"}):
            assert refusal(server.http.post("/speculative", json=wrong))[0] == 400
