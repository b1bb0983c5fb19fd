"""Test llama-cli with a dynamic cache: its command /kv-type."""

from __future__ import annotations

import subprocess

import pytest

from tests.e2e.conftest import Real


def chat(real: Real, *lines: str) -> str:
    """Return the output of llama-cli for the given input lines."""
    model = str(real.text_model("llama-dense"))
    args = ("-m", model, "-c", "2048", "-n", "8", "--kv-dynamic", "-t", "1", "--no-warmup")
    done = subprocess.run(
        [real.bin / "llama-cli", *args, "--simple-io"],
        input="\n".join((*lines, "/exit\n")),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/kv-type q8_0", "KV cache: K q8_0, V q8_0, 0.27 MiB"),
        ("/kv-type q8_0 q4_0", "KV cache: K q8_0, V q4_0, 0."),
        ("/kv-type q9_9", "is not a type of KV cells"),
    ],
)
def test_kv_type_changes_between_turns(real: Real, command: str, said: str) -> None:
    out = chat(real, "one two three", command, "four five")
    assert "/kv-type <k> [<v>]" in out
    assert said in out
    assert out.rindex("[ Prompt:") > out.index(said)  # the chat continues
