"""Measure many chats with one llama-server that all start with the same system prompt.

Each chat sends a fixed number of requests, each one after the answer to the request before. The first request of the
first chat runs alone, as in a server that was used before. Then all chats start at the same time. The tokens are
random. All servers receive the same requests: one with a static cache, one with a dynamic cache, and one with
`--kv-share-prefix` (*shared*).

The column *prompt* counts the tokens of all prompts. *Computed* counts those that the server computed, because no cache
contained them. *First s* is the time in seconds from the first request of a chat to the first token of the answer, as
the median over all chats except the first one. *Worst* is the longest of these times. *KV MiB* is the memory of the
cells in use after the last answer, *allocated* is the memory that the caches have at that time, and *RSS* is the
resident memory of the process, all in MiB. Smaller numbers are better in all columns after *prompt*.
"""

import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from kvtool.bench import plots
from kvtool.bench.report import MIB, STATIC, Bar, Report, Table, as_number, mib, ratio
from kvtool.errors import MeasureError, VerifyError
from kvtool.machine import cores
from kvtool.verify.models import Geometry
from kvtool.verify.server import LlamaServer, json_of_events, llama_server, together

HOW = (__doc__ or "").partition("\n\n")[2]
GEOMETRY = Geometry("serve", layers=8, kv_heads=4, head_size=128)  # 16 KiB for each token
DYNAMIC, SHARED = "dynamic", "shared"
SHARE = "--kv-share-prefix"
FLAGS = {STATIC: (), DYNAMIC: ("--kv-dynamic",), SHARED: ("--kv-dynamic", SHARE)}


@dataclass(frozen=True)
class Load:
    """Define the number and the size of the requests of all chats.

    chats: the number of chats
    turns: the number of requests of each chat
    common: the number of tokens of the system prompt
    own: the number of tokens that each request adds to the prompt
    answer: the number of tokens of each answer
    """

    chats: int
    turns: int
    common: int
    own: int
    answer: int

    @property
    def cells(self) -> int:
        """Return the size of the context in cells: four times the number that all chats need without sharing.

        Contexts of real servers are larger than their conversations, too.
        """
        return 4 * self.chats * (self.common + self.turns * (self.own + self.answer))


@dataclass(frozen=True)
class Served:
    """Hold the measurements of one server.

    computed: the number of prompt tokens that the server computed, because they were not in a cache
    first: the time in seconds from the first request of a chat to its first token: the median over all chats except
        the first chat
    worst: the longest of these times
    used: the bytes of the used cells after the last answer
    committed: the bytes that the caches have allocated after the last answer
    resident: the resident memory of the process in bytes, None if it is unknown
    error: the first error, "" for none
    """

    mode: str
    requests: int
    errors: int
    error: str
    prompt_tokens: int
    computed: int
    first: float | None
    worst: float | None
    used: int | None
    committed: int | None
    resident: int | None


@dataclass(frozen=True)
class ServeResult(Report):
    """Report the measurements of `kvtool bench --serve`."""

    name, how = "serve", HOW
    said = (
        "{load.chats} chats of {load.turns} turns, {load.common} tokens in common and {load.own} of their own a turn, "
        "{load.answer} generated, `-c {load.cells}`"
    )
    load: Load
    rows: tuple[Served, ...]

    def pictures(self) -> dict[str, bytes]:
        """Draw a panel for each cost that should be smaller if the chats share their prompt."""
        panels: dict[str, list[float]] = {
            "Resident memory, MiB": [(row.resident or 0) / MIB for row in self.rows],
            "Computed prompt tokens": [row.computed for row in self.rows],
            "Seconds to the first token": [row.first or 0.0 for row in self.rows],
        }
        with plots.picture("serve", len(panels), rows=len(panels), size=(8, 7)) as (files, axes):
            for axis, (title, values) in zip(axes, panels.items(), strict=True):
                axis.barh([row.mode for row in self.rows], values, color=plots.BARS)
                axis.invert_yaxis()  # put the static cache at the top
                axis.set(title=title)
                plots.label_bars(axis, [as_number(value) for value in values])
        return files

    def tables(self) -> tuple[Table, ...]:
        """Return a table with one row for each server."""
        columns = ("asked", "errors", "prompt", "computed", "first s", "worst", "KV MiB", "allocated", "RSS")
        rows = []
        for r in self.rows:
            counts, waits = (r.requests, r.errors, r.prompt_tokens, r.computed), (r.first, r.worst)
            rows.append((r.mode, *counts, *waits, *mib(r.used, r.committed, r.resident)))
        return (("Chats", ("cache", *(f">{column}" for column in columns)), rows),)


