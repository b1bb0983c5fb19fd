"""Draw docs/results/bench/day.svg: hit rate and memory of a llama-server during a day of chats.

Usage: python ci/day_picture.py [BIN_DIR MODEL]

BIN_DIR has a llama-server of ours; MODEL is a trained model, such as the file of `kvtool fetch --model smollm2`. With
them, the script plays the day, which takes some minutes, and writes day.json. Without them, it draws the recorded day.
It needs kvtool[bench].

The seed decides the day: its chats, their bursts of requests, and the length of each message. Four clients send the
requests of an hour, and a chat waits for its answer before it continues. The hour ends when all its requests are
answered, but not before three seconds. So the speed of the machine does not change the result much.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictures import record_and_draw
from turns import take_turn

from kvtool.bench import plots
from kvtool.verify.server import LlamaServer, llama_server
from kvtool.verify.texts import prompt

MIB = 2**20
CHATS, CLIENTS, HOUR_SECONDS, SEED = 40, 4, 3.0, 47
BUDGET, DISK = 96, 1024
PREDICT = 8
ARGS = (
    *("-c", "4096", "-np", "4", "--kv-unified", "-t", "1", "--fit", "off", "--metrics", "--no-warmup"),
    *("--kv-budget", str(BUDGET), "--cache-ram", "budget", "--cache-disk-limit", str(DISK), "--kv-idle-release", "2"),
)
# requests per hour of the day, relative to each other: morning, lunch, afternoon and evening
LOAD = (0, 0, 0, 0, 0, 1, 2, 4, 8, 10, 9, 7, 4, 6, 9, 9, 7, 4, 3, 4, 5, 4, 2, 1)


@dataclass(frozen=True)
class Message:
    """Describe one message of a chat.

    hour: the time of the day
    words: the length of the text
    """

    hour: float
    chat: int
    words: int


def plan_day(seed: int = SEED) -> list[Message]:
    """Return the messages of the day in their order. A burst is one chat with several messages within minutes."""
    rng = random.Random(seed)
    messages = []
    for hour, load in enumerate(LOAD):
        for _ in range(load):
            chat, start = rng.randrange(CHATS), hour + rng.random()
            for turn in range(rng.choice((1, 2, 2, 3))):
                messages.append(Message(min(start + 0.15 * turn, 23.99), chat, rng.randrange(20, 60)))
    return sorted(messages, key=lambda message: message.hour)


def read_metrics(server: LlamaServer) -> dict[str, float]:
    """Return the metrics of the server that have no labels."""
    lines = (line.split() for line in server.get("/metrics").splitlines() if not line.startswith("#"))
    return {name.removeprefix("llamacpp:"): float(value) for name, value in lines if "{" not in name}


class Day:
    """Play the messages, and collect what the server reports.

    answers: for each message its hour, and three numbers of tokens: the prompt, its part that was not computed, and its
    part that an earlier request of the chat contained
    samples: for each sample its hour, and the bytes of cells, conversations and files
    """

    def __init__(self, server: LlamaServer) -> None:
        self.server = server
        self.chats: list[list[int]] = [[] for _ in range(CHATS)]
        self.locks = [threading.Lock() for _ in range(CHATS)]
        self.answers: list[tuple[float, int, int, int]] = []
        self.samples: list[tuple[float, int, int, int]] = []

    def send(self, message: Message) -> None:
        """Send one message of a chat, after the answer to the message before."""
        with self.locks[message.chat]:
            chat = self.chats[message.chat]
            text = f" {prompt(len(chat) * CHATS + message.chat, message.words)}"
            self.answers.append((round(message.hour, 3), *take_turn(self.server, chat, text, PREDICT)))

    def sample(self, hour: float) -> None:
        said = read_metrics(self.server)
        stored = int(said["kv_budget_conversation_bytes"])
        cells = int(said["kv_budget_committed_bytes"]) - stored
        self.samples.append((round(hour, 3), cells, stored, int(said["conversation_disk_bytes"])))

    def play(self, messages: Sequence[Message]) -> None:
        """Send the messages of each hour, and sample meanwhile."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for hour in range(24):
                begin = time.monotonic()
                sent = [pool.submit(self.send, message) for message in messages if int(message.hour) == hour]
                share = 0.0
                while share < 1:
                    self.sample(hour + share)
                    time.sleep(0.2)
                    answered = sum(request.done() for request in sent) / len(sent) if sent else 1
                    share = min(answered, (time.monotonic() - begin) / HOUR_SECONDS)
                for request in sent:
                    request.result()
        self.sample(24)


