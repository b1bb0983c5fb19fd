"""Test `n_predict: 0`: the prompt is put into the cells of a slot, and no token is generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, events, serving

MESSAGES = [{"role": "user", "content": prompt(3, 60)}]


@pytest.fixture(scope="module", params=["llama-dense", "gemma2-dense", "qwen35-dense"])  # plain, window, hybrid
def server(
    real: Real, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    args = ("-c", "2048", "-np", "2", "--kv-dynamic", "--cache-ram", "0")
    with serving(real, real.text_model(request.param), log, *args) as running:
        yield running


def test_prompt_is_stored_in_slot(server: LlamaServer) -> None:
    text = prompt(1, 300)
    expected = completion(server, text, 8, id_slot=1)["content"]

    warm = completion(server, text, 0, id_slot=0, return_tokens=True, cache_prompt=True)
    assert (warm["content"], warm["tokens"], warm["tokens_predicted"]) == ("", [], 0)
    assert (warm["stop_type"], warm["truncated"]) == ("limit", False)
    assert warm["timings"]["predicted_n"] == 0
    n = warm["timings"]["prompt_n"]
    assert n == warm["tokens_evaluated"] > 300 and warm["timings"]["prompt_ms"] > 0

    then = completion(server, text, 8, id_slot=0)
    assert then["timings"]["cache_n"] + then["timings"]["prompt_n"] == n
    # the tokens after the last checkpoint, if the model has checkpoints
    assert then["timings"]["cache_n"] >= n - 1 or then["timings"]["prompt_n"] <= 4 + 1
    assert then["content"] == expected


def test_longer_prompt_computes_only_rest(server: LlamaServer) -> None:
    text = prompt(2, 200)
    n = completion(server, text, 0, id_slot=0)["tokens_evaluated"]
    more = completion(server, text + " river and stone", 0, id_slot=0)["timings"]
    assert more["cache_n"] >= n - 5
    assert more["prompt_n"] <= 10


def test_several_prompts_and_completions(server: LlamaServer) -> None:
    body = {"prompt": [prompt(4, 20), prompt(5, 30)], "n_predict": 0}
    answers = server.http.post("/completion", json=body).json()
    assert [a["content"] for a in answers] == ["", ""]
    body = {"prompt": prompt(6, 20), "n_predict": 0, "n_cmpl": 2}
    answers = server.http.post("/completion", json=body).json()
    assert [a["content"] for a in answers] == ["", ""]


def test_chat_without_tokens(server: LlamaServer) -> None:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0, "id_slot": 1})
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    again = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "id_slot": 1})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"] - 5
    assert again["usage"]["completion_tokens"] == 1


def text_of(chunk: dict[str, Any]) -> str:
    return "".join(c["delta"].get("content") or "" for c in chunk["choices"])


def test_stream_has_start_and_end(server: LlamaServer) -> None:
    (final,) = events(server, "/completion", {"prompt": prompt(7, 40), "n_predict": 0})
    assert (final["content"], final["stop"], final["timings"]["predicted_n"]) == ("", True, 0)

    chunks = events(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0})
    assert [text_of(c) for c in chunks] == [""] * len(chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    anthropic = events(server, "/v1/messages", {"messages": MESSAGES, "max_tokens": 0})
    assert [e["type"] for e in anthropic] == ["message_start", "message_delta", "message_stop"]
    assert anthropic[1]["delta"]["stop_reason"] == "max_tokens"

    responses = events(server, "/v1/responses", {"input": MESSAGES, "max_output_tokens": 0})
    assert responses[0]["type"] == "response.created"
    assert responses[-1]["type"] == "response.completed"


def test_one_token_is_still_generated(server: LlamaServer) -> None:
    answer = completion(server, prompt(8, 40), 1)
    assert answer["timings"]["predicted_n"] == 1
    assert answer["content"]
