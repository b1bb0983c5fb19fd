"""Test completions that share the cells of one prompt, and continue far beyond the window of a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import serving

BEYOND = 600
N = 5
TEXT = prompt(1, 100)


def texts(real: Real, log: Path, *args: str) -> list[str]:
    common = ("-c", str(N * 4096), "-np", str(N), "-ub", "16", "--no-warmup", *args)
    body = {"prompt": TEXT, "n_predict": BEYOND, "n_cmpl": N, "temperature": 0.0, "ignore_eos": True}
    with serving(real, real.text_model("gemma2-dense"), log, *common) as server:
        answers = server.http.post("/completion", json=body).json()
    assert isinstance(answers, list), answers
    assert [a["timings"]["predicted_n"] for a in answers] == [BEYOND] * N
    return [a["content"] for a in answers]


@pytest.fixture(scope="module")
def apart(real: Real, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return texts(real, tmp_path_factory.mktemp("apart") / "log", "--no-kv-unified")


@pytest.mark.parametrize("dynamic", [(), ("--kv-dynamic",)], ids=["static", "dynamic"])
def test_completions_beyond_window_finish(
    real: Real, tmp_path: Path, dynamic: tuple[str, ...], apart: list[str]
) -> None:
    assert apart == texts(real, tmp_path / "log", "--kv-unified", *dynamic)
