"""Random requests at a llama-server, in a closed loop, and what is left then: python ci/soak.py BIN_DIR VOCABULARY

BIN_DIR has a llama-server of ours, best a sanitizer's (`kvtool build --preset tsan`); VOCABULARY is a vocabulary file
of upstream's tree. The model has random weights, and the memory of one of upstream's toys with --toy FILE.

Clients ask with texts that begin alike, with images, for no token at all, and each goes away in mid-stream in the end,
and another one comes. Meanwhile slots are erased, saved and restored, cells change their types, projector and draft
come and go, and somebody always looks at it. The seed decides who asks what, not what comes first.

It passes when every request was answered as it should be, or refused by name, and after each round: no slot works, the
slots' bytes sum to what is used, the erased cache is as small as it was, and a text the one of the beginning; in the
end the server obeys SIGTERM, and a sanitizer had nothing to say.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvtool.errors import VerifyError
from kvtool.verify import models
from kvtool.verify.projector import image_url, projector
from kvtool.verify.server import REQUEST_SECONDS, LlamaServer, llama_server
from kvtool.verify.texts import prompt

CLIENTS, SLOTS, CELLS = 6, 4, 1024
WORTH = 512  # cells: a cache gives none back for less
ROUND_SECONDS, REST_SECONDS = 60, 120
TYPES = ("f16", "q8_0", "q4_0", "f32", "bf16")
WATCHED = ("/slots", "/metrics", "/props", "/health", "/mmproj", "/speculative")
GEOMETRY = models.Geometry("soak", layers=4, kv_heads=2, head_size=64)
ARGS = (
    *("-c", f"{CELLS}", "-np", f"{SLOTS}", "-t", "1", "--kv-unified", "--kv-dynamic", "--kv-share-prefix", "--metrics"),
    *("--cache-ram", "8", "--no-warmup", "--chat-template", "chatml"),
    *("--spec-type", "draft-simple", "--spec-draft-n-max", "4"),
)
SAID_BY_A_SANITIZER = ("WARNING: ThreadSanitizer", "ERROR: AddressSanitizer", "ERROR: LeakSanitizer", "runtime error:")

Json = dict[str, Any]


class Unexpected(Exception):
    """An answer, or what is left, is not what it has to be."""


class Soak:
    """One server and everybody that talks to it. tally: how often which request had which end."""

    def __init__(self, server: LlamaServer, seed: int) -> None:
        self.server, self.seed, self.saved = server, seed, set[int]()
        self.tally = collections.Counter[str]()
        self.failed = threading.Event()
        self._lock = threading.Lock()

    def count(self, what: str, end: str) -> None:
        with self._lock:
            self.tally[f"{what}: {end}"] += 1

    def client(self) -> httpx.Client:
        """With a connection for each request: llama-server ends one with its stream, which a pool learns too late."""
        close = {"Connection": "close"}
        return httpx.Client(base_url=self.server.url, headers=close, timeout=REQUEST_SECONDS, trust_env=False)

    def request(self, http: httpx.Client, what: str, path: str, body: Json, *refusals: str) -> Json:
        """The answer, {} when it is one of these refusals, or one that every request may get."""
        answer = http.post(path, json=body)
        if answer.status_code == 200:
            self.count(what, "answered")
            return dict(answer.json())
        self.count(what, refused(answer, what, body, refusals))
        return {}

    def together(self, jobs: list[Callable[[], None]]) -> None:
        """Each in a thread of its own. The first failure ends all, and is raised."""

        def watched(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException:
                self.failed.set()
                raise

        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(watched, job) for job in jobs]
        for job in running:
            job.result()

    def until(self, end: float, act: Callable[[httpx.Client], None]) -> None:
        with self.client() as http:
            while time.monotonic() < end and not self.failed.is_set():
                act(http)


def refused(answer: httpx.Response, what: str, body: Json, refusals: tuple[str, ...]) -> str:
    """How an error names itself. Raises Unexpected when that is no way to refuse this."""
    error = answer.json()["error"]
    kind, why = error["type"], error["message"]
    if answer.status_code == 503 and kind in ("unavailable_error", "out_of_memory_error"):
        if kind == "unavailable_error" and "Retry-After" not in answer.headers:
            raise Unexpected(f"{what}: {error} without Retry-After")
        return f"refused, {kind}"
    for known in refusals:
        if known in why:
            return f"refused, {known}"
    raise Unexpected(f"{what} {json.dumps(body)[:500]}: HTTP {answer.status_code}, {answer.text[:500]}")


# ---- clients ---------------------------------------------------------------------------------------------------------


def text(rng: random.Random) -> Json:
    """With one of a few beginnings, in any slot, with or without what is in the cache."""
    return {
        "prompt": f"{prompt(1, rng.choice([20, 150, 300]))} {prompt(rng.randrange(20), rng.randrange(80))}",
        "n_predict": rng.choice([0, 1, 8, 60, 200]),
        "temperature": rng.choice([0.0, 1.0]),
        "ignore_eos": True,
        "id_slot": rng.randrange(-1, SLOTS),
        "cache_prompt": rng.random() < 0.8,
    }


def complete(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    body = text(rng)
    what = "no token" if body["n_predict"] == 0 else "text"
    if answer := soak.request(http, what, "/completion", body):
        judge(what, body, answer)


def stream(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    """To its end, which an error may be."""
    body = {**text(rng), "stream": True}
    with http.stream("POST", "/completion", json=body) as answer:
        said = answer.read()
    if answer.status_code != 200:
        soak.count("stream", refused(answer, "stream", body, ()))
        return
    last = events(said)[-1]
    if "error" in last:
        if last["error"]["type"] != "out_of_memory_error":
            raise Unexpected(f"stream {body}: {last}")
        soak.count("stream", "ended, out_of_memory_error")
    else:
        judge("stream", body, last)
        soak.count("stream", "answered")


def events(said: bytes) -> list[Json]:
    """Split at line feeds alone: a random text has other ends of lines in it."""
    lines = [line.removeprefix(b"data: ") for line in said.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def judge(what: str, body: Json, last: Json) -> None:
    """All tokens, or the note that there are less."""
    if not last.get("stop") or (last["tokens_predicted"] != body["n_predict"] and not last["truncated"]):
        raise Unexpected(f"{what} {body}: {last}")


def look(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    """A chat about an image, or two."""
    images = [image_url(rng.randrange(3)) for _ in range(rng.randint(1, 2))]
    words = {"type": "text", "text": prompt(rng.randrange(4), 20)}
    body = {
        "messages": [{"role": "user", "content": [words, *images]}],
        "max_tokens": rng.choice([0, 2, 20]),
        "id_slot": rng.randrange(-1, SLOTS),
    }
    soak.request(http, "image", "/v1/chat/completions", body, "is unloaded: POST /mmproj")


def go_away(soak: Soak, http: httpx.Client, rng: random.Random) -> None:
    """After some lines, perhaps none, or without the patience for the first."""
    body = {**text(rng), "n_predict": 400, "stream": True}
    timeout = httpx.Timeout(REQUEST_SECONDS, read=rng.choice([0.01, 0.1, REQUEST_SECONDS]))
    try:
        with http.stream("POST", "/completion", json=body, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
                refused(answer, "stream", body, ())
            for _ in zip(range(rng.randrange(12)), answer.iter_lines(), strict=False):
                pass
    except httpx.ReadTimeout:
        if timeout.read == REQUEST_SECONDS:
            raise
    soak.count("client", "went away")


def clients(soak: Soak, end: float, rng: random.Random) -> None:
    """One after the other."""
    while time.monotonic() < end and not soak.failed.is_set():
        with soak.client() as http:
            for _ in range(rng.randrange(5)):
                rng.choice([complete, complete, stream, look])(soak, http, rng)
            go_away(soak, http, rng)


# ---- an operator, and somebody who looks -----------------------------------------------------------------------------


def operate(soak: Soak, rng: random.Random, http: httpx.Client) -> None:
    slot = rng.randrange(SLOTS)
    act = rng.choice(["erase", "save", "restore", "types", "draft's types", "load", "load", "unload", "swap"])
    part, other = rng.sample(["mmproj", "speculative"], 2)
    file = {"filename": f"slot-{slot}"}
    if act == "erase":
        soak.request(http, act, f"/slots/{slot}?action=erase", {})
    elif act == "save":
        if soak.request(http, act, f"/slots/{slot}?action=save", file):
            soak.saved.add(slot)
    elif act == "restore":
        if slot in soak.saved:
            soak.request(http, act, f"/slots/{slot}?action=restore", file, "No available space in KV cache")
    elif act in ("types", "draft's types"):
        keys = ("ctk", "ctv") if act == "types" else ("ctkd", "ctvd")
        types = dict.fromkeys(keys, rng.choice(TYPES))
        soak.request(http, act, "/requantize_kvcache", types, "there is no draft")
    else:
        body = {"action": "load", "unload": other} if act == "swap" else {"action": act}
        timeout = {"timeout_ms": rng.choice([0, 1000, 60000])}
        soak.request(http, f"{act} {part}", f"/{part}", {**body, **timeout})
    time.sleep(rng.random() / 4)


def watch(http: httpx.Client) -> None:
    for path in WATCHED:
        http.get(path).raise_for_status()
    time.sleep(0.05)


# ---- what is left ----------------------------------------------------------------------------------------------------


def all_slots(server: LlamaServer) -> list[Json]:
    found: list[Json] = json.loads(server.get("/slots"))
    return found


def at_rest(server: LlamaServer) -> None:
    """Until no slot works. Then the slots have what is used, in the target's cache and in the draft's."""
    end = time.monotonic() + REST_SECONDS
    while any(slot["is_processing"] for slot in all_slots(server)):
        if time.monotonic() > end:
            raise Unexpected(f"a slot is stuck: {json.dumps(all_slots(server))}")
        time.sleep(0.05)
    slots = all_slots(server)
    for context, cache in json.loads(server.get("/props"))["kv_cache"].items():
        has = [slot["kv_cache"][context]["bytes"] for slot in slots]
        if sum(has) != cache["used_bytes"]:
            raise Unexpected(f"the slots have {has} of {cache['used_bytes']} bytes of the {context}'s cache")


def left(server: LlamaServer) -> Json:
    """What the caches are, and say, once all that came has gone."""
    for part in ("mmproj", "speculative"):
        server.post(f"/{part}", {"action": "unload"})
    server.post("/requantize_kvcache", {"ctk": "f16", "ctv": "f16"})
    for slot in range(SLOTS):
        server.slot("erase", slot)
    all_slots(server)  # /props has what was found the last time that somebody looked
    cache = json.loads(server.get("/props"))["kv_cache"]["target"]
    body = {"prompt": prompt(9, 100), "n_predict": 40, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    said = server.post("/completion", {**body, "id_slot": 0})["content"]
    server.slot("erase", 0)
    return {"used": cache["used_bytes"], "cells": cache["cells"], "text": said}


def judge_left(first: Json, now: Json) -> None:
    if (now["used"], now["text"]) != (first["used"], first["text"]) or now["cells"] >= first["cells"] + WORTH:
        raise Unexpected(f"it began with {first}, and has {now}")


def rounds(soak: Soak, minutes: float) -> Iterator[int | None]:
    """The resident bytes after each."""
    # upstream says that it is ready, and sets up its queue without the lock: for TSan a race with a request
    time.sleep(1)
    first = left(soak.server)
    end = time.monotonic() + 60 * minutes
    for number in range(sys.maxsize):
        until = min(end, time.monotonic() + ROUND_SECONDS)
        rng = [random.Random(f"{soak.seed}.{number}.{who}") for who in range(CLIENTS + 1)]
        jobs: list[Callable[[], None]] = [partial(clients, soak, until, own) for own in rng[1:]]
        jobs.append(partial(soak.until, until, partial(operate, soak, rng[0])))
        jobs.append(partial(soak.until, until, watch))
        soak.together(jobs)
        at_rest(soak.server)
        judge_left(first, left(soak.server))
        yield soak.server.resident()
        if time.monotonic() >= end:
            return


def judge_end(server: LlamaServer) -> None:
    code = server.end(REST_SECONDS)
    said = [line for line in server.log.splitlines() if any(word in line for word in SAID_BY_A_SANITIZER)]
    if code != 0 or said:
        raise Unexpected("\n".join([f"llama-server ended with exit code {code}", *said]))


def judge_memory(resident: list[int], most: float) -> None:
    """The first round is what the allocator, and the prompt cache, fill up in."""
    grown = (resident[-1] - resident[0]) / 2**20
    if grown > most:
        raise Unexpected(f"{grown:.1f} MiB more than after the first round are resident")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--toy", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resident", type=float, metavar="MIB", help="what may be resident more than after a minute")
    parser.add_argument("--log", type=Path, help="where the server's is kept")
    parser.add_argument("--server", default="", metavar="ARGUMENTS", help="more for llama-server, in one word")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtool-soak-") as place:
        work = Path(place)
        toy = given.toy or models.cache_model(GEOMETRY, work, models.CONTEXT)
        model = models.spoken(toy, given.vocabulary, work)
        parts = ("--mmproj", str(projector(model, work)), "-md", str(model), "--slot-save-path", place)
        log, binary = given.log or work / "log", given.bin_dir.absolute() / "llama-server"
        with llama_server(binary, model, [*ARGS, *parts, *shlex.split(given.server)], log) as server:
            soak, resident, failed = Soak(server, given.seed), list[int](), ""
            try:
                for number, taken in enumerate(rounds(soak, given.minutes)):
                    resident.append(taken or 0)
                    print(f"round {number}: {soak.tally.total()} requests, {resident[-1] / 2**20:.1f} MiB", flush=True)
                judge_end(server)
                if given.resident is not None:
                    judge_memory(resident, given.resident)
            except (Unexpected, VerifyError, httpx.HTTPError) as err:
                failed = f"FAILED (seed {given.seed}): {type(err).__name__}: {err}"
                print(server.log[-4000:])
            print("\n".join(f"{count:7} {what}" for what, count in sorted(soak.tally.items())))
    if failed:
        print(failed)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
