"""Test --draft-lazy-auto: the first request that can use the draft model loads it.

The draft model is unloaded when no request uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving, until, until_logged
from tests.e2e.speculative import CLEAR, DRAFT, ONE, Lazy, accepted, act, drafting, state, until_it_is


def test_first_text_loads_draft(real: Real, model: Path, tmp_path: Path) -> None:
    text = CLEAR
    with serving(real, model, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 40)["content"]
    with drafting(real, model, tmp_path / "log", *ONE, "--draft-lazy-auto", "1") as server:
        assert json.loads(server.get("/props"))["speculative"] == "unloaded"
        completion(server, text, 0)
        assert state(server) == "unloaded"  # that request cannot use a draft model
        for _ in range(2):
            answer = completion(server, text, 40)
            assert (answer["content"], accepted(answer)) == (expected, 1)
            until_it_is("unloaded", server)


def test_draft_stays_while_used(real: Real, model: Path, tmp_path: Path) -> None:
    body = {"prompt": prompt(1, 100), "n_predict": 30000, "ignore_eos": True, "stream": True}
    with drafting(real, model, tmp_path / "log", "-c", "32768", "-np", "1", "--draft-lazy-auto", "1") as server:
        with server.http.stream("POST", "/completion", json=body, headers={"Connection": "close"}) as answer:
            end = time.monotonic() + 3
            for line in answer.iter_lines():
                if time.monotonic() > end:
                    break
                assert not line or state(server) == "loaded"
            else:
                pytest.fail("the text ended too early")
        until_it_is("unloaded", server)


def test_text_without_loadable_draft(lazy_auto: Lazy) -> None:
    server, text = lazy_auto.server, prompt(1, 50)
    lazy_auto.file.unlink()
    assert accepted(completion(server, text, 20)) is None
    until_logged(server, "no drafts for now: failed to load")
    lazy_auto.file.write_bytes(lazy_auto.whole)
    assert accepted(completion(server, text, 20)) is None  # loading is not tried again with each request
    act(server, "load")
    assert accepted(completion(server, text, 20)) == 1


@pytest.fixture
def lazy_auto(real: Real, model: Path, tmp_path: Path) -> Iterator[Lazy]:
    file = tmp_path / "draft.gguf"
    file.write_bytes(model.read_bytes())
    with serving(real, model, tmp_path / "log", *ONE, "-md", file, *DRAFT, "--draft-lazy-auto", "60") as server:
        yield Lazy(server, file)


def test_wakeup_does_not_load_draft(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*ONE, "--sleep-idle-seconds", "1")
    with drafting(real, model, tmp_path / "log", *args, "--draft-lazy-auto", "0") as server:
        expected = completion(server, "Once", 20)["content"]
        until_it_is("unloaded", server)
        assert json.loads(server.get("/props"))["is_sleeping"]

        def is_loaded() -> bool:  # called until the server sleeps
            assert completion(server, "Once", 20)["content"] == expected
            return bool(json.loads(server.get("/health")) == {"status": "ok", "speculative": "loaded"})

        until(is_loaded)
    with drafting(real, model, tmp_path / "log", *args) as server:
        until_it_is("sleeping", server)
        until(lambda: accepted(completion(server, "Once", 20)) == 1 and state(server) == "loaded")
