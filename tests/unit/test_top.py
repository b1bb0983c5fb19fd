"""`kvtool top` against a server made of answers: every kind of server, and what is made of what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from kvtool import cli, console
from kvtool.commands import top
from kvtool.errors import NetworkError
from kvtool.result import plain
from kvtool.top import server as asking
from kvtool.top.draw import draw
from kvtool.top.reading import Memory, Phase, Reading, Slot, State
from kvtool.top.view import Speed, View, changes, size

MIB = 2**20
TARGET = {
    "reserved_bytes": 512 * MIB,
    "committed_bytes": 16 * MIB,
    "used_bytes": 12 * MIB,
    "cells_max": 8192,
    "cells": 256,
    "cells_used": 192,
    "grow_total": 3,
    "shrink_total": 1,
    "copied_bytes_total": 0,
    "grow_seconds_total": 0.25,
}
NO_TYPES = {"type_k": "", "type_v": "", "retype_total": 0, "retype_seconds_total": 0.0}  # of an older server
NOTHING = dict.fromkeys(TARGET, 0) | {"grow_total": 3, "shrink_total": 1, "grow_seconds_total": 0.25}
PROPS = {
    "model_alias": "toy",
    "build_info": "b1-abc",
    "endpoint_slots": True,
    "endpoint_metrics": False,
    "is_sleeping": False,
    "kv_cache": {"target": TARGET},
}
IDLE = {"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": False}
BUSY = {
    "id": 1,
    "n_ctx": 4096,
    "is_processing": True,
    "id_task": 7,
    "n_prompt_tokens": 192,
    "n_prompt_tokens_processed": 100,
    "n_prompt_tokens_cache": 50,
    "next_token": [{"has_next_token": True, "n_decoded": 42}],
}
LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
DENIED = (401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})


class Fake(ThreadingHTTPServer):
    """A web server whose answers are set: a status and JSON, or a text, by path. key: what it wants, if any."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, Any]] = {}
        self.key = ""
        self.asked: list[str] = []
        self.say()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def say(self, slots: Any = (IDLE, BUSY), **props: Any) -> None:
        self.answers = {"/props": (200, {**PROPS, **props}), "/slots": (200, slots)}


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        key = (self.headers["Authorization"] or "").encode("latin-1")
        allowed = key == f"Bearer {self.server.key}".encode() or not self.server.key
        status, said = self.server.answers.get(self.path, (404, {})) if allowed else DENIED
        body = (said if isinstance(said, str) else json.dumps(said)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.delenv("LLAMA_API_KEY", raising=False)
    with Fake() as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def texts(lines: Sequence[console.Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def memory(context: str = "target", **other: Any) -> Memory:
    return Memory(context, **{**TARGET, **other}, more={})


def slot(id: int, phase: Phase = Phase.IDLE, **other: Any) -> Slot:
    usual = {"n_ctx": 4096, "cells": 0, "task": 1, "reused": 0, "prompt": 0, "generated": 0}
    return Slot(id, phase, **{**usual, **other})


def reading(*slots: Slot, state: State = State.AWAKE, **other: Any) -> Reading:
    return Reading(state, "toy", "b1-abc", (memory(**other),), slots)


# --- one look -----------------------------------------------------------------------------------------------------


def test_the_document_of_one_look(fake: Fake, kvtool: Any) -> None:
    fake.say(
        kv_cache={
            "target": TARGET,
            "draft": {**TARGET, "type_k": "q8_0", "device": "a", "other_bytes": MIB, "odd": [1]},
        }
    )
    ran = kvtool("top", fake.url, "--once", "--json")
    assert ran.code == 0 and ran.err == ""
    assert ran.json == {
        "command": "top",
        "ok": True,
        "url": fake.url,
        "server": {
            "state": "awake",
            "model": "toy",
            "build": "b1-abc",
            "memory": [
                {"context": "target", **TARGET, **NO_TYPES, "more": {}},
                {
                    "context": "draft",
                    **TARGET,
                    **NO_TYPES,
                    "type_k": "q8_0",
                    "more": {"device": "a", "other_bytes": MIB},
                },
            ],
            "slots": [
                {**plain(slot(0)), "task": -1},
                plain(slot(1, Phase.GENERATING, cells=192, task=7, reused=50, prompt=100, generated=42)),
            ],
            "budget": None,
        },
    }


def test_one_look_for_people(fake: Fake, kvtool: Any) -> None:
    fake.say(kv_cache={"target": {**TARGET, "device": "a", "other_bytes": MIB}})
    for args in (["--once"], []):  # without a terminal it looks once, too
        ran = kvtool("top", fake.url, *args)
        assert ran.code == 0 and ran.err == ""
        for said in (
            f"{fake.url}  toy  b1-abc",
            "12.0 MiB used   ▓ 16.0 MiB committed   ░ 512.0 MiB reserved",
            "192 used, 256 committed, 8192 reserved",
            "grew 3 times, gave back once",
            "device a, other 1.0 MiB",
        ):
            assert said in ran.out
        assert re.search(r"^ +0  idle +0 +4096$", ran.out, re.MULTILINE)
        assert re.search(r"^ +1  generating +192 +4096 +50 +100 +42$", ran.out, re.MULTILINE)


def test_a_model_without_an_alias_is_called_as_its_file(fake: Fake, kvtool: Any) -> None:
    for alias, path, shown in (
        ("/models/a.gguf", "/models/a.gguf", "a.gguf"),
        ("C:\\models\\a.gguf", "C:\\models\\a.gguf", "a.gguf"),
        ("org/a", "/models/a.gguf", "org/a"),
    ):
        fake.say(model_alias=alias, model_path=path)
        assert kvtool("top", fake.url, "--json").json["server"]["model"] == shown


def test_it_asks_for_nothing_that_others_would_notice(fake: Fake, kvtool: Any) -> None:
    kvtool("top", fake.url, "--once")
    assert fake.asked == ["/props", "/slots"]


def test_a_sleeping_server_is_told_and_not_woken(fake: Fake, kvtool: Any) -> None:
    fake.say(is_sleeping=True, kv_cache={"target": NOTHING})
    ran = kvtool("top", fake.url, "--once")
    assert ran.code == 0 and "asleep: its memory is free" in ran.out and "slot" not in ran.out
    assert kvtool("top", fake.url, "--json").json["server"]["state"] == "asleep"
    assert set(fake.asked) == {"/props"}


def test_a_server_that_does_not_tell_of_its_slots(fake: Fake, kvtool: Any) -> None:
    fake.say(endpoint_slots=False)
    ran = kvtool("top", fake.url, "--once")
    assert ran.code == 0 and "it runs with --no-slots" in ran.out and "16.0 MiB committed" in ran.out
    assert kvtool("top", fake.url, "--json").json["server"]["slots"] is None
    assert set(fake.asked) == {"/props"}


def without(said: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name != key}


ROUTER = {"role": "router", "model_alias": "llama-server", "build_info": "b1"}
BROKEN_CACHE = {"kv_cache": {"target": without(TARGET, "cells")}}


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        ({"/props": (200, without(PROPS, "kv_cache"))}, 8, ["does not say", "without --kv-dynamic", "kvtool build"]),
        ({"/props": (200, ROUTER)}, 8, ["is a router", "next: look at the server of one model"]),
        ({"/props": (200, {**PROPS, **BROKEN_CACHE})}, 8, ["cannot read", "KeyError: 'cells'", "kvtool apply"]),
        ({"/props": (200, {**PROPS, "kv_cache": {"target": {**TARGET, "cells": "x"}}})}, 8, ["kv_cache.target"]),
        ({"/props": (200, [])}, 8, ["cannot read"]),
        ({"/slots": (200, [{"id": 0}])}, 8, ["cannot read", "KeyError: 'is_processing'"]),
        ({"/slots": (200, [{**BUSY, "next_token": []}])}, 8, ["cannot read", "IndexError"]),
        ({"/props": (200, "<html>")}, 8, ["is no llama-server", "/props: what it sends is not JSON", "--api-prefix"]),
        ({"/props": (404, {})}, 8, ["is no llama-server", "/props: HTTP 404"]),
        ({"/props": (302, {})}, 8, ["HTTP 302"]),
        ({"/slots": (500, {})}, 8, ["/slots: HTTP 500"]),
        ({"/props": DENIED}, 2, ["wants an API key", "LLAMA_API_KEY", "--api-key"]),
        ({"/props": (403, {})}, 2, ["wants an API key", "HTTP 403"]),
        ({"/props": LOADING}, 9, ["is not ready", "why:  Loading model", "ask again"]),
        ({"/slots": LOADING}, 9, ["is not ready"]),
        ({"/props": (503, "busy")}, 9, ["why:  HTTP 503"]),
        ({"/props": (502, "")}, 9, ["nobody answers behind", "HTTP 502"]),
    ],
)
def test_a_server_that_is_not_as_it_should_be(
    fake: Fake, kvtool: Any, answers: dict[str, tuple[int, Any]], code: int, says: list[str]
) -> None:
    fake.answers |= answers
    ran = kvtool("top", fake.url, "--once")
    assert (ran.code, ran.out) == (code, "")
    assert f"error: {fake.url}" in ran.err or f"behind {fake.url}" in ran.err
    assert "next: " in ran.err and all(said in ran.err for said in says)
    document = kvtool("top", fake.url, "--json")
    assert document.code == code and document.json["error"]["exit_code"] == code


def test_nobody_is_there(nobody: str, kvtool: Any) -> None:
    ran = kvtool("top", nobody)
    assert ran.code == 9 and f"error: no server answers at {nobody}" in ran.err
    assert "refused" in ran.err and "next: start it" in ran.err


def test_a_server_that_says_nothing_is_given_up(kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ran = kvtool("top", f"127.0.0.1:{mute.getsockname()[1]}")
    assert ran.code == 9 and "does not answer" in ran.err and "nothing came within 0.2 s" in ran.err


# --- the key, the address, the interval ---------------------------------------------------------------------------


def test_the_key_comes_from_the_option_or_the_servers_variable(
    fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.key = "sésame"
    assert kvtool("top", fake.url, "--api-key", "sésame").code == 0
    fake.key = "sesame"
    assert "wants an API key" in kvtool("top", fake.url).err
    wrong = kvtool("top", fake.url, "--api-key", "0pen")
    assert wrong.code == 2 and "wants another API key" in wrong.err and "0pen" not in wrong.err
    assert kvtool("top", fake.url, "--api-key", "sesame").code == 0
    monkeypatch.setenv("LLAMA_API_KEY", " sesame, other\n")  # what the server takes: several of them
    assert kvtool("top", fake.url).code == 0
    assert kvtool("top", fake.url, "--api-key", "0pen").code == 2
    assert "sesame" not in kvtool("top", "--help").out


def test_a_key_that_no_header_can_carry(fake: Fake, kvtool: Any) -> None:
    ran = kvtool("top", fake.url, "--api-key", "open\nsesame")
    assert ran.code == 2 and "no header can carry" in ran.err and "sesame" not in ran.err
    assert fake.asked == []


def test_addresses(fake: Fake, kvtool: Any) -> None:
    bare = fake.url.removeprefix("http://")
    fake.answers |= {f"/prefix{path}": answer for path, answer in fake.answers.items()}
    for url, shown in (
        (bare, fake.url),
        (f"{fake.url}/", fake.url),
        (f"{fake.url}/prefix/?x=1#y", f"{fake.url}/prefix"),
        (f"http://me:secret@{bare}", fake.url),
    ):
        ran = kvtool("top", url, "--json")
        assert ran.code == 0 and ran.json["url"] == shown
    assert fake.asked[4:6] == ["/prefix/props", "/prefix/slots"]


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://[::1", "http://host:port"])
def test_what_is_no_address(url: str, kvtool: Any) -> None:
    ran = kvtool("top", url)
    assert ran.code == 2 and "is no address" in ran.err and "next: kvtool top http://" in ran.err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_intervals_that_are_none(fake: Fake, kvtool: Any, interval: str) -> None:
    ran = kvtool("top", fake.url, "-i", interval)
    assert ran.code == 2 and "not between 0.1 and 3600 seconds" in ran.err and fake.asked == []


def test_no_proxy_between_a_machine_and_itself(fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    assert kvtool("top", fake.url).code == 0
    ran = kvtool("top", "http://example.invalid")  # the proxy of the sealed tests refuses
    assert ran.code == 9 and "refused" in ran.err


# --- look after look ----------------------------------------------------------------------------------------------


@pytest.fixture
def watch(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Any:
    """watch(step, ...) -> (pictures, exit code): `kvtool top`, a step in place of each pause, and then Ctrl-C."""

    def run(*steps: Callable[[], object]) -> tuple[list[str], int]:
        pictures: list[str] = []
        todo = list(steps)

        @contextlib.contextmanager
        def screen(_console: console.Console, drawn: console.Draw) -> Iterator[None]:
            look.append(drawn)
            yield

        def pause(seconds: float) -> None:
            assert seconds == 0.5
            pictures.append("\n".join(texts(look[0](100, 50))))
            if not todo:
                raise KeyboardInterrupt
            todo.pop(0)()

        look: list[console.Draw] = []
        monkeypatch.setattr(console.Console, "interactive", True)
        monkeypatch.setattr(console.Console, "screen", screen)
        monkeypatch.setattr(top.time, "sleep", pause)
        return pictures, cli.run(["top", fake.url, "--interval", "0.5"])

    return run


def test_watching_shows_what_happens_and_ends_with_the_last_picture(
    fake: Fake, watch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = {**TARGET, "cells": 512, "committed_bytes": 32 * MIB, "grow_total": 5, "grow_seconds_total": 0.2511}
    back = {**grown, "cells": 256, "committed_bytes": 16 * MIB, "shrink_total": 2}
    pictures, code = watch(
        lambda: fake.say(kv_cache={"target": grown}),
        lambda: fake.say(kv_cache={"target": back}),
        lambda: fake.say(is_sleeping=True, kv_cache={"target": NOTHING}),
    )
    assert code == 0 and len(pictures) == 4
    assert "target grew" not in pictures[0]
    assert re.search(r"\d\d:\d\d:\d\d  target grew 2 times: 256 to 512 cells, \+16.0 MiB, 1.1 ms", pictures[1])
    assert "target gave back once: 512 to 256 cells, -16.0 MiB" in pictures[2]
    assert pictures[2].index("gave back once:") < pictures[2].index("grew 2 times:"), "the newest comes first"
    assert "it fell asleep" not in pictures[2] and "asleep: its memory" not in pictures[2]
    out = capsys.readouterr()
    assert "asleep: its memory is free" in out.out and out.err == ""


def test_a_document_is_of_one_look_in_a_terminal_too(fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.Console, "interactive", True)
    for option in ("--json", "--once"):
        assert kvtool("top", fake.url, option).code == 0
    assert fake.asked == ["/props", "/slots"] * 2


def test_watching_waits_for_a_server_that_goes_away(fake: Fake, watch: Any) -> None:
    pictures, code = watch(
        lambda: fake.answers.update({"/props": (502, "")}),
        lambda: fake.answers.update({"/props": LOADING}),
        lambda: fake.say(),
        lambda: None,
    )
    assert code == 0
    assert "waiting for it" not in pictures[0]
    assert "waiting for it: /props: HTTP 502" in pictures[1] and "16.0 MiB committed" in pictures[1]
    assert "waiting for it: Loading model" in pictures[2]
    assert "waiting for it" not in pictures[3] and "it answers again after 0 s" in pictures[3]
    assert pictures[3].count("it does not answer") == 1, "said once, however long it takes"


def test_ctrl_c_while_the_server_is_gone_says_so(fake: Fake, watch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = watch(lambda: fake.answers.update({"/props": (502, "")}))
    assert code == 9 and "nobody answers behind" in capsys.readouterr().err


def test_watching_begins_with_a_server_that_loads(fake: Fake, watch: Any) -> None:
    fake.answers["/props"] = LOADING
    pictures, code = watch(lambda: fake.say())
    assert code == 0 and pictures[0].splitlines() == [
        fake.url,
        "waiting for it: Loading model",
        *pictures[0].splitlines()[2:],
    ]
    assert "16.0 MiB committed" in pictures[1]


def test_watching_ends_with_what_no_waiting_heals(fake: Fake, watch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = watch(lambda: fake.answers.update({"/props": DENIED}))
    assert code == 2 and "wants an API key" in capsys.readouterr().err


def test_watching_does_not_begin_where_nobody_is(nobody: str, monkeypatch: pytest.MonkeyPatch, kvtool: Any) -> None:
    monkeypatch.setattr(console.Console, "interactive", True)
    assert kvtool("top", nobody).code == 9


# --- what the looks mean ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {}, []),
        ({}, {"used_bytes": 0, "cells_used": 0}, []),
        (
            {"cells": 256},
            {"cells": 512, "grow_total": 4, "committed_bytes": 17 * MIB, "copied_bytes_total": 3 * MIB},
            ["target grew once: 256 to 512 cells, +1.0 MiB, 3.0 MiB copied"],
        ),
        (
            {"cells": 512},
            {"cells": 256, "shrink_total": 3, "committed_bytes": 15 * MIB},
            ["target gave back 2 times: 512 to 256 cells, -1.0 MiB"],
        ),
        (
            {},
            {"grow_total": 5, "shrink_total": 2, "grow_seconds_total": 0.5},
            ["target grew 2 times and gave back once: 256 to 256 cells, +0 B, 250.0 ms"],
        ),
        (
            {"type_k": "f16", "type_v": "f16"},
            {
                "type_k": "q8_0",
                "type_v": "f16",
                "retype_total": 1,
                "retype_seconds_total": 0.5,
                "committed_bytes": 13 * MIB,
            },
            ["target K f16, V f16 became K q8_0, V f16: 3.0 MiB freed, 500.0 ms"],
        ),
        ({}, {"grow_total": 2, "shrink_total": 9}, ["it was started anew"]),
        ({}, {"grow_total": 9, "shrink_total": 0}, ["it was started anew"]),
    ],
)
def test_what_happened_between_two_looks(before: dict[str, Any], now: dict[str, Any], told: list[str]) -> None:
    assert changes(reading(**before), reading(**now)) == told


def test_each_context_tells_of_itself() -> None:
    before = Reading(State.AWAKE, "", "", (memory("target"),), ())
    now = Reading(State.AWAKE, "", "", (memory("target", grow_total=4), memory("draft", grow_total=9)), ())
    assert [told.split()[0] for told in changes(before, now)] == ["target"], "a draft that came has not grown"
    later = Reading(State.AWAKE, "", "", (memory("target", grow_total=5), memory("draft", grow_total=10)), ())
    assert [told.split()[0] for told in changes(now, later)] == ["target", "draft"]


def test_sleep_and_waking_are_told() -> None:
    asleep = reading(state=State.ASLEEP)
    assert changes(reading(), asleep) == ["it fell asleep and gave all memory back"]
    assert changes(asleep, reading()) == ["it woke up"]


@pytest.mark.parametrize(
    ("before", "now", "prompt", "generated"),
    [
        (slot(0, Phase.GENERATING, prompt=10, generated=5), slot(0, Phase.GENERATING, prompt=10, generated=25), 0, 10),
        (slot(0, Phase.PROMPT, prompt=10), slot(0, Phase.GENERATING, prompt=30, generated=2), 10, 1),
        (slot(0, Phase.GENERATING, prompt=99, generated=99), slot(0, Phase.PROMPT, prompt=8, task=2), 4, 0),
        (slot(0, prompt=99), slot(0, Phase.GENERATING, prompt=8, generated=4), 4, 2),
        (slot(0, Phase.GENERATING, generated=9), slot(0, Phase.GENERATING, generated=3), 0, 0),
        (slot(0, Phase.GENERATING, generated=9), slot(0, generated=99), 0, 0),
        (slot(1), slot(0, Phase.GENERATING, generated=4), 0, 2),
    ],
)
def test_tokens_per_second(before: Slot, now: Slot, prompt: float, generated: float) -> None:
    view = View("url").seen(reading(before), 1.0)
    assert view.speeds is None
    assert view.seen(reading(now), 3.0).speeds == {0: Speed(prompt, generated)}


def test_no_time_between_two_looks_and_a_gap() -> None:
    busy = slot(0, Phase.GENERATING, generated=4)
    assert View("url").seen(reading(busy), 1.0).seen(reading(busy), 1.0).speeds == {0: Speed()}
    gone = View("url").seen(reading(busy), 1.0).missed(NetworkError("gone"), 2.0)
    assert gone.speeds is None and gone.events[0][1] == "it does not answer: gone"
    back = gone.missed(NetworkError("still gone"), 9.0).seen(reading(slot(0, Phase.GENERATING, generated=44)), 11.0)
    assert back.speeds == {0: Speed(0, 4)}, "over the whole gap"
    assert [text for _, text in back.events] == ["it answers again after 9 s", "it does not answer: gone"]


def test_old_events_are_forgotten() -> None:
    view = View("url")
    for n in range(300):
        view = view.seen(reading(grow_total=n), n)
    assert len(view.events) == 100 and "grew once" in view.events[0][1]


def test_sizes() -> None:
    counts = (0, 1023, 1024, 16 * MIB, 1023.9 * MIB, 8192 * MIB, 2**50)
    assert [size(n) for n in counts] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "16.0 MiB",
        "1023.9 MiB",
        "8.0 GiB",
        "1048576.0 GiB",
    ]


# --- the picture --------------------------------------------------------------------------------------------------

LARGE = {"cells_max": 10**7, "cells": 10**7, "cells_used": 10**7, "copied_bytes_total": 1023 * MIB}
LARGE |= {"reserved_bytes": 1023.9 * MIB, "committed_bytes": 1023.9 * MIB, "used_bytes": 1023.9 * MIB}


def full(slots: int, events: int = 0) -> View:
    """A view of large numbers."""
    working = [slot(n, Phase.GENERATING, n_ctx=10**7, cells=10**7, reused=10**7, prompt=10**7) for n in range(slots)]
    view = View("http://127.0.0.1:8080").seen(reading(*working, **LARGE), 0.0)
    later = [dataclasses.replace(slot, generated=99999) for slot in working]
    grown = tuple(("12:00:00", f"event {n}") for n in range(events))
    return dataclasses.replace(view.seen(reading(*later, **LARGE), 1.0), events=grown)


@pytest.mark.parametrize("width", [80, 140])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    lines = texts(draw(full(4, 4), width))
    assert max(map(len, lines)) <= width
    assert len(lines[3]) == width, "the bar takes what there is"
    assert sum(line.count("█") > 20 for line in lines) == (5 if width == 140 else 1), (
        "slots have bars where there is room"
    )


def test_what_a_server_calls_itself_cannot_break_the_picture() -> None:
    view = View("url").seen(dataclasses.replace(reading(), model="a\x1b[2J\nb\ud800" + "長" * 99), 0.0)
    line = draw(view, 80)[0]
    assert texts([line])[0].startswith("url  a?[2J?b?長")
    out = io.StringIO()
    RichConsole(file=out, width=80).print(console.drawn([line]))
    assert out.getvalue().count("\n") == 1 and cell_len(out.getvalue().rstrip("\n")) <= 80 and "…" in out.getvalue()


@pytest.mark.parametrize(
    ("used", "committed", "reserved", "bar"),
    [
        (0, 0, 0, "          "),
        (0, 0, 100, "░░░░░░░░░░"),
        (0, 1, 100, "▓░░░░░░░░░"),
        (1, 1, 100, "█░░░░░░░░░"),
        (1, 2, 100, "█▓░░░░░░░░"),
        (50, 70, 100, "█████▓▓░░░"),
        (99, 99, 100, "█████████░"),
        (98, 99, 100, "█████████░"),
        (99, 100, 100, "██████████"),
        (100, 100, 100, "██████████"),
        (5, 200, 100, "█▓▓▓▓▓▓▓▓▓"),
    ],
)
def test_the_bar_shows_all_that_is_there(used: int, committed: int, reserved: int, bar: str) -> None:
    sizes = {"used_bytes": used, "committed_bytes": committed, "reserved_bytes": reserved}
    line = texts(draw(View("url").seen(reading(**sizes), 0.0), 26))[3]
    assert line == f"target  {bar}{100 * committed / reserved if reserved else 0:6.1f} %"


def test_speeds_stand_beside_the_slots_and_add_up() -> None:
    lines = texts(draw(full(2), 80))
    assert lines[1] == "awake   prompt 0.0 t/s   generated 199998.0 t/s"
    assert [line.split()[-1] for line in lines[-2:]] == ["99999.0", "99999.0"]


def test_the_types_stand_below_the_numbers() -> None:
    types = {"type_k": "q8_0", "type_v": "q4_0"}
    for more, shown in (({}, ""), ({"retype_total": 1}, ", changed once"), ({"retype_total": 3}, ", changed 3 times")):
        lines = texts(draw(View("url").seen(reading(**types, **more), 0.0), 80))
        assert f"        types: K q8_0, V q4_0{shown}" in lines
    assert not any("types" in line for line in texts(draw(View("url").seen(reading(), 0.0), 80)))


def test_a_budget_and_what_was_given_up_for_it(fake: Fake, kvtool: Any) -> None:
    budget = {"types": ["f16", "q8_0"], "bytes": 64 * MIB, "committed_bytes": 12 * MIB, "down_total": 1, "up_total": 0}
    fake.say(kv_budget=budget)
    said = kvtool("top", fake.url).out
    assert "\nbudget  12.0 MiB of 64.0 MiB taken\n        f16, q8_0: down once, up 0 times\n" in said
    assert kvtool("top", fake.url, "--json").json["server"]["budget"] == budget
    fake.say(kv_budget={**budget, "bytes": 0, "types": []})
    assert "\nbudget  12.0 MiB taken\n\nslot" in kvtool("top", fake.url).out
    fake.say(kv_budget={"types": []})
    assert kvtool("top", fake.url).code == 8


@pytest.mark.parametrize("height", [12, 24, 60])
def test_a_low_terminal_shows_those_that_work_and_the_last_events(height: int) -> None:
    idle, busy = [slot(n) for n in range(60)], slot(60, Phase.GENERATING, generated=1)
    view = dataclasses.replace(View("url").seen(reading(*idle, busy), 0.0), events=(("12:00:00", "last"),) * 9)
    lines = texts(draw(view, 80, height))
    assert len(lines) == height
    slots = [line for line in lines if " idle " in line or " generating " in line]
    assert "generating" in slots[0] and f"and {61 - len(slots)} more" in "\n".join(lines)
    assert height == 12 or lines[-1].endswith("last")
    assert len(draw(view, 80)) > 70, "without a height all of it"


def test_a_terminal_without_blocks_gets_other_marks(fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert cli.run(["top", fake.url]) == 0
    sys.stdout.flush()
    said = sys.stdout.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "target  ##=..." in said and "= 16.0 MiB committed" in said


def test_the_picture_in_the_docs_is_of_this_version() -> None:
    """Else: python ci/top_picture.py"""
    svg = (Path(__file__).parents[2] / "docs" / "top.svg").read_text("utf-8")
    shown = " ".join(html.unescape(" ".join(re.findall(r"<text [^>]*>([^<]*)</text>", svg))).split())
    *_, memory, sizes, cells, grown, _, columns, _ = texts(draw(View("url").seen(reading(slot(0)), 0.0), 100))
    for line in (sizes, cells, grown, columns):
        words = [word for word in re.split(r"[\d.]+ (?:[MG]iB|B)?|once|times", line) if word.strip(" ▓█░")]
        assert all(" ".join(word.split()).strip("▓█░ ,") in shown for word in words), line
    assert "target" in memory and "http" not in re.sub(r"http://(127|www.w3.org)|https://www.textualize.io", "", svg)


def test_a_picture_is_for_a_terminal_that_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not console.Console().interactive
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console.Console().interactive
    monkeypatch.setenv("TERM", "dumb")
    assert not console.Console().interactive
