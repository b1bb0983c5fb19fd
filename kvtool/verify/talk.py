"""Hold the same conversation with a static and a dynamic llama-server, and compare every answer.

The requests run one after the other, so a server repeats its answers exactly. The conversation has a chat of a few
turns, a slot that is saved and restored, a slot file of the static server, and a change of type in the middle.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvtool.result import CheckOutcome
from kvtool.verify.checks import Check, Finding
from kvtool.verify.projector import image_url
from kvtool.verify.server import LlamaServer, RefusedError, llama_server
from kvtool.verify.texts import FLAG, growths
from kvtool.verify.trial import LOG, Failed, failing, trial

CHAT, RESTORE, TYPES, IMAGE = "chat", "restore", "types", "image"
TITLES = {
    CHAT: "chat through llama-server",
    RESTORE: "slot saved and restored",
    TYPES: "chat while types change",
    IMAGE: "chat about an image",
}
_ARGS = "-np 1 -lv 4 --cache-ram 0 --slot-save-path"
_TASK = "Explain the following text in a few sentences."


@dataclass(frozen=True)
class Pair:
    """Hold one measurement of a static and a dynamic server."""

    name: str
    unit: str  # unit of both numbers: MiB or tokens/s
    static: float | None  # None: unknown on this system
    dynamic: float | None


@dataclass(frozen=True)
class Script:
    """Describe how much is asked."""

    turns: int
    answer: int  # tokens of each answer
    paragraph: int  # characters of text in each question
    has_image: bool = False
    must_grow: bool = True  # whether a dynamic cache that does not grow is a failure


class Step(NamedTuple):
    """Hold one answer of a server.

    kvtool verify compares each answer of the dynamic server with the same answer of the static server.
    """

    part: str  # part of the conversation, a key of TITLES
    said: str


@dataclass(frozen=True)
class Side:
    """Hold all answers of one server, its memory and its speed."""

    steps: tuple[Step, ...]
    resident: tuple[int | None, int | None]  # bytes after the start and after the chat
    committed: tuple[int | None, int | None]  # bytes that a dynamic cache had allocated at the same two times
    speed: tuple[float | None, float | None]  # tokens per second of prompts and answers
    log: str


@dataclass(frozen=True)
class Spoken:
    """Hold the findings and the measurements of a conversation."""

    findings: tuple[Finding, ...]
    memory: tuple[Pair, ...] = ()
    speed: tuple[Pair, ...] = ()


class _Talk:
    """Hold a chat with one server, and collect the answers."""

    def __init__(self, server: LlamaServer, script: Script, text: str) -> None:
        self.server, self.script, self.text = server, script, text
        self.messages: list[dict[str, Any]] = []
        self.steps: list[Step] = []
        self.timings: list[dict[str, float]] = []
        self.at = 0

    def ask(self, part: str, *, keep: bool = True) -> None:
        """Ask about the next paragraph of the text.

        keep: make the question and its answer a part of the conversation
        """
        size = self.script.paragraph
        paragraph = self.text[self.at : self.at + size]
        self.at += size
        question = {"role": "user", "content": f"{_TASK}\n\n{paragraph}"}
        said, timings = self._post([*self.messages, question])
        self.timings.append(timings)
        self.steps.append(Step(part, said))
        if keep:
            self.messages += [question, {"role": "assistant", "content": said}]

    def look(self) -> None:
        """Ask about an image, in a conversation of its own."""
        content = [{"type": "text", "text": "Describe this image."}, image_url(1)]
        self.steps.append(Step(IMAGE, self._post([{"role": "user", "content": content}])[0]))

    def _post(self, messages: Sequence[dict[str, Any]]) -> tuple[str, dict[str, float]]:
        body = {"messages": messages, "max_tokens": self.script.answer, "temperature": 0.0, "seed": 1}
        answer = self.server.post("/v1/chat/completions", {**body, "ignore_eos": True, "cache_prompt": True})
        message = answer["choices"][0]["message"]
        return f"{message.get('reasoning_content') or ''}{message.get('content') or ''}", answer.get("timings", {})

    def change_types(self, types: str) -> None:
        """Change the types of the cells, and record the server's answer or its refusal."""
        try:
            done = self.server.post("/requantize_kvcache", {"ctk": types, "ctv": types})
            said = f"{done['ctk']}/{done['ctv']}"
        except RefusedError as err:
            said = err.what
        self.steps.append(Step(TYPES, said))

    def move_slot(self, own: str, other: str) -> None:
        """Save the slot, erase it and restore it. Then restore a file of another server."""
        saved = self.server.slot("save", 0, own)
        self.server.slot("erase", 0)
        for file in (own, other):
            restored = self.server.slot("restore", 0, file)
            self.steps.append(Step(RESTORE, f"{saved['n_saved']} tokens saved, {restored['n_restored']} restored"))
            self.ask(RESTORE, keep=False)


def _committed(server: LlamaServer) -> int | None:
    """Return the bytes that the server's cache has allocated, None for a static cache."""
    cache = json.loads(server.get("/props")).get("kv_cache", {}).get("target", {})
    return int(cache["committed_bytes"]) if cache else None