def measure(binary: Path, model: Path) -> dict[str, Any]:
    """Return the answers and the samples of the day."""
    work = Path(tempfile.mkdtemp(prefix="kvtool-day-"))
    try:
        with llama_server(binary, model, (*ARGS, "--cache-disk", str(work / "disk")), work / "log") as server:
            day = Day(server)
            day.play(plan_day())
            last = read_metrics(server)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    names = ("hits", "misses", "disk_hits", "saved_tokens")
    totals = {name: int(last[f"conversation_{name}_total"]) for name in names}
    return {"answers": sorted(day.answers), "samples": day.samples, "totals": totals}


def draw(data: dict[str, Any]) -> bytes:
    """Return the picture of a day as SVG."""
    answers, samples = data["answers"], data["samples"]
    with plots.picture("day", 2, rows=2, size=(8.0, 7.0)) as (files, (rate, memory)):
        hours = [hour for hour in range(24) if any(int(answer[0]) == hour for answer in answers)]
        by_hour = [[answer for answer in answers if int(answer[0]) == hour] for hour in hours]
        middle = [hour + 0.5 for hour in hours]
        # the lines are often equal, so the line below is wider
        for index, label, colour, width in ((3, "possible", plots.GREY, 7), (2, "reached", plots.BLUE, 2)):
            shares = [100 * sum(answer[index] for answer in one) / sum(answer[1] for answer in one) for one in by_hour]
            rate.plot(middle, shares, color=colour, linewidth=width, label=label)
        rate.bar(middle, [len(one) for one in by_hour], width=0.8, color=plots.GRID)
        rate.set(title="Prompt tokens that were not computed, %, and requests per hour (bars)", ylim=(0, 100))
        x = [sample[0] for sample in samples]
        series = [[sample[index] / MIB for sample in samples] for index in (1, 2, 3)]
        memory.plot([0, 24], [BUDGET] * 2, color=plots.INK, linestyle="--", linewidth=1)
        memory.annotate(f"--kv-budget {BUDGET}", (0, BUDGET), (4, 4), textcoords="offset points", color=plots.INK)
        both = [cells + stored for cells, stored in zip(series[0], series[1], strict=True)]
        memory.plot(x, both, color=plots.BLUE, label="cells and\nconversations")
        memory.plot(x, series[0], color=plots.GREEN, label="cells")
        memory.plot(x, series[2], color=plots.ORANGE, label="files on disk")
        memory.set(title="Memory and disk, MiB", xlabel="hour of the day", ylim=(0, None))
        for axis in (rate, memory):
            axis.set(xlim=(0, 24), xticks=range(0, 25, 4))
    return files["day.svg"]


def record(bin_dir: Path, model: Path) -> str:
    """Play the day, and return the text of day.json: a line for each answer and sample."""
    data = measure(bin_dir / "llama-server", model)
    parts = [",\n".join(f"  {json.dumps(row)}" for row in data[name]) for name in ("answers", "samples")]
    text = '{{"totals": {},\n "answers": [\n{}\n ],\n "samples": [\n{}\n ]}}\n'
    return text.format(json.dumps(data["totals"]), *parts)


if __name__ == "__main__":
    record_and_draw("day", __doc__, record, draw)
