"""Compare the answers with and without --kv-dynamic, with an ordinary client library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from kvtool.top.server import Server
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import serving

KEY = "sesame"
ARGS = ("-c", "4096", "-np", "2", "--cache-ram", "0", "--api-key", KEY)
LENGTH = 400  # tokens of an answer; more than the first 256 cells, so that the cache grows during the stream


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(
        model="any", messages=messages, temperature=0, max_tokens=LENGTH, extra_body={"ignore_eos": True}, **more
    )


def conversation(real: Real, log: Path, *args: str) -> tuple[list[str], list[int]]:
    """Return the texts of three answers, and the number of growths at the start and after each answer."""
    texts: list[str] = []
    messages: list[Any] = [{"role": "system", "content": "Answer in full."}]
    with (
        serving(real, real.text_model("llama-dense"), log, *ARGS, *args) as server,
        openai.DefaultHttpxClient(trust_env=False) as http,
        Server(server.url, KEY) as watched,
    ):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, http_client=http)
        assert [model.object for model in client.models.list()] == ["model"]

        def grown() -> int:
            return watched.read().memory[0].grow_total if args else 0

        growths = [grown()]
        for turn, streaming in enumerate((True, False, True)):
            messages.append({"role": "user", "content": prompt(turn, 40)})
            answer = chat(client, messages, stream=streaming)
            text, finish = streamed(answer) if streaming else whole(answer)
            assert finish == "length"
            messages.append({"role": "assistant", "content": text})
            texts.append(text)
            growths.append(grown())

        with pytest.raises(openai.BadRequestError, match="exceed"):
            chat(client, [{"role": "user", "content": prompt(9, 3000)}])
        with pytest.raises(openai.AuthenticationError):
            chat(client.with_options(api_key="0pen"), messages)
        assert chat(client, messages[:2]).usage.completion_tokens == LENGTH, (
            "the server continues after a refused request"
        )
    return texts, growths


def whole(answer: Any) -> tuple[str, str]:
    assert answer.usage.completion_tokens == LENGTH
    return answer.choices[0].message.content, answer.choices[0].finish_reason


def streamed(answer: Any) -> tuple[str, str]:
    choices = [event.choices[0] for event in answer if event.choices]
    assert len(choices) > LENGTH // 2, "the stream has several chunks"
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


def test_conversation_is_equal_during_growth(real: Real, tmp_path: Path) -> None:
    static, _ = conversation(real, tmp_path / "static")
    dynamic, growths = conversation(real, tmp_path / "dynamic", "--kv-dynamic")
    assert all(static) and len(set(static)) == len(static)
    assert dynamic == static
    assert growths == sorted(set(growths)), "the cache grew during each answer"
