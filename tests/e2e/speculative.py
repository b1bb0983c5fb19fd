"""Run a server whose draft model is loaded and unloaded, and read its answers."""

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

# A prompt whose best next token is always clear. Batches of another size are rounded differently on some CPUs, but over
# 1000 tokens of `model`, the best token is at least 0.4 % of its probability ahead of the next one.
CLEAR = prompt(5, 100)


def drafting(real: Real, model: Path, log: Path, *args: str | Path) -> Any:
    """Run a server whose target is also its draft model, so that all drafted tokens are accepted."""
    return serving(real, model, log, "-md", model, *DRAFT, *args)


def act(server: LlamaServer, action: str, **more: Any) -> dict[str, Any]:
    return part(server, "speculative", action, **more)


def unloading(server: LlamaServer, text: str, n_predict: int, **more: Any) -> dict[str, Any]:
    """Complete a text while the draft model is unloaded and loaded up to six times."""

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
        assert times > 0, "the text ended before the draft was unloaded and loaded"
        return running.result()


def state(server: LlamaServer) -> str:
    return str(json.loads(server.get("/speculative"))["state"])


def accepted(answer: dict[str, Any]) -> float | None:
    """Return the share of the drafted tokens that were accepted; None if nothing was drafted."""
    timings = answer["timings"]
    return timings["draft_n_accepted"] / timings["draft_n"] if "draft_n" in timings else None


def check_drafts(answer: dict[str, Any], *, loaded: bool) -> None:
    share = accepted(answer)
    assert (share is not None) == loaded
    assert share is None or share > 0.5  # a draft model that does not have the prompt reaches only 0.01


def until_it_is(name: str, server: LlamaServer) -> None:
    until(lambda: state(server) == name)


class Lazy:
    """Hold a server and the file of its draft model. Tests change this file; `whole` is its original content."""

    def __init__(self, server: LlamaServer, file: Path) -> None:
        self.server, self.file, self.whole = server, file, file.read_bytes()

    def fails(self) -> str:
        """Load the draft model, which must fail, and return the error message. The server continues without a draft."""
        code, kind, message = refusal(self.server.http.post("/speculative", json={"action": "load"}))
        assert (code, kind) == (500, "server_error")
        assert state(self.server) == "unloaded"
        assert accepted(completion(self.server, "Once", 4)) is None
        return message