def _hold(server: LlamaServer, script: Script, text: str, own: str, log: Path) -> Side:
    """Hold the conversation with a server that has just started, and return its answers and measurements."""
    chat = _Talk(server, script, text)
    resident, committed = [server.resident()], [_committed(server)]
    for _ in range(script.turns):
        chat.ask(CHAT)
    resident.append(server.resident())
    committed.append(_committed(server))
    speed = _speed(chat.timings)
    if script.has_image:
        chat.look()
    else:  # the server refuses to save a slot that may contain an image
        chat.move_slot(own, "static.bin")
    for types in ("q8_0", "f16"):
        chat.change_types(types)
        chat.ask(TYPES)
    said = log.read_text("utf-8", "replace")
    return Side(tuple(chat.steps), (resident[0], resident[1]), (committed[0], committed[1]), speed, said)


def _speed(timings: Sequence[dict[str, float]]) -> tuple[float | None, float | None]:
    """Return two speeds in tokens per second: of all prompts together, and of all answers together."""
    rates: list[float | None] = []
    for what in ("prompt", "predicted"):
        tokens = sum(each.get(f"{what}_n", 0) for each in timings)
        seconds = sum(each.get(f"{what}_ms", 0.0) for each in timings) / 1000
        rates.append(tokens / seconds if seconds else None)
    return rates[0], rates[1]


def compare(check: Check, binary: Path, work: Path, script: Script, text: Path, cache: int) -> Spoken:
    """Hold the conversation with a static server, then with a dynamic server, and compare them.

    cache: the bytes of the static cache
    """
    slots = work / "slots"
    slots.mkdir(parents=True, exist_ok=True)
    words = text.read_text("utf-8")

    def side(name: str, *more: str) -> Side:
        log = work / f"{name}.log"
        args = [*check.args, *_ARGS.split(), f"{slots}/", *more]
        with failing(f"{name}-fails"), llama_server(binary, check.model, args, log) as server:
            return _hold(server, script, words, f"{name}.bin", log)

    sides: list[Side] = []

    @trial
    def run(_check: Check) -> Finding:
        sides.extend((side("static"), side("dynamic", FLAG)))
        return Finding(check.id, "server", "", CheckOutcome.PASSED, "same")

    whole = run(check)
    for file in slots.glob("*.bin"):
        file.unlink()
    if len(sides) < 2:
        return Spoken((_titled(check, CHAT, whole),))
    static, dynamic = sides
    parts = list(dict.fromkeys(step.part for step in static.steps))
    found = [_titled(check, part, _judge(check, part, static, dynamic, script)) for part in parts]
    # the servers run once for all parts, so the first finding has the duration of everything
    findings = (replace(found[0], seconds=whole.seconds), *found[1:])
    return Spoken(findings, _memory(static, dynamic, cache), _speeds(static, dynamic))


def _titled(check: Check, part: str, found: Finding) -> Finding:
    return replace(found, id=f"{check.id}/{part}", details={**found.details, "title": TITLES[part]})


@trial
def _judge(check: Check, part: str, static: Side, dynamic: Side, script: Script) -> Finding:
    """Compare the answers of one part of the conversation."""
    pairs = [(a, b) for a, b in zip(static.steps, dynamic.steps, strict=True) if a.part == part]
    for number, (a, b) in enumerate(pairs, 1):
        if a.said != b.said:
            reason = f"step {number} of {len(pairs)}: {a.said[:60]!r} became {b.said[:60]!r}"
            raise Failed("differs", reason, {"log": dynamic.log[-LOG:]})
    letters = sum(len(a.said) for a, _ in pairs)
    if growths(static.log):
        raise Failed("differs", f"a cache grew without {FLAG}")
    grown = growths(dynamic.log)
    if script.must_grow and not grown:
        raise Failed("not-grown", "the cache of the dynamic server did not grow", {"log": dynamic.log[-LOG:]})
    if letters == 0:
        raise Failed("garbage", "the static server wrote nothing")
    reason = f"{len(pairs)} answers, {letters} characters"
    return Finding(check.id, "server", "", CheckOutcome.PASSED, "same", reason, bool(grown), details={"growths": grown})


def _memory(static: Side, dynamic: Side, cache: int) -> tuple[Pair, ...]:
    def mib(n_bytes: int | None) -> float | None:
        return None if n_bytes is None else n_bytes / 2**20

    rows = []
    for at, when in enumerate(("after the start", "after the chat")):
        rows.append(Pair(f"KV cache {when}", "MiB", mib(cache), mib(dynamic.committed[at])))
    for at, when in enumerate(("after the start", "after the chat")):
        rows.append(Pair(f"server's memory {when}", "MiB", mib(static.resident[at]), mib(dynamic.resident[at])))
    return tuple(rows)


def _speeds(static: Side, dynamic: Side) -> tuple[Pair, ...]:
    names = ("prompts of the chat", "answers of the chat")
    return tuple(Pair(name, "tokens/s", static.speed[at], dynamic.speed[at]) for at, name in enumerate(names))
