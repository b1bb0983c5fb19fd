"""Many chats with one llama-server, all after the same system prompt: what they take, compute and wait for.

A closed loop: each chat asks again when it has its answer, a given number of times. The first request goes alone, as in
a server that has been asked before; then all chats are at it. The tokens are drawn at random.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from kvtool import process
from kvtool.bench.bars import Bar
from kvtool.bench.report import Report, Table, as_mib, as_number
from kvtool.errors import MeasureError, VerifyError
from kvtool.machine import cores
from kvtool.verify.models import Geometry
from kvtool.verify.server import LlamaServer, llama_server

GEOMETRY = Geometry("serve", layers=8, kv_heads=4, head_size=128)  # 16 KiB a token
STATIC, DYNAMIC, SHARED = "static", "dynamic", "shared"
_SHARE = "--kv-share-prefix"
FLAGS = {STATIC: (), DYNAMIC: ("--kv-dynamic",), SHARED: ("--kv-dynamic", _SHARE)}
_WORDS = 1000, 30000  # token ids that are words in the vocabulary


@dataclass(frozen=True)
class Load:
    """How much is asked. In tokens: common, the system prompt; own, of each turn; answer."""

    chats: int
    turns: int
    common: int
    own: int
    answer: int

    @property
    def cells(self) -> int:
        """A context four times as long as all chats need without sharing anything: a real one goes on for longer."""
        return 4 * self.chats * (self.common + self.turns * (self.own + self.answer))


@dataclass(frozen=True)
class Served:
    """One server. computed: of prompt_tokens, those not found in a cache; first, worst: seconds to the first token of a
    chat, but for the one that went alone, median and most; used, committed: bytes of its caches after the last answer,
    resident: of the process, None where that is not told; error: the first one."""

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
    seconds: float


@dataclass(frozen=True)
class ServeResult(Report):
    """What `kvtool bench --serve` found."""

    how: ClassVar[str] = __doc__.partition("\n\n")[2] if __doc__ else ""
    load: Load
    rows: tuple[Served, ...]

    @property
    def said(self) -> str:
        load = self.load
        chats = f"{load.chats} chats of {load.turns} turns, {load.common} tokens in common and {load.own} of their own"
        return f"{chats} a turn, {load.answer} generated, `-c {load.cells}`, "

    def tables(self) -> tuple[Table, ...]:
        rows = [
            (
                *(row.mode, f"{row.requests}", f"{row.errors}", f"{row.prompt_tokens}", f"{row.computed}"),
                *(as_number(row.first), as_number(row.worst)),
                *(as_mib(value) for value in (row.used, row.committed, row.resident)),
            )
            for row in self.rows
        ]
        columns = ("cache", ">asked", ">errors", ">prompt", ">computed", ">first s", ">worst")
        more = ">KV MiB", ">taken", ">RSS"
        return (*super().tables(), Table("Chats", (*columns, *more), tuple(rows)))


@dataclass(frozen=True)
class Reply:
    """What came of one request. tokens: generated; wait: seconds to the first; error: why it has no end."""

    turn: int
    asked: int
    tokens: tuple[int, ...] = ()
    computed: int = 0
    wait: float = 0.0
    error: str = ""


def _words(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(*_WORDS), k=count)


def _chat(server: LlamaServer, load: Load, number: int) -> Iterator[Reply]:
    """One conversation, in a slot of its own; each turn is asked when its reply is wanted."""
    tokens = _words("all", load.common)
    for turn in range(load.turns):
        tokens += _words(f"{number}.{turn}", load.own)
        reply = _ask(server, {"prompt": tokens, "n_predict": load.answer, "id_slot": number}, turn)
        tokens += reply.tokens
        yield reply


def _ask(server: LlamaServer, request: dict[str, Any], turn: int) -> Reply:
    asked, said, error = len(request["prompt"]), list[int](), "the answer has no end"
    started, wait = time.monotonic(), 0.0
    try:
        for event in _events(server, request):
            wait = wait or time.monotonic() - started
            said += event.get("tokens", [])
            if event.get("stop"):
                return Reply(turn, asked, tuple(said), int(event["timings"]["prompt_n"]), wait)
    except (httpx.HTTPError, ValueError, KeyError) as err:
        error = str(err) or type(err).__name__
    return Reply(turn, asked, error=error)


def _events(server: LlamaServer, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a request is answered, as it comes. Raises ValueError for an error."""
    body = {**request, "temperature": 0.0, "ignore_eos": True, "return_tokens": True, "stream": True}
    with server.http.stream("POST", "/completion", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"HTTP {answer.status_code}: {answer.read().decode('utf-8', 'replace')[:200]}")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(str(event["error"]))
                yield event


def serve(binary: Path, model: Path, work: Path, load: Load, mode: str) -> Served:
    """Start a server, let the chats talk to it, and look at what it took. MeasureError when it does not start."""
    size = f"-c {load.cells} -np {load.chats} -kvu -cram 0 -t {cores()} --no-warmup".split()
    started = time.monotonic()
    try:
        with llama_server(binary, model, [*size, *FLAGS[mode]], work / f"serve-{mode}.log") as server:
            chats = [_chat(server, load, number) for number in range(load.chats)]
            alone = next(chats[0])
            with ThreadPoolExecutor(load.chats) as pool:
                together: list[list[Reply]] = list(pool.map(list, chats))
            took = json.loads(server.get("/props")).get("kv_cache", {}).get("target", {})
            resident = server.resident()
    except VerifyError as err:
        raise MeasureError(f"{mode}: {err.what}", why=err.why, output=err.output) from err
    later = [reply for replies in together for reply in replies]
    replies = [alone, *later]
    errors = [reply.error for reply in replies if reply.error]
    waits = [reply.wait for reply in later if reply.turn == 0 and not reply.error]
    return Served(
        mode,
        len(replies),
        len(errors),
        next(iter(errors), ""),
        sum(reply.asked for reply in replies),
        sum(reply.computed for reply in replies),
        statistics.median(waits) if waits else None,
        max(waits, default=None),
        took.get("used_bytes"),
        took.get("committed_bytes"),
        resident,
        time.monotonic() - started,
    )


def serve_all(
    binary: Path, model: Path, work: Path, load: Load, on_run: Callable[[int, str], None]
) -> tuple[tuple[Served, ...], str]:
    """Each kind of cache; and why one is left out."""
    known = _SHARE in process.capture([binary, "--help"], error=MeasureError, timeout=60).stdout
    rows = []
    for number, mode in enumerate(FLAGS):
        on_run(number, mode)
        if known or mode != SHARED:
            rows.append(serve(binary, model, work, load, mode))
    return tuple(rows), "" if known else f"this llama-server has no {_SHARE}"


def serve_bars(rows: Sequence[Served]) -> tuple[Bar, ...]:
    """What sharing a prompt has to save, against the same cache without; and that nobody is turned away."""
    by_mode = {row.mode: row for row in rows}
    one, two = by_mode.get(SHARED), by_mode.get(DYNAMIC)

    def ratio(name: str) -> float | None:
        over, under = (getattr(row, name) if row else None for row in (one, two))
        return over / under if over is not None and under else None

    return (
        *(Bar("requests that fail", row.mode, float(row.errors), most=0, note=row.error) for row in rows),
        Bar("KV bytes used / without sharing", SHARED, ratio("used"), most=0.25),
        Bar("prompt tokens computed / without sharing", SHARED, ratio("computed"), most=0.3),
        Bar("time to first token / without sharing", SHARED, ratio("first"), most=0.1),
    )
