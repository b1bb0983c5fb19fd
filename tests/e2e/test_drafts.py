"""Compare the results of draft models whose caches are static with those whose caches grow, bit for bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvtool.verify import drafts
from tests.e2e.conftest import Real

KINDS = [(), ("-fa", "off"), ("-ctk", "q8_0", "-ctv", "q8_0"), ("--seqs", "4", "--unified"), ("--seqs", "4")]


def drafting(real: Real, storage: str, *args: str | Path) -> None:
    argv: list[str | Path] = [real.bin / "kv-check", *args, "--checks", "draft", "--storage", storage]
    done = subprocess.run(argv, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert (answer["status"], done.returncode) == ("same", 0), answer["reason"]
    (check,) = answer["checks"]
    assert check["grown"] and check["values"] > 10_000


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("args", KINDS[:-1])  # upstream's draft model has no streams
def test_draft_sharing_target_cells(real: Real, storage: str, args: tuple[str, ...]) -> None:
    target, draft = drafts.draft_pair(real.work)
    drafting(real, storage, "-m", target, "-md", draft, *args)


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("args", KINDS)
def test_mtp_layer_with_own_cells(real: Real, storage: str, args: tuple[str, ...]) -> None:
    model = drafts.mtp_model(real.toys / f"{drafts.MTP_TOY}.gguf", real.work)
    drafting(real, storage, "-m", model, "--mtp", *args)
