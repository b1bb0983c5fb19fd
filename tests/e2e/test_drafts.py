"""A draft that shares the cells of its target, which grows under it: the same bits as with static caches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvtool.verify import drafts
from tests.e2e.conftest import Real


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("args", [(), ("-fa", "off"), ("-ctk", "q8_0", "-ctv", "q8_0"), ("--seqs", "4", "--unified")])
def test_a_draft_follows_its_target(real: Real, storage: str, args: tuple[str, ...]) -> None:
    pair = drafts.pair(real.tree / "build" / "verify")
    argv: list[str | Path] = [
        real.bin / "kv-check",
        "-m",
        pair.target,
        "-md",
        pair.draft,
        "--checks",
        "draft",
        "--storage",
        storage,
    ]
    done = subprocess.run([*argv, *args], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert (answer["status"], done.returncode) == ("same", 0), answer["reason"]
    (check,) = answer["checks"]
    assert check["grown"] and check["values"] > 10_000
