"""Damage the files of --cache-disk while a llama-server uses them, and kill servers while they write files.

Usage: python ci/disk_stress.py BIN_DIR VOCABULARY

BIN_DIR has a llama-server with the patches; VOCABULARY is a vocabulary file of upstream's tree. The models have random
weights. The seed decides the damage and the times of the kills.

First part: one server keeps running. For each damaged file, the script puts the file into the directory, sends the
request that would continue from it, and erases the slot. Some files change after the server has read their heads. Some
intact files in between prove that the server reads them.

Second part: a server with little RAM writes a file for almost every request. It is killed (SIGKILL) as soon as a file
is being written, or after a random time. The next server starts with the same directory.

The script fails if a server ends by itself, a request fails, or a text differs from the text of a server without a
cache. It also fails if a server continues from a damaged file, or does not continue from an intact file. A server must
also find each file that was complete at the time of the kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from kvtool.errors import VerifyError
from kvtool.verify import models
from kvtool.verify.server import LlamaServer, RefusedError, llama_server
from kvtool.verify.texts import prompt

SUFFIX = ".conversation"
SMALL = models.Geometry("stress", layers=2, kv_heads=1, head_size=64)
# 16 KiB for each token, so that writing a file needs time
LARGE = models.Geometry("stress-large", layers=4, kv_heads=8, head_size=128)
CHATS, WORDS, PREDICT = 12, 150, 8
RAM, DISK = 4, 16  # MiB: RAM for one chat of the large model, and files of six
ARGS = ("-c", "1024", "-np", "1", "-t", "1", "--no-warmup", "--kv-dynamic", "--fit", "off")
# percent of the files
KINDS = {
    "bits": 30,
    "cut": 15,
    "longer": 5,
    "garbage": 5,
    "sizes": 10,
    "late": 10,
    "model": 10,
    "types": 10,
    "streams": 5,
}
FOREIGN = ("model", "types", "streams")
INTACT = 25  # one of so many files is intact
WARNING = "ignoring the conversation"


class Wrong(Exception):
    """Report a result that must never occur."""


class Place:
    """Hold the models of a run, and start servers.

    small, other: models of the same shape with other weights; large: a model whose files are large
    """

    def __init__(self, binary: Path, vocabulary: Path, work: Path) -> None:
        self.binary, self.work = binary, work

        def write(geometry: models.Geometry, directory: Path, seed: int = 1) -> Path:
            toy = models.cache_model(geometry, directory, models.CONTEXT)
            return models.text_model(toy, vocabulary, directory, seed)

        self.small, self.large = write(SMALL, work), write(LARGE, work)
        self.other = write(SMALL, work / "other", 2)

    @contextlib.contextmanager
    def serve(self, model: Path, *args: str | Path) -> Iterator[LlamaServer]:
        with llama_server(self.binary, model, (*ARGS, *map(str, args)), self.work / "log") as server:
            yield server

    def written(self, name: str, model: Path, *args: str) -> list[Path]:
        """Write a file for each chat, and return the paths of the files.

        For each chat, a new server with these arguments writes a file to its `--cache-disk`.
        """
        disk = self.work / name
        files = []
        for chat in range(CHATS):
            before = set(disk.glob(f"*{SUFFIX}"))
            with self.serve(model, "--cache-disk", disk, *args) as server:
                ask(server, chat)
            files += sorted(set(disk.glob(f"*{SUFFIX}")) - before)
        if len(files) != CHATS:
            raise Wrong(f"{CHATS} servers wrote {len(files)} files")
        return files

    def expected(self, model: Path) -> list[str]:
        """Return the text of each chat, from a server that stores nothing."""
        with self.serve(model, "--cache-ram", "0") as server:
            return [str(ask(server, chat, cache_prompt=False)["content"]) for chat in range(CHATS)]


def ask(server: LlamaServer, chat: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt(chat, WORDS), "n_predict": PREDICT, "temperature": 0.0, "ignore_eos": True}
    return server.post("/completion", {**body, **more})


def is_continued(answer: dict[str, Any]) -> bool:
    """Return whether the server computed only the last token of the prompt."""
    return bool(answer["timings"]["prompt_n"] == 1)


#
# damaged files
#


def damage(data: bytes, kind: str, rng: random.Random, begin: int = 0) -> bytes:
    """Return the file with one kind of damage after its first `begin` bytes. The result differs from `data`."""
    changed = bytearray(data)
    if kind == "bits":
        for _ in range(rng.choice((1, 1, 1, 8))):
            # half of the changes are in the head
            at = rng.randrange(begin, len(data) if rng.random() < 0.5 else min(len(data), begin + 2048))
            changed[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del changed[rng.randrange(len(data)) :]
    elif kind == "longer":
        changed += rng.randbytes(rng.randrange(1, 4096))
    elif kind == "garbage":
        changed = bytearray(rng.randbytes(rng.randrange(0, 65536)))
    elif kind == "sizes":  # numbers of parts, bytes of the head, and bytes of a part
        at = rng.choice((12, 24, 48, 56))
        struct.pack_into("<I" if at == 12 else "<Q", changed, at, rng.choice((2, 3, 2**16, 2**31, 2**32 - 1)))
    return bytes(changed) if changed != data else damage(data, "bits", rng, begin)


def size_of_head(data: bytes) -> int:
    """Return the number of bytes before the state in an intact file (server-conversation-files.cpp)."""
    n_parts, n_head = struct.unpack_from("<12xI8xQ", data)
    return int(48 + 8 * n_parts + n_head)


def put(path: Path, data: bytes) -> None:
    """Write a file under another name, and rename it."""
    (path.parent / "new").write_bytes(data)
    (path.parent / "new").rename(path)


def stop(server: LlamaServer) -> None:
    server.process.terminate()
    if server.process.wait(30) != 0:
        raise Wrong(f"the server ended with exit code {server.process.poll()}")


def run_files(place: Place, count: int, seed: int) -> dict[str, Any]:
    """Offer `count` damaged files to a running server."""
    rng = random.Random(seed)
    expected = place.expected(place.small)
    intact = {
        "": place.written("intact", place.small),
        "model": place.written("model", place.other),
        "types": place.written("types", place.small, "-ctk", "q4_0", "-ctv", "q8_0"),
        "streams": place.written("streams", place.small, "-np", "2", "--no-kv-unified"),
    }
    key, key_of_types = (intact[kind][0].name.split("-")[0] for kind in ("", "types"))
    if key != key_of_types:
        raise Wrong("a server would not read the head of a file with other types")
    disk = place.work / "disk"
    disk.mkdir()
    offered, warned = Counter[str](), 0
    with place.serve(place.small, "--cache-disk", disk, "--slot-save-path", place.work) as server:
        for number in range(count + count // INTACT):
            chat = rng.randrange(CHATS)
            kind = "" if number % (INTACT + 1) == INTACT else rng.choices([*KINDS], [*KINDS.values()])[0]
            source = intact[kind if kind in intact else ""][chat]
            data = source.read_bytes()
            # half of the foreign files have their own names, which begin with the key of the other server
            own = kind in ("model", "streams") and rng.random() < 0.5
            path = disk / (source.name if own else f"{key}-{number:016x}{SUFFIX}")
            if kind == "late":
                put(path, data)
                ask(server, (chat + 1) % CHATS)  # the server reads the head of the file
                server.slot("erase", 0)
                with path.open("r+b") as file:  # then the same file changes
                    file.truncate()
                    file.write(damage(data, rng.choice(("bits", "bits", "cut", "longer")), rng, size_of_head(data)))
            else:
                put(path, data if kind in ("", *FOREIGN) else damage(data, kind, rng))
            answer = ask(server, chat)
            if answer["content"] != expected[chat]:
                raise Wrong(f"file {number} ({kind}): {answer['content']!r} instead of {expected[chat]!r}")
            if is_continued(answer) != (kind == ""):
                n = answer["timings"]["prompt_n"]
                raise Wrong(f"file {number} ({kind or 'intact'}): the server computed {n} tokens of the prompt")
            offered[kind or "intact"] += 1
            warned += kind not in ("", "types") and not own
            server.slot("erase", 0)
            path.unlink(missing_ok=True)
        stop(server)
    if (warnings := server.log.count(WARNING)) != warned:
        raise Wrong(f"{warnings} warnings about {warned} files")
    return {"offered": dict(offered), "warnings": warnings}


#
# kills
#


class Killer(threading.Thread):
    """Kill a server when it begins a file after some time, or at the latest a second later.

    killed: is set before the signal is sent
    """

    def __init__(self, server: LlamaServer, disk: Path, seconds: float) -> None:
        super().__init__(daemon=True)
        self.server, self.disk, self.seconds = server, disk, seconds
        self.killed = threading.Event()

    def run(self) -> None:
        time.sleep(self.seconds)
        end, before = time.monotonic() + 1, set(self.disk.iterdir())
        while time.monotonic() < end and set(self.disk.iterdir()) <= before:
            pass
        self.killed.set()
        self.server.process.send_signal(signal.SIGKILL)


def disk_entries(server: LlamaServer) -> int:
    """Return the number of files that the server can use. All files in the directory are of its model."""
    found = re.findall(r"conversations on disk: (\d+) of this model", server.log)
    return int(found[0])


def run_kills(place: Place, n: int, seed: int) -> dict[str, Any]:
    """Kill n servers, each of which uses the files of the servers before it."""
    rng = random.Random(seed)
    expected = place.expected(place.large)
    disk = place.work / "killed"
    disk.mkdir()
    args = ("--cache-ram", str(RAM), "--cache-disk", disk, "--cache-disk-limit", str(DISK), "-lv", "4")
    found = Counter[str]()
    for number in range(n + 1):
        complete = len([*disk.glob(f"*{SUFFIX}")])
        with place.serve(place.large, *args) as server:
            if [*disk.glob(f"*{SUFFIX}-tmp")]:
                raise Wrong(f"server {number} left the unfinished file of the server before it")
            if disk_entries(server) != complete:
                raise Wrong(f"server {number} found {disk_entries(server)} of {complete} files")
            found["files found after a kill"] += complete
            killer = Killer(server, disk, rng.random() * 0.5)
            if number < n:
                killer.start()
            try:
                for turn in range(10_000 if number < n else 2 * CHATS):
                    chat = rng.randrange(CHATS) if number < n else turn % CHATS
                    answer = ask(server, chat)
                    if answer["content"] != expected[chat]:
                        raise Wrong(f"server {number}, chat {chat}: {answer['content']!r}, not {expected[chat]!r}")
                    found["answers"] += 1
                    found["first requests continued from a file"] += turn == 0 and is_continued(answer)
                    if sum(path.stat().st_size for path in disk.glob(f"*{SUFFIX}*")) > DISK * 2**20:
                        raise Wrong(f"server {number} exceeded --cache-disk-limit")
            except (VerifyError, httpx.HTTPError) as err:
                # the kill interrupted this request
                if not killer.killed.is_set() or isinstance(err, RefusedError):
                    raise
            if number < n:
                killer.join()
                if (code := server.process.wait(30)) != -signal.SIGKILL:
                    raise Wrong(f"server {number} ended with exit code {code}")
                found["kills"] += 1
                found["kills during a write"] += any(disk.glob(f"*{SUFFIX}-tmp"))
            else:
                stop(server)
            if WARNING in server.log:
                raise Wrong(f"server {number} found a damaged file")
    if n >= 20 and not (found["kills during a write"] and found["first requests continued from a file"]):
        raise Wrong(f"the kills proved nothing: {dict(found)}")
    return dict(found)


def main() -> int:
    """Run both parts, and print their numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--files", type=int, default=500, help="number of damaged files, 0 to skip this part")
    parser.add_argument("--kills", type=int, default=200, help="number of killed servers, 0 to skip this part")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    begin = time.monotonic()
    result: dict[str, Any] = {"seed": given.seed}
    with tempfile.TemporaryDirectory(prefix="kvtool-disk-") as place:
        at = Place(given.bin_dir.absolute() / "llama-server", given.vocabulary.absolute(), Path(place))
        try:
            if given.files:
                result["files"] = run_files(at, given.files, given.seed)
            if given.kills:
                result["kills"] = run_kills(at, given.kills, given.seed)
        except (Wrong, VerifyError) as err:
            result["failed"] = str(err)
            print((at.work / "log").read_text("utf-8", "replace")[-4000:])
    result["seconds"] = round(time.monotonic() - begin)
    print(json.dumps(result, indent=1))
    return "failed" in result


if __name__ == "__main__":
    raise SystemExit(main())
