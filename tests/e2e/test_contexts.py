"""Test kinds of contexts that `kvtool verify` does not make: embeddings, and a decoder with its encoder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e import encoder
from tests.e2e.conftest import Real


def equal(real: Real, model: Path, *args: str) -> set[str]:
    """Run kv-check.

    It must find equal bits, and the cache must have grown. Return the names of the checks that passed.
    """
    done = subprocess.run([real.bin / "kv-check", "-m", model, "--quick", *args], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert (answer["status"], done.returncode) == ("same", 0), answer["reason"]
    assert answer["grown"]
    return {check["name"] for check in answer["checks"] if check["status"] == "same"}


# Plain, hybrid and iSWA. Upstream does not support every check for a mean over all tokens.
@pytest.mark.parametrize("toy", ["llama-dense", "qwen35-dense", "gemma3-dense"])
@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
def test_embeddings_are_equal(real: Real, toy: str, pooling: str) -> None:
    checks = "prompt,generate,copy,state-self,clear"
    same = equal(real, real.toys / f"{toy}.gguf", "--embeddings", "--pooling", pooling, "--checks", checks)
    assert same == set(checks.split(","))


@pytest.mark.parametrize(
    "args",
    [(), ("-fa", "off"), ("--seqs", "4", "--unified"), ("-ctk", "q8_0"), ("--storage", "copy")],
    ids=["f16", "fa-off", "unified", "q8_0", "by-copy"],
)
def test_decoder_with_encoder_is_equal(real: Real, args: tuple[str, ...]) -> None:
    model = encoder.t5(real.work)
    assert {"prompt", "generate", "state-self", "full"} <= equal(real, model, *args)
