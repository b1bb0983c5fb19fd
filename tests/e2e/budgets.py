"""Run a server with a memory budget, and check the budget after each request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, serving

MIB = 1024 * 1024
LADDER = ("--kv-auto-quant", "f16,q8_0,q4_0")


def props(server: LlamaServer) -> Any:
    return server.http.get("/props").json()


class Watched:
    """Hold a server with a budget of `mib` MiB. `taken` is the largest number of bytes in use that look() has read."""

    def __init__(self, server: LlamaServer, mib: int) -> None:
        self.server, self.mib, self.taken = server, mib, 0

    def ask(self, slot: int, words: int, **more: Any) -> dict[str, Any]:
        answer = completion(self.server, prompt(slot, words), 8, id_slot=slot, **more)
        self.look()
        return answer

    def look(self) -> tuple[str, int, int]:
        """Return the type of K, the number of changes to smaller types, and the number of changes to larger types."""
        said = props(self.server)
        budget, caches = said["kv_budget"], said["kv_cache"].values()
        assert sum(cache["committed_bytes"] for cache in caches) <= budget["committed_bytes"] <= self.mib * MIB
        self.taken = max(self.taken, budget["committed_bytes"])
        return said["kv_cache"]["target"]["type_k"], budget["down_total"], budget["up_total"]


@contextlib.contextmanager
def within(real: Real, model: Path, tmp_path: Path, mib: int, *args: str | Path) -> Iterator[Watched]:
    fixed = ("-c", "16384", "-np", "2", "--cache-ram", "0", "--no-warmup", "--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "log", *fixed, "--kv-budget", str(mib), *args) as server:
        yield Watched(server, mib)
