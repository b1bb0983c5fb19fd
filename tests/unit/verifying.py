"""Run `kvtool verify` with imitated programs, in the project that the fixture `here` makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool import cli
from kvtool.verify import drafts, models
from tests import fakes


def run(*args: str) -> int:
    return cli.run(["verify", "--bin", "bin", *args])


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def use_text_models(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all checks of verify, with models that need no GGUF files."""
    monkeypatch.setenv("FAKE_TOYS", "llama-dense qwen35-dense mamba-dense")
    vocabulary = directory / "llama.cpp" / "models" / models.VOCABULARY
    vocabulary.parent.mkdir(parents=True)
    vocabulary.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "text_model", lambda toy, _vocabulary, work: fakes.model(work, f"good@{toy.stem}"))
    monkeypatch.setattr(models, "cache_model", lambda _geometry, work: fakes.model(work, "slim"))
    monkeypatch.setattr(drafts, "mtp_model", lambda toy, work: fakes.model(work, f"same@{toy.stem}-mtp"))
