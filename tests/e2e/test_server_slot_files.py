"""Test slot files that a server with another kind of cache wrote.

They must be converted, or refused with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, refusal, serving

ONE = ("-c", "2048", "-np", "1", "--cache-ram", "0", "--no-warmup")
Q8 = ("-ctk", "q8_0", "-ctv", "q8_0")
TEXT = prompt(1, 300)
KINDS = [(), ("--kv-dynamic",)]


def restore(server: LlamaServer, name: str) -> Any:
    return server.http.post("/slots/0", params={"action": "restore"}, json={"filename": name})


@pytest.mark.parametrize("storage", ["", "copy"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_rotated", [True, False])
def test_slot_file_of_other_rotation_is_converted(
    real: Real,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[str, ...],
    storage: str,
    is_rotated: bool,
) -> None:
    args = (*ONE, *Q8, "--slot-save-path", tmp_path)
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", str(int(not is_rotated)))
    with serving(real, model, tmp_path / "writer", *args) as server:
        expected = completion(server, TEXT, 8)["content"]
        server.slot("save", 0, "slot.bin")
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", str(int(is_rotated)))
    with serving(real, model, tmp_path / "reader", *args, *kind) as server:
        answer = restore(server, "slot.bin")
        assert answer.status_code == 200, answer.text
        found = completion(server, TEXT, 8)
        assert found["timings"]["cache_n"] == found["tokens_evaluated"] - 1
        assert found["content"] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_slot_file_that_cannot_be_read_is_invalid(
    real: Real, model: Path, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    """Restore slot files of another layout, and truncated files.

    The error must not name missing memory as its cause.
    """
    args = (*ONE, "--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "writer", *args, "-fa", "off") as server:
        completion(server, TEXT, 0)
        server.slot("save", 0, "transposed.bin")
    whole = (tmp_path / "transposed.bin").read_bytes()
    (tmp_path / "truncated.bin").write_bytes(whole[: len(whole) // 2])
    with serving(real, model, tmp_path / "reader", *args, "-fa", "on", *kind) as server:
        for name in ("transposed.bin", "truncated.bin"):
            assert refusal(restore(server, name))[:2] == (400, "invalid_request_error")
        assert completion(server, TEXT, 4)["timings"]["cache_n"] == 0
