"""Servers for the tests of `kvtool top`: one made of answers, and an address that has none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.unit.tops import Fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.delenv("LLAMA_API_KEY", raising=False)
    with Fake() as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"
