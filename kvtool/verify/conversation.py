"""Compare the answers of llama-server with and without --kv-dynamic to the same script of requests.

It proves more than kv-check: the server survives growths in the middle of a conversation while other slots wait, and
keeps its slot files, prompt caches and context shifts.

One request at a time (exact), the static server repeats itself to the bit. With concurrent requests, their arrival
decides how many tokens one matrix product has, and the sums round differently. In f16, this shows in the third digit
of a logprob, because sharp attention passes on a single rounding. With BATCHED's settings, the difference is at most
1e-5 (measured over 120 starts). So concurrent requests use those settings, the static server runs at least twice, and
a dynamic answer must equal the answer of some static run. An answer that static runs do not repeat is reported as
unstable, not as equal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtool.verify.checks import Check, Finding, passed
from kvtool.verify.server import Answer, LlamaServer, Request, llama_server, together
from kvtool.verify.texts import FLAG, judge_logs, prompt
from kvtool.verify.trial import Failed, failing, trial

BATCHED = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
STATIC_RUNS = 6  # at most, while a batched dynamic answer is still unmatched


class Exchange(NamedTuple):
    """Hold one line of a transcript: a request and its answer. Two runs are equal if their steps are."""

    name: str
    said: Answer | tuple[int, ...]

    def __str__(self) -> str:
        said = repr(self.said.content[:60]) if isinstance(self.said, Answer) else " ".join(map(str, self.said))
        return f"{self.name} {said}"


class Script(NamedTuple):
    """How much is asked. rounds of one request per slot; generate: tokens each; shift: tokens beyond the slot's end."""

    rounds: int
    generate: int
    shift: bool


QUICK_SCRIPT = Script(rounds=2, generate=96, shift=False)
FULL_SCRIPT = Script(rounds=4, generate=128, shift=True)
SLOTS = 4
CELLS = 8192  # over all slots: 2048 each, eight times the start


def converse(server: LlamaServer, script: Script, own: str, other: str, at_once: bool) -> list[Exchange]:
    """Run the script; at_once: a round's requests together, or one after the other.

    own, other: slot files to write and to read; the other one was written by another server.
    """
    steps: list[Exchange] = []

    def ask(name: str, *requests: Request) -> None:
        answers = together(server.complete, requests) if at_once else tuple(server.complete(r) for r in requests)
        steps.extend(Exchange(f"{name}, slot {r.slot}", a) for r, a in zip(requests, answers, strict=True))

    def texts(offset: int, suffix: str = "") -> list[str]:
        return [prompt(10 * offset + slot, 300 + 150 * slot) + suffix for slot in range(SLOTS)]

    for number in range(script.rounds):
        every = [Request(text, script.generate, slot) for slot, text in enumerate(texts(number))]
        ask(f"round {number + 1}", *every)
    last = script.rounds - 1
    again = [Request(text, 32, slot) for slot, text in enumerate(texts(last, " and then"))]
    ask("same beginning again", *again)
    saved = server.slot("save", 2, own)
    server.slot("erase", 2)
    restored = server.slot("restore", 2, own)
    steps.append(Exchange("slot saved and restored", (int(saved["n_saved"]), int(restored["n_restored"]))))
    continued = texts(last, " and then they went")[2]
    ask("after its own slot file", Request(continued, 32, 2))
    restored = server.slot("restore", 3, other)
    steps.append(Exchange("slot file of the other kind", (int(restored["n_restored"]),)))
    ask("after the other kind's slot file", Request(continued, 32, 3))
    if script.shift:
        ask("beyond the end of the slot", Request(prompt(77, 300), CELLS // SLOTS + 200, 1))
    return steps


class _Run(NamedTuple):
    steps: tuple[Exchange, ...]
    log: str


@trial
def serve(check: Check, binary: Path, work: Path, script: Script) -> Finding:
    """Run the script on a static server, a dynamic server, and again on static servers as the control."""
    slots = work / "slots"
    slots.mkdir(parents=True, exist_ok=True)
    base = [*f"-c {CELLS} -np {SLOTS} -t 1 -lv 4 --context-shift --slot-save-path".split(), f"{slots}/"]

    def run(name: str, other: str, *more: str) -> _Run:
        log = work / f"{check.id.replace('/', '-')}-{name}.log"
        with llama_server(binary, check.model, [*base, *check.args, *more], log) as server:
            steps = converse(server, script, f"{name}.bin", f"{other}.bin", at_once=not check.exact)
        return _Run(tuple(steps), log.read_text("utf-8", "replace"))

    with failing("static-fails"):
        statics = [run("static-1", "static-1")]
    with failing("dynamic-fails"):
        dynamic = run("dynamic", "static-1", FLAG)
    with failing("unstable", "the control run failed: "):
        # The control reads the dynamic server's slot file, which the static one must understand as its own.
        statics.append(run("static-2", "dynamic"))
        while not check.exact and _unmatched(dynamic, statics) and len(statics) < STATIC_RUNS:
            statics.append(run(f"static-{len(statics) + 1}", "static-1"))
    return _judge(check, statics, dynamic)


def _unmatched(dynamic: _Run, statics: Sequence[_Run]) -> list[int]:
    """Return the indices of the dynamic steps that no static run has."""
    return [i for i, step in enumerate(dynamic.steps) if step not in [s.steps[i] for s in statics]]


def _judge(check: Check, statics: Sequence[_Run], dynamic: _Run) -> Finding:
    answers = sum(isinstance(step.said, Answer) for step in dynamic.steps)
    unstable = [i for i in range(len(dynamic.steps)) if len({s.steps[i] for s in statics}) > 1]
    counts = {"answers": answers, "static_runs": len(statics), "not_repeated_by_static": len(unstable)}
    details = judge_logs([s.log for s in statics], dynamic.log, **counts)
    if missing := _unmatched(dynamic, statics):
        at = missing[0]
        reason = f"{len(missing)} of {answers} answers differ; {statics[0].steps[at]} became {dynamic.steps[at]}"
        if set(missing) <= set(unstable):
            why = "the static server does not repeat itself here, so this proves nothing"
            raise Failed("unstable", f"{why}: {reason}", details)
        raise Failed("differs", reason, details)
    if check.exact and unstable:
        first = statics[0].steps[unstable[0]], statics[1].steps[unstable[0]]
        status = "differs" if "other kind" in first[0].name else "unstable"
        reason = f"the second static server answered differently: {first[0]} became {first[1]}"
        raise Failed(status, reason, details)
    reason = f"{answers} answers equal" + (f", static repeats {answers - len(unstable)}" if unstable else "")
    return passed(check, reason, grown=True, details=details)