class Reply(NamedTuple):
    """Hold the reply to one request.

    asked: the number of tokens of the prompt
    tokens: the generated tokens
    computed: the number of prompt tokens that the server computed
    wait: the time in seconds until the first token
    error: the reason why the reply is incomplete, "" if it is complete
    """

    asked: int
    tokens: tuple[int, ...] = ()
    computed: int = 0
    wait: float = 0.0
    error: str = ""


def _chat(server: LlamaServer, load: Load, number: int) -> Iterator[Reply]:
    """Yield the reply to each turn of one conversation, in a slot of its own.

    The request of a turn is sent only when the caller asks the iterator for the next reply.
    """
    words = range(1000, 30000)  # ids of tokens in the vocabulary that are words
    tokens = random.Random("all").choices(words, k=load.common)
    for turn in range(load.turns):
        tokens += random.Random(f"{number}.{turn}").choices(words, k=load.own)
        reply = _ask(server, {"prompt": tokens, "n_predict": load.answer, "id_slot": number})
        tokens += reply.tokens
        yield reply


def _ask(server: LlamaServer, request: dict[str, Any]) -> Reply:
    asked, said, wait, started = len(request["prompt"]), list[int](), 0.0, time.monotonic()
    body = {**request, "temperature": 0.0, "ignore_eos": True, "return_tokens": True, "stream": True}
    try:
        with server.http.stream("POST", "/completion", json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"HTTP {answer.status_code}: {answer.read().decode('utf-8', 'replace')[:200]}")
            for event in json_of_events(answer):
                if "error" in event:
                    raise ValueError(event["error"])
                wait = wait or time.monotonic() - started
                said += event.get("tokens", [])
                if event.get("stop"):
                    return Reply(asked, tuple(said), int(event["timings"]["prompt_n"]), wait)
            raise ValueError("the answer has no end")
    except (httpx.HTTPError, ValueError, KeyError) as err:
        return Reply(asked, error=str(err) or type(err).__name__)


def serve(binary: Path, model: Path, work: Path, load: Load, mode: str) -> Served:
    """Start a server, run the chats, and read the server's memory. Raise MeasureError if it does not start."""
    args = [*f"-c {load.cells} -np {load.chats} -kvu -cram 0 -t {cores()} --no-warmup".split(), *FLAGS[mode]]
    try:
        with llama_server(binary, model, args, work / f"serve-{mode}.log") as server:
            chats = [_chat(server, load, number) for number in range(load.chats)]
            alone = next(chats[0])
            replied = together(list, chats)
            cache = json.loads(server.get("/props")).get("kv_cache", {}).get("target", {})
            sizes = cache.get("used_bytes"), cache.get("committed_bytes"), server.resident()
    except VerifyError as err:
        raise MeasureError(f"{mode}: {err.what}", why=err.why, output=err.output) from err
    replies = [alone, *itertools.chain(*replied)]
    errors = [reply.error for reply in replies if reply.error]
    waits = [first.wait for first, *_ in replied[1:] if not first.error]
    counts = len(replies), len(errors), next(iter(errors), "")
    tokens = sum(reply.asked for reply in replies), sum(reply.computed for reply in replies)
    return Served(mode, *counts, *tokens, statistics.median(waits) if waits else None, max(waits, default=None), *sizes)


def serve_bars(rows: Sequence[Served]) -> tuple[Bar, ...]:
    """Return the figures that have a target: the costs with a shared prompt, and the number of errors.

    A cost is divided by the cost of the dynamic cache without sharing. The number of errors must be 0.
    """
    _static, dynamic, *shared = rows

    def saved(what: str, name: str, most: float) -> Bar:
        found = ratio(getattr(shared[0], name), getattr(dynamic, name)) if shared else None
        return Bar(f"{what} / without sharing", SHARED, found, most=most)

    return (
        *(Bar("requests that fail", row.mode, float(row.errors), most=0, note=row.error) for row in rows),
        saved("KV bytes used", "used", 0.25),
        saved("prompt tokens computed", "computed", 0.3),
        saved("time to first token", "first", 0.1),
    )
