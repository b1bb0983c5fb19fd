"""Send random requests to a llama-server, and check that no work and no memory is left afterwards.

Usage: python ci/soak.py BIN_DIR VOCABULARY

BIN_DIR has a llama-server with the patches. A build with a sanitizer is best (`kvtool build --preset tsan`). VOCABULARY
is a vocabulary file of upstream's tree. The model has random weights. With --toy FILE, it has the same kind of cache as
the model in FILE.

Clients send texts with equal beginnings, images, and requests for no token at all. At its end, each client disconnects
in the middle of a stream, and another client starts. At the same time, slots are erased, saved and restored, the cells
change their types, and the projector and the draft model are loaded and unloaded. Another thread reads the state all
the time. The random seed determines the requests, but not the order in which they arrive.

The test passes if every request was answered correctly, or was refused for a known reason. After each round, no slot
may be working, and the bytes of the slots must add up to the used bytes. The erased cache must be as small as at the
start, and a text must be equal to the text at the start. In the end, the server must end after SIGTERM, and a sanitizer
must have reported nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
from soak_requests import SLOTS, Json, Soak, Unexpected, clients, operate, watch

from kvtool.errors import VerifyError
from kvtool.verify import models
from kvtool.verify.projector import projector
from kvtool.verify.server import LlamaServer, llama_server
from kvtool.verify.texts import prompt

CLIENTS, CELLS = 6, 1024
WORTH = 512  # cells; a cache does not free a smaller number
ROUND_SECONDS, REST_SECONDS = 60, 120
GEOMETRY = models.Geometry("soak", layers=4, kv_heads=2, head_size=64)
ARGS = (
    *("-c", f"{CELLS}", "-np", f"{SLOTS}", "-t", "1", "--kv-unified", "--kv-dynamic", "--kv-share-prefix", "--metrics"),
    *("--cache-ram", "8", "--no-warmup", "--chat-template", "chatml"),
    *("--spec-type", "draft-simple", "--spec-draft-n-max", "4"),
)
SAID_BY_A_SANITIZER = ("WARNING: ThreadSanitizer", "ERROR: AddressSanitizer", "ERROR: LeakSanitizer", "runtime error:")


def all_slots(server: LlamaServer) -> list[Json]:
    found: list[Json] = json.loads(server.get("/slots"))
    return found


def at_rest(server: LlamaServer) -> None:
    """Wait until no slot is working, and check that every used cell belongs to a slot.

    For each cache (of the target and of the draft model), the bytes of all slots must add up to the used bytes of the
    cache. Otherwise, a request has ended without freeing its cells.
    """
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
    """Return what the caches contain after all clients have finished: their sizes, and the text of one more request."""
    for part in ("mmproj", "speculative"):
        server.post(f"/{part}", {"action": "unload"})
    server.post("/requantize_kvcache", {"ctk": "f16", "ctv": "f16"})
    for slot in range(SLOTS):
        server.slot("erase", slot)
    cache = json.loads(server.get("/props"))["kv_cache"]["target"]
    body = {"prompt": prompt(9, 100), "n_predict": 40, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    said = server.post("/completion", {**body, "id_slot": 0})["content"]
    server.slot("erase", 0)
    return {"used": cache["used_bytes"], "cells": cache["cells"], "text": said}


def judge_left(first: Json, now: Json) -> None:
    if (now["used"], now["text"]) != (first["used"], first["text"]) or now["cells"] >= first["cells"] + WORTH:
        raise Unexpected(f"it began with {first}, and has {now}")


def rounds(soak: Soak, minutes: float) -> Iterator[int | None]:
    """Run the rounds, and yield the resident bytes after each round."""
    # Upstream reports that it is ready before it sets up its queue, and uses no lock for it. So TSan would report a
    # race with a request that arrives too early.
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
    """End the server and check its exit code and its log. A sanitizer reports leaks only when the process ends."""
    server.process.terminate()
    try:
        code = server.process.wait(REST_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unexpected(f"llama-server does not end within {REST_SECONDS} s") from None
    said = [line for line in server.log.splitlines() if any(word in line for word in SAID_BY_A_SANITIZER)]
    if code != 0 or said:
        raise Unexpected("\n".join([f"llama-server ended with exit code {code}", *said]))


def judge_memory(resident: list[int], most: float) -> None:
    """Compare the resident memory after the rounds.

    The first round does not count, because the allocator and the prompt cache grow in it.
    """
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
    parser.add_argument(
        "--resident", type=float, metavar="MIB", help="allowed growth of the resident memory after the first round"
    )
    parser.add_argument("--log", type=Path, help="file for the log of the server")
    parser.add_argument(
        "--server", default="", metavar="ARGUMENTS", help="more arguments for llama-server, as one word"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtool-soak-") as place:
        work = Path(place)
        toy = given.toy or models.cache_model(GEOMETRY, work, models.CONTEXT)
        model = models.text_model(toy, given.vocabulary, work)
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
