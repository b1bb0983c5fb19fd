"""The draft model of a running server: unloaded, loaded, swapped for the projector; no text may show it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify import drafts, models
from kvtool.verify.projector import projector
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import (
    completion,
    memory_is_plain,
    part,
    refusal,
    resident,
    serving,
    short_of_addresses,
    speaking,
    spoken,
    until,
    until_logged,
)

MIB = 1024 * 1024
ONE = ("-c", "4096", "-np", "1", "--cache-ram", "0")
DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")


@pytest.fixture(scope="module")
def model(real: Real) -> Path:
    return spoken(real, "llama-dense")


def drafting(real: Real, model: Path, log: Path, *args: str | Path) -> Any:
    """A server whose target drafts for itself: all that it drafts is accepted."""
    return serving(real, model, log, "-md", model, *DRAFT, *args)


def act(server: LlamaServer, action: str, **more: Any) -> dict[str, Any]:
    return part(server, "speculative", action, **more)


def unloading(server: LlamaServer, text: str, n_predict: int, **more: Any) -> dict[str, Any]:
    """A completion while the draft goes and comes, six times where it lasts so long."""

    def generated() -> int:
        (slot,) = server.http.get("/slots").json()
        return int(slot["next_token"][0]["n_decoded"]) if slot["is_processing"] else 0

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(completion, server, text, n_predict, **more)
        times = 0
        while times < 6 and not running.done():
            act(server, "unload")
            before = generated()
            until(lambda: running.done() or generated() > before + 4)  # noqa: B023
            act(server, "load")
            times += not running.done()
        assert times > 0, "too short to tell"
        return running.result()


def state(server: LlamaServer) -> str:
    return str(json.loads(server.get("/speculative"))["state"])


def accepted(answer: dict[str, Any]) -> float | None:
    """The share of what was drafted; None without drafts."""
    timings = answer["timings"]
    return timings["draft_n_accepted"] / timings["draft_n"] if "draft_n" in timings else None


def check_drafts(answer: dict[str, Any], *, loaded: bool) -> None:
    share = accepted(answer)
    assert (share is not None) == loaded
    assert share is None or share > 0.5  # one that lacks its prompt: 0.01


def test_a_text_that_runs_is_the_same(real: Real, model: Path, tmp_path: Path) -> None:
    text = prompt(1, 100)
    with serving(real, model, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 1000)["content"]
    with drafting(real, model, tmp_path / "log", *ONE) as server:
        answer = unloading(server, text, 1000)
    assert answer["content"] == expected
    check_drafts(answer, loaded=True)


NGRAM = ("--spec-ngram-simple-size-n", "1", "--spec-ngram-simple-size-m", "6")


@pytest.mark.parametrize("kinds", ["draft-simple", "draft-simple,ngram-simple"])
def test_what_is_decoded_a_second_time(real: Real, kinds: str, tmp_path: Path) -> None:
    """A target that cannot go back decodes again what it accepted of a draft, also of one of another kind."""
    model = spoken(real, "qwen35-dense")
    other = models.spoken(real.toys / "qwen35-dense.gguf", real.tree / "models" / models.VOCABULARY, tmp_path, seed=2)
    text, few = prompt(1, 100), {"grammar": "root ::= [a-d]*"}  # n-grams that come again
    with serving(real, model, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 400, **few)["content"]
    args = ("-md", other, "--spec-type", kinds, "--spec-draft-n-max", "4", *NGRAM, *ONE)
    with serving(real, model, tmp_path / "log", *args) as server:
        answer = unloading(server, text, 400, **few)
    assert answer["content"] == expected
    share = accepted(answer)
    assert share is not None
    assert share < 0.5


def test_it_catches_up(real: Real, model: Path, tmp_path: Path) -> None:
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
def test_prompts_that_come_back_from_the_cache(real: Real, toy: str, tmp_path: Path) -> None:
    """Saved with a draft and restored without, and the other way round; with checkpoints where the model needs them."""
    model = spoken(real, toy)
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
def test_a_checkpoint_of_a_time_without(real: Real, toy: str, tmp_path: Path) -> None:
    """It is restored when the draft has seen more than it holds, and cannot go back."""
    model = spoken(real, toy)
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
def test_the_memory_goes_back(real: Real, model: Path, tmp_path: Path) -> None:
    with drafting(real, model, tmp_path / "log", *ONE, "--draft-lazy", "--kv-dynamic") as server:

        def use() -> int:
            taken: int = act(server, "load")["taken"]["resident_bytes"]
            assert accepted(completion(server, prompt(1, 300), 50, cache_prompt=False)) is not None
            return taken

        use()  # threads, code, buffers of the client: they stay
        act(server, "unload")
        before = resident(server)
        for _ in range(5):
            taken = use()
            freed = act(server, "unload")["freed"]["resident_bytes"]
            assert min(taken, freed) > MIB
            assert resident(server) < before + MIB


class Lazy:
    """A server whose draft is a file that can be changed."""

    def __init__(self, server: LlamaServer, file: Path) -> None:
        self.server, self.file, self.whole = server, file, file.read_bytes()

    def fails(self) -> str:
        """What the load of this file says; the server goes on without."""
        code, kind, message = refusal(self.server.http.post("/speculative", json={"action": "load"}))
        assert (code, kind) == (500, "server_error")
        assert state(self.server) == "unloaded"
        assert accepted(completion(self.server, "Once", 4)) is None
        return message


@pytest.fixture
def lazy(real: Real, model: Path, tmp_path: Path) -> Iterator[Lazy]:
    file = tmp_path / "draft.gguf"
    file.write_bytes(model.read_bytes())
    with serving(real, model, tmp_path / "log", *ONE, "-md", file, *DRAFT, "--draft-lazy") as server:
        yield Lazy(server, file)


def test_a_file_that_is_not_right(real: Real, lazy: Lazy) -> None:
    lazy.file.unlink()
    assert "No such file" in lazy.fails()
    for cut in (0, 1000):
        lazy.file.write_bytes(lazy.whole[:cut])
        assert "not a GGUF file, or truncated" in lazy.fails()
    lazy.file.write_bytes(lazy.whole[:-1000])
    assert "truncated, " in lazy.fails()
    lazy.file.write_bytes((real.toys / "llama-dense.gguf").read_bytes())  # another vocabulary
    assert "vocab type must match" in lazy.fails()
    lazy.file.write_bytes(lazy.whole.replace(b"llama", b"lloma"))
    assert "see its log" in lazy.fails()
    lazy.file.write_bytes(lazy.whole)
    act(lazy.server, "load")
    assert accepted(completion(lazy.server, prompt(1, 50), 20)) == 1


@memory_is_plain
def test_no_memory_for_it(lazy: Lazy) -> None:
    completion(lazy.server, "Once", 4)
    with short_of_addresses(lazy.server, len(lazy.whole) // 2):
        code, kind, message = refusal(lazy.server.http.post("/speculative", json={"action": "load"}))
        assert (code, kind) == (503, "out_of_memory_error")
        assert "not enough memory for the draft model" in message
        assert completion(lazy.server, "Once", 4)["tokens_predicted"] == 4
    act(lazy.server, "load")
    assert accepted(completion(lazy.server, prompt(1, 50), 20)) == 1


def test_a_swap(real: Real, model: Path, tmp_path: Path) -> None:
    """The projector comes and the draft goes in one call, or nothing changes."""
    sight = tmp_path / "projector.gguf"
    whole = projector(model, real.tree / "build" / "verify").read_bytes()
    sight.write_bytes(whole)
    text = prompt(1, 100)
    with drafting(real, model, tmp_path / "log", *ONE, "--mmproj", sight, "--mmproj-lazy") as server:

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
        sight.unlink()
        failed = server.http.post("/mmproj", json={"action": "load", "unload": "speculative"})
        assert refusal(failed)[:2] == (500, "server_error")
        assert states() == ("unloaded", "loaded")
        answer = completion(server, text, 40)
        assert (answer["content"], accepted(answer)) == (expected, 1)


# --- on demand -----------------------------------------------------------------------------------------------------


def until_it_is(name: str, server: LlamaServer) -> None:
    until(lambda: state(server) == name)


def test_the_first_text_loads_it(real: Real, model: Path, tmp_path: Path) -> None:
    text = prompt(1, 100)
    with serving(real, model, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 40)["content"]
    with drafting(real, model, tmp_path / "log", *ONE, "--draft-lazy-auto", "1") as server:
        assert json.loads(server.get("/props"))["speculative"] == "unloaded"
        completion(server, text, 0)
        assert state(server) == "unloaded"  # that one has no use for it
        for _ in range(2):
            answer = completion(server, text, 40)
            assert (answer["content"], accepted(answer)) == (expected, 1)
            until_it_is("unloaded", server)


def test_it_stays_while_it_is_used(real: Real, model: Path, tmp_path: Path) -> None:
    body = {"prompt": prompt(1, 100), "n_predict": 30000, "ignore_eos": True, "stream": True}
    with drafting(real, model, tmp_path / "log", "-c", "32768", "-np", "1", "--draft-lazy-auto", "1") as server:
        with server.http.stream("POST", "/completion", json=body, headers={"Connection": "close"}) as answer:
            end = time.monotonic() + 3
            for line in answer.iter_lines():
                if time.monotonic() > end:
                    break
                assert not line or state(server) == "loaded"
            else:
                pytest.fail("too short to tell")
        until_it_is("unloaded", server)


def test_a_text_does_without_what_cannot_be_loaded(lazy_auto: Lazy) -> None:
    server, text = lazy_auto.server, prompt(1, 50)
    lazy_auto.file.unlink()
    assert accepted(completion(server, text, 20)) is None
    until_logged(server, "no drafts for now: failed to load")
    lazy_auto.file.write_bytes(lazy_auto.whole)
    assert accepted(completion(server, text, 20)) is None  # not tried with each request
    act(server, "load")
    assert accepted(completion(server, text, 20)) == 1


@pytest.fixture
def lazy_auto(real: Real, model: Path, tmp_path: Path) -> Iterator[Lazy]:
    file = tmp_path / "draft.gguf"
    file.write_bytes(model.read_bytes())
    with serving(real, model, tmp_path / "log", *ONE, "-md", file, *DRAFT, "--draft-lazy-auto", "60") as server:
        yield Lazy(server, file)


def test_it_does_not_come_back_with_a_server_that_wakes(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*ONE, "--sleep-idle-seconds", "1")
    with drafting(real, model, tmp_path / "log", *args, "--draft-lazy-auto", "0") as server:
        expected = completion(server, "Once", 20)["content"]
        until_it_is("unloaded", server)
        assert json.loads(server.get("/props"))["is_sleeping"]

        def is_loaded() -> bool:  # until it sleeps
            assert completion(server, "Once", 20)["content"] == expected
            return bool(json.loads(server.get("/health")) == {"status": "ok", "speculative": "loaded"})

        until(is_loaded)
    with drafting(real, model, tmp_path / "log", *args) as server:
        until_it_is("sleeping", server)
        until(lambda: accepted(completion(server, "Once", 20)) == 1 and state(server) == "loaded")


# --- MTP layers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layered(real: Real) -> Path:
    """A model with an MTP layer."""
    return drafts.mtp(spoken(real, drafts.MTP_TOY), real.tree / "build" / "verify")


MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "4")


def test_mtp_layers_go_and_come(real: Real, layered: Path, tmp_path: Path) -> None:
    """In the middle of a text, between prompts that come back from the cache, and with checkpoints."""
    texts = [prompt(seed, 200) for seed in (1, 2)]
    args = ("-c", "2048", "-np", "1", "--cache-ram", "100", "--slot-prompt-similarity", "0.5")

    def talk(server: LlamaServer, *, actions: bool) -> list[str]:
        out = []
        for number in range(8):
            if actions:
                act(server, "load" if number % 2 else "unload")
            for more, n in ((" and" * (number // 2), 24), (" the", 12)):
                answer = completion(server, texts[number % 2] + more, n)
                out.append(answer["content"])
                assert not actions or (accepted(answer) is not None) == (number % 2 == 1)
        return out

    with serving(real, layered, tmp_path / "log", *args) as server:
        expected = talk(server, actions=False)
        whole = completion(server, texts[0], 400)["content"]
    with serving(real, layered, tmp_path / "log", *args, *MTP) as server:
        assert talk(server, actions=True) == expected
        running = unloading(server, texts[0], 400)
        assert running["content"] == whole
        assert accepted(running) is not None


@memory_is_plain
def test_the_memory_of_an_mtp_layer_goes_back(real: Real, layered: Path, tmp_path: Path) -> None:
    args = ("-c", "32768", "-np", "1", "--cache-ram", "0", *MTP)
    with serving(real, layered, tmp_path / "log", *args, "--draft-lazy") as server:

        def use() -> int:
            taken: int = act(server, "load")["taken"]["resident_bytes"]
            assert accepted(completion(server, prompt(1, 300), 50, cache_prompt=False)) is not None
            return taken

        completion(server, prompt(1, 300), 50, cache_prompt=False)
        use()
        act(server, "unload")
        before = resident(server)
        for _ in range(5):
            use()
            assert act(server, "unload")["freed"]["resident_bytes"] > MIB
            assert resident(server) < before + MIB


def test_one_that_shares_the_cells_of_its_target(real: Real, tmp_path: Path) -> None:
    """It comes and goes, and they stay."""
    pair = drafts.pair(real.tree / "build" / "verify")
    target, draft = speaking(real, pair.target), speaking(real, pair.draft)
    text = prompt(1, 200)
    with serving(real, target, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 1000)["content"]
    with serving(real, target, tmp_path / "log", *ONE, "-md", draft, *MTP, "--draft-lazy") as server:
        first = completion(server, text, 50)["content"]
        act(server, "load")
        second = completion(server, text + first, 50)
        assert accepted(second) is not None
        assert second["timings"]["cache_n"] > 200
        assert expected.startswith(first + second["content"])
        assert unloading(server, text, 1000)["content"] == expected


def test_an_mtp_layer_on_demand(real: Real, layered: Path, tmp_path: Path) -> None:
    with serving(real, layered, tmp_path / "log", *ONE, *MTP, "--draft-lazy-auto", "1") as server:
        assert state(server) == "unloaded"
        assert accepted(completion(server, prompt(1, 50), 50)) is not None
        until_it_is("unloaded", server)


def test_what_clients_are_told(real: Real, model: Path, tmp_path: Path) -> None:
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
