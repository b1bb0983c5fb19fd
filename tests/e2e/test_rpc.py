"""Test the cache on a ggml-rpc-server, whose memory the host cannot access. A growth copies one layer at a time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.verify import devices
from tests.e2e.conftest import Real

TOYS = ("llama-dense", "qwen35-dense", "gemma3-dense", "deepseek2-moe", "minimax-m3-moe")


@pytest.fixture(scope="module")
def device(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Iterator[devices.Device]:
    with devices.device("rpc", real.bin, tmp_path_factory.mktemp("rpc"), 1) as found:
        yield found


@pytest.mark.timeout(1800)  # includes the build for the first test
@pytest.mark.parametrize("args", [(), ("-fa", "off"), ("--seqs", "4")], ids=["f16", "transposed-V", "four-streams"])
@pytest.mark.parametrize("toy", TOYS)
def test_cache_on_rpc_device_is_equal(real: Real, device: devices.Device, toy: str, args: tuple[str, ...]) -> None:
    argv: list[str | Path] = [real.bin / "kv-check", "-m", real.toys / f"{toy}.gguf", "--quick", *args]
    argv += ["--checks", "prompt,copy,shift,state-self"]
    with device.lanes[0]() as there:
        done = subprocess.run([*argv, *there], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert (answer["status"], done.returncode) == ("same", 0), answer["reason"]
    assert answer["grown"] and answer["device"] == "RPC0"
