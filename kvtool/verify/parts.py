"""Check that llama-server's answers do not change while its projector and its draft model are loaded and unloaded.

One server has the projector and the draft model all the time; its answers are the reference. The other server starts
without both. It loads them, exchanges one for the other and unloads them, and its cache grows. All requests run one
after the other, so the answers must be equal to the last bit.
"""

from pathlib import Path
from typing import Any, NamedTuple

from kvtool.verify.checks import Check, Finding, passed, skipped
from kvtool.verify.projector import image_url, projector
from kvtool.verify.server import LlamaServer, llama_server
from kvtool.verify.texts import FLAG, judge_logs, prompt
from kvtool.verify.trial import Failed, failing, run_side, trial

LAZY = ("--mmproj-lazy", "--draft-lazy")
_ARGS = "-c 4096 -np 1 -t 1 -lv 4 --cache-ram 0 --chat-template chatml --spec-type draft-simple --spec-draft-n-max 4"


class _Said(NamedTuple):
    """Hold one answer. `drafted` is True if the draft model wrote a part of it."""

    text: str
    drafted: bool


@trial
def check_load_unload(check: Check, binary: Path, work: Path) -> Finding:
    """Compare a text, and an answer about an image, in every state of the projector and the draft model."""
    if LAZY[0] not in run_side(check, [binary, "--help"], dynamic=False).stdout:
        return skipped(check, "this llama-server cannot load and unload a projector")
    sight = projector(check.model, work)
    # the model is its own draft model, so all drafted tokens are accepted, and each text has some
    argv = [*_ARGS.split(), "--mmproj", str(sight), "-md", str(check.model), *check.args]
    log = work / f"{check.id.replace('/', '-')}.log"
    with failing("static-fails"), llama_server(binary, check.model, argv, log) as server:
        text, seen, static = _write(server), _look(server), server.log
    if text.text == seen.text or not text.drafted:
        raise Failed("garbage", "the image or the draft has no effect, so this proves nothing")
    with failing("dynamic-fails"), llama_server(binary, check.model, [*argv, *LAZY, FLAG], log) as server:
        _expect(_Said(text.text, drafted=False), _write(server), "with neither")
        server.post("/speculative", {"action": "load"})
        _expect(text, _write(server), "with the draft loaded")
        server.post("/mmproj", {"action": "load", "unload": "speculative"})
        _expect(seen, _look(server), "with the projector, swapped for the draft")
        _expect(_Said(text.text, drafted=False), _write(server), "with the projector, swapped for the draft")
        server.post("/speculative", {"action": "load", "unload": "mmproj"})
        _expect(text, _write(server), "with the draft, swapped for the projector")
        server.post("/mmproj", {"action": "load"})
        _expect(seen, _look(server), "with both")
        _expect(text, _write(server), "with both")
        details = judge_logs([static], server.log)
    return passed(check, "7 answers equal", grown=True, details=details)


def _ask(server: LlamaServer, content: Any) -> _Said:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 48, "temperature": 0.0}
    answer = server.post("/v1/chat/completions", {**body, "ignore_eos": True, "cache_prompt": False})
    return _Said(str(answer["choices"][0]["message"]["content"]), "draft_n" in answer.get("timings", {}))


def _write(server: LlamaServer) -> _Said:
    return _ask(server, prompt(1, 400))


def _look(server: LlamaServer) -> _Said:
    said = _ask(server, [{"type": "text", "text": prompt(1, 20)}, image_url(1)])
    # the server decides whether it drafts after an image, so do not compare that
    return _Said(said.text, drafted=False)


def _expect(expected: _Said, said: _Said, when: str) -> None:
    if said.text != expected.text:
        raise Failed("differs", f"{when}: {expected.text[:60]!r} became {said.text[:60]!r}")
    if said.drafted != expected.drafted:
        raise Failed("differs", f"{when}: {'drafted' if said.drafted else 'not drafted'}")
