"""Compare the answers of llama-server with and without --kv-dynamic to the same script of requests.

This proves more than kv-check. The server must survive growths in the middle of a conversation while other slots wait.
Its slot files, prompt caches and context shifts must still work.

If one request runs at a time ("exact"), a static server repeats its answers exactly. If requests run together, the
time of their arrival determines how many tokens are in one matrix product, and so how its sums are rounded. With f16,
this changes the third digit of a log-probability, because sharp attention can amplify a single rounding error. With the
settings of BATCHED, the difference is at most 1e-5 (measured over 120 starts). So requests that run together use these
settings, and the static server runs at least twice. A dynamic answer must equal the answer of at least one static run.
If the static runs do not repeat an answer, it is reported as unstable, not as equal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtool.verify.checks import Check, Finding, passed
from kvtool.verify.server import Answer, LlamaServer, Request, llama_server, together
from kvtool.verify.texts import FLAG, judge_logs, prompt
from kvtool.verify.trial import Failed, failing, trial

BATCHED = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
STATIC_RUNS = 6  # most runs of the static server while a batched answer of the dynamic server has no equal


class Exchange(NamedTuple):
    """Hold a request and its answer as one line of a transcript. Two runs are equal if all their lines are equal."""

    name: str
    said: Answer | tuple[int, ...]

    def __str__(self) -> str:
        said = repr(self.said.content[:60]) if isinstance(self.said, Answer) else " ".join(map(str, self.said))
        return f"{self.name} {said}"


class Script(NamedTuple):
    """Describe the length of the conversations that a check has with llama-server.

    rounds: the number of rounds, each with one request for each slot
    generate: the number of tokens of each answer
    shift: whether the conversation continues beyond the end of a slot, which needs a context shift
    """

    rounds: int
    generate: int
    shift: bool


QUICK_SCRIPT = Script(rounds=2, generate=96, shift=False)
FULL_SCRIPT = Script(rounds=4, generate=128, shift=True)
SLOTS = 4
CELLS = 8192  # cells of all slots together: 2048 for each slot, which is eight times the size at the start


def converse(server: LlamaServer, script: Script, own: str, other: str, at_once: bool) -> list[Exchange]:
    """Run the script, and return each request with its answer.

    own: the slot file that this server writes and reads
    other: a slot file that another server wrote, and that this server reads
    at_once: whether the requests of a round run together or one after the other
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
    """Run the script on a static server, on a dynamic server, and again on static servers for comparison."""
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
        # The second static server reads the slot file of the dynamic server. Its answers must be the same as after the
        # slot file of a static server.
        statics.append(run("static-2", "dynamic"))
        while not check.exact and _unmatched(dynamic, statics) and len(statics) < STATIC_RUNS:
            statics.append(run(f"static-{len(statics) + 1}", "static-1"))
    return _judge(check, statics, dynamic)


def _unmatched(dynamic: _Run, statics: Sequence[_Run]) -> list[int]:
    """Return the indices of the dynamic server's answers that differ from the answers of every static run."""
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
