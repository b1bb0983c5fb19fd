"""Test a request that exchanges the projector and the draft model, and whose client disconnects.

Also test a server that wakes up and no longer finds the files of both.
"""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvtool.verify.projector import projector
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e import broken
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, part, serving, until, until_it_generates
from tests.e2e.speculative import DRAFT, ONE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the slow library is linked by Linux's rules")

# Make batches slow. A server notices after a second that a client disconnected, and does the exchange between two
# batches.
SLOW = broken.Edit(
    "src/llama-kv-dynamic.cpp",
    "has_memory = copies.finish_update();",
    "has_memory = copies.finish_update(); for (const int64_t t = ggml_time_us(); ggml_time_us() < t + 1500000; ) {}",
)


@pytest.fixture(scope="module")
def slow(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("slow")
    broken.build(real, [(SLOW,)], out)
    return out


def loaded(server: LlamaServer) -> set[str]:
    return {part for part in ("mmproj", "speculative") if server.http.get(f"/{part}").json()["state"] == "loaded"}


def test_swap_with_disconnected_client(
    real: Real, model: Path, slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{slow}:{real.bin}")
    monkeypatch.setenv(broken.VARIABLE, "1")
    parts = ("--mmproj", projector(model, real.work), "-md", model, *DRAFT, "--draft-lazy", "--kv-dynamic")
    with (
        serving(real, model, tmp_path / "log", *ONE, "--no-warmup", *parts) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        swapped = 0
        for phase in (0.0, 0.4, 0.8, 1.2):
            running = pool.submit(completion, server, prompt(1, 20), 3)
            until_it_generates(server, running)
            time.sleep(phase)
            with contextlib.suppress(httpx.TimeoutException):
                server.http.post("/speculative", json={"action": "load", "unload": "mmproj"}, timeout=0.2)
            running.result()
            until(lambda: len(loaded(server)) == 1)
            if loaded(server) == {"speculative"}:
                part(server, "mmproj", "load", unload="speculative")
                swapped += 1
        assert swapped > 0, "no swap was in progress when its client disconnected"


def test_missing_files_at_wakeup_stay_unloaded(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    eyes, draft = tmp_path / "eyes.gguf", tmp_path / "draft.gguf"
    files = {eyes: mmproj.read_bytes(), draft: model.read_bytes()}
    args = ("--mmproj", eyes, "--mmproj-lazy", "-md", draft, *DRAFT, "--draft-lazy", "--sleep-idle-seconds", "1")

    def write() -> None:
        for file, content in files.items():
            file.write_bytes(content)

    write()
    with serving(real, model, tmp_path / "log", *ONE, "--no-warmup", *args, "--kv-dynamic") as server:
        expected = completion(server, prompt(1, 20), 8)["content"]
        part(server, "mmproj", "load")
        part(server, "speculative", "load")
        for file in files:
            file.unlink()
        until(lambda: server.http.get("/props").json()["is_sleeping"])
        assert completion(server, prompt(1, 20), 8)["content"] == expected
        assert loaded(server) == set()
        write()
        part(server, "mmproj", "load")
        part(server, "speculative", "load")
        assert completion(server, prompt(1, 20), 8)["content"] == expected
        until(lambda: server.http.get("/props").json()["is_sleeping"])
        # repeat, in case the server sleeps again
        until(lambda: completion(server, prompt(1, 20), 8)["content"] == expected and len(loaded(server)) == 2)
