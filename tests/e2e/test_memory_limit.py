"""Let the system refuse memory: RLIMIT_AS is set after the first cells, and leaves too little memory for a growth.

The cache is that of Qwen3.5-27B, with 64 KiB for each cell, so that a growth needs more than the allocator has left.
The cache grows by copy, because the address range of a cache that grows in place counts completely when it is reserved.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Real

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the address space of a process")


def no_memory(real: Real, no_vocab_model: Path, limit: int) -> tuple[int, dict[str, Any], str]:
    """Run kv-check's check "no-memory" with `limit` MiB for growth. Return the exit code, the answer and the log."""
    argv: list[str | Path] = [
        real.bin / "kv-check",
        "-m",
        no_vocab_model,
        "--checks",
        "no-memory",
        "--storage",
        "copy",
        "-v",
    ]
    done = subprocess.run([*argv, "--quick", "--limit", str(limit)], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("limit", [1, 3, 8, 20])
def test_refused_memory_loses_nothing(real: Real, no_vocab_model: Path, limit: int) -> None:
    code, answer, log = no_memory(real, no_vocab_model, limit)
    assert (code, answer["status"]) == (0, "same"), answer["reason"]
    assert "not enough memory" in log


def test_enough_memory_never_fails(real: Real, no_vocab_model: Path) -> None:
    code, answer, log = no_memory(real, no_vocab_model, 4096)
    assert (code, answer["status"]) == (0, "same"), answer["reason"]
    assert "not enough memory" not in log
