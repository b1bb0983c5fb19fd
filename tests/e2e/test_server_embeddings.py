"""Test that llama-server saves no state for embeddings, because no conversation continues them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Real
from tests.e2e.servers import serving

ARGS = ("--embeddings", "--pooling", "mean", "-c", "4096", "-np", "2", "-ub", "4096", "-b", "4096")


@pytest.mark.parametrize("kind", [(), ("--kv-dynamic",), ("--kv-unified",)])
def test_embeddings_are_not_kept(real: Real, model: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, "--cache-ram", "256", "-lv", "5", *kind) as server:
        vectors = set()
        for n in range(24):
            text = f"{n}: " + ", ".join(f"item {i} of {n}" for i in range(30))
            answer = server.post("/v1/embeddings", {"input": text})
            vectors.add(tuple(answer["data"][0]["embedding"]))
            assert all(slot.get("n_prompt_tokens", 0) == 0 for slot in server.http.get("/slots").json())
        assert len(vectors) == 24
        if kind == ("--kv-dynamic",):
            assert server.http.get("/props").json()["kv_cache"]["target"]["cells_used"] == 0
    assert "saving prompt with length" not in server.log
