"""Provide fixtures for the unit tests.

They are a web server with scripted answers for `kvtool top`, an address without a server, and a project for `kvtool
verify`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.commands import verify
from tests import fakes
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
def unused_address() -> Iterator[str]:
    """Yield an address of this machine at which no server listens.

    A socket is bound to the port but does not listen, so that no other program can listen there either.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with imitated programs and a vocabulary, and make its folder the current one."""
    root = tmp_path / "project"
    (root / "patches").mkdir(parents=True)
    (root / "patches" / "series.toml").write_text("")
    real = Path(verify.__file__).parents[2] / "patches" / "upstream.lock"
    (root / "patches" / "upstream.lock").write_bytes(real.read_bytes())
    fakes.programs(root / "bin")
    monkeypatch.chdir(root)
    return root
