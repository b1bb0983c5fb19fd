"""A server with a draft that comes and goes, and what its answers say of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, part, refusal, serving, until

ONE = ("-c", "4096", "-np", "1", "--cache-ram", "0")
DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")

# Batches of other sizes are rounded otherwise on some CPUs. Here the best token is ahead of the next by 0.4 % of its
# probability or more, over 1000 tokens of `model`.
CLEAR = prompt(5, 100)


def drafting(real: Real, model: Path, log: Path, *args: str | Path) -> Any:
    """A server whose target drafts for itself: all that it drafts is accepted."""
    return serving(real, model, log, "-md", model, *DRAFT, *args)


def act(server: LlamaServer, action: str, **more: Any) -> dict[str, Any]:
    return part(server, "speculative", action, **more)


def unloading(server: LlamaServer, text: str, n_predict: int, **more: Any) -> dict[str, Any]:
    """A completion while the draft goes and comes, six times where it lasts so long."""

    def generated() -> int:
        (slot,) = server.http.get("/slots").json()
        return int(slot["next_token"][0]["n_decoded"]) if slot["is_processing"] else 0

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(completion, server, text, n_predict, **more)
        times = 0
        while times < 6 and not running.done():
            act(server, "unload")
            before = generated()
            until(lambda: running.done() or generated() > before + 4)  # noqa: B023
            act(server, "load")
            times += not running.done()
        assert times > 0, "too short to tell"
        return running.result()


def state(server: LlamaServer) -> str:
    return str(json.loads(server.get("/speculative"))["state"])


def accepted(answer: dict[str, Any]) -> float | None:
    """The share of what was drafted; None without drafts."""
    timings = answer["timings"]
    return timings["draft_n_accepted"] / timings["draft_n"] if "draft_n" in timings else None


def check_drafts(answer: dict[str, Any], *, loaded: bool) -> None:
    share = accepted(answer)
    assert (share is not None) == loaded
    assert share is None or share > 0.5  # one that lacks its prompt: 0.01


def until_it_is(name: str, server: LlamaServer) -> None:
    until(lambda: state(server) == name)


class Lazy:
    """A server whose draft is a file that can be changed."""

    def __init__(self, server: LlamaServer, file: Path) -> None:
        self.server, self.file, self.whole = server, file, file.read_bytes()

    def fails(self) -> str:
        """What the load of this file says; the server goes on without."""
        code, kind, message = refusal(self.server.http.post("/speculative", json={"action": "load"}))
        assert (code, kind) == (500, "server_error")
        assert state(self.server) == "unloaded"
        assert accepted(completion(self.server, "Once", 4)) is None
        return message
