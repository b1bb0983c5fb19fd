"""Test `kvtool top` with a scripted server: every kind of server, single readings, and watching."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtool import cli, console
from kvtool.result import to_plain
from kvtool.top import server as asking
from kvtool.top.reading import Phase
from tests.unit.tops import (
    BUSY,
    DENIED,
    IDLE,
    LOADING,
    MIB,
    NO_TYPES,
    NOTHING,
    PROPS,
    SHARING,
    TARGET,
    Fake,
    slot,
    texts,
)

# --- one reading --------------------------------------------------------------------------------------------------


def test_json_of_one_reading(fake: Fake, kvtool: Any) -> None:
    draft = {**TARGET, "type_k": "q8_0", "device": "a", "other_bytes": MIB, "odd": [1]}
    fake.say(kv_cache={"target": TARGET, "draft": draft})
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
                {**to_plain(slot(0)), "task": -1},
                to_plain(slot(1, Phase.GENERATING, cells=192, task=7, reused=50, prompt=100, generated=42)),
            ],
            "budget": None,
            "conversations": None,
        },
    }


def test_text_of_one_reading(fake: Fake, kvtool: Any) -> None:
    fake.say(kv_cache={"target": {**TARGET, "device": "a", "other_bytes": MIB, "hole_share": 0.82421875}})
    for args in (["--once"], []):  # without a terminal, the server is also read only once
        ran = kvtool("top", fake.url, *args)
        assert ran.code == 0 and ran.err == ""
        for said in (
            f"{fake.url}  toy  b1-abc",
            "12.0 MiB used   ▓ 16.0 MiB committed   ░ 512.0 MiB reserved",
            "192 used, 256 committed, 8192 reserved",
            "grew 3 times, shrank once",
            "device a, other 1.0 MiB, hole share 0.824",
        ):
            assert said in ran.out
        assert re.search(r"^ +0  idle +0 +4096$", ran.out, re.MULTILINE)
        assert re.search(r"^ +1  generating +192 +4096 +50 +100 +42$", ran.out, re.MULTILINE)


def test_shared_cells_of_slot(fake: Fake, kvtool: Any) -> None:
    fake.say(slots=(IDLE, SHARING))
    shown = kvtool("top", fake.url, "--once").out
    assert re.search(r"^slot +state +cells +shared +of ", shown, re.MULTILINE)
    assert re.search(r"^ +0  idle +0 +4096$", shown, re.MULTILINE)
    assert re.search(r"^ +1  generating +192 +128 +4096 +50 +100 +42$", shown, re.MULTILINE)
    assert [slot["shared"] for slot in kvtool("top", fake.url, "--json").json["server"]["slots"]] == [None, 128]


def test_slot_waiting_for_cells(fake: Fake, kvtool: Any) -> None:
    fake.say(slots=(IDLE, {**BUSY, "is_waiting": True}))
    assert re.search(r"^ +1  waiting +192 +4096 +50 +100 +42$", kvtool("top", fake.url, "--once").out, re.MULTILINE)


def test_model_without_alias_shows_file(fake: Fake, kvtool: Any) -> None:
    for alias, path, shown in (
        ("/models/a.gguf", "/models/a.gguf", "a.gguf"),
        ("C:\\models\\a.gguf", "C:\\models\\a.gguf", "a.gguf"),
        ("org/a", "/models/a.gguf", "org/a"),
    ):
        fake.say(model_alias=alias, model_path=path)
        assert kvtool("top", fake.url, "--json").json["server"]["model"] == shown


def test_only_props_and_slots_are_requested(fake: Fake, kvtool: Any) -> None:
    kvtool("top", fake.url, "--once")
    assert fake.asked == ["/props", "/slots"]


def test_sleeping_server_is_not_woken(fake: Fake, kvtool: Any) -> None:
    fake.say(is_sleeping=True, kv_cache={"target": NOTHING})
    ran = kvtool("top", fake.url, "--once")
    assert ran.code == 0 and "asleep: its memory is freed" in ran.out and "slot" not in ran.out
    assert kvtool("top", fake.url, "--json").json["server"]["state"] == "asleep"
    assert set(fake.asked) == {"/props"}


def test_server_without_slots_endpoint(fake: Fake, kvtool: Any) -> None:
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
        ({"/props": (200, without(PROPS, "kv_cache"))}, 8, ["does not report", "without --kv-dynamic", "kvtool build"]),
        ({"/props": (200, ROUTER)}, 8, ["is a router", "next: watch the server of one model"]),
        ({"/props": (200, {**PROPS, **BROKEN_CACHE})}, 8, ["cannot read", "KeyError: 'cells'", "kvtool apply"]),
        (
            {"/props": (200, {**PROPS, "kv_cache": {"target": {**TARGET, "cells": "x"}}})},
            8,
            ["cells: 'x' is no number"],
        ),
        ({"/props": (200, [])}, 8, ["cannot read"]),
        ({"/slots": (200, [{"id": 0}])}, 8, ["cannot read", "KeyError: 'is_processing'"]),
        ({"/slots": (200, [{**BUSY, "next_token": []}])}, 8, ["cannot read", "IndexError"]),
        ({"/props": (200, "<html>")}, 8, ["is not a llama-server", "/props: its answer is not JSON", "--api-prefix"]),
        ({"/props": (404, {})}, 8, ["is not a llama-server", "/props: HTTP 404"]),
        ({"/props": (302, {})}, 8, ["HTTP 302"]),
        ({"/slots": (500, {})}, 8, ["/slots: HTTP 500"]),
        ({"/props": DENIED}, 2, ["wants an API key", "LLAMA_API_KEY", "--api-key"]),
        ({"/props": (403, {})}, 2, ["wants an API key", "HTTP 403"]),
        ({"/props": LOADING}, 9, ["is not ready", "why:  Loading model", "wait until the model is loaded"]),
        ({"/slots": LOADING}, 9, ["is not ready"]),
        ({"/props": (503, "busy")}, 9, ["why:  HTTP 503"]),
        ({"/props": (502, "")}, 9, ["could not reach llama-server", "HTTP 502"]),
    ],
)
def test_unusable_server_is_error(
    fake: Fake, kvtool: Any, answers: dict[str, tuple[int, Any]], code: int, says: list[str]
) -> None:
    fake.answers |= answers
    ran = kvtool("top", fake.url, "--once")
    assert (ran.code, ran.out) == (code, "")
    assert f"error: {fake.url}" in ran.err or f"proxy at {fake.url}" in ran.err
    assert "next: " in ran.err and all(said in ran.err for said in says)
    document = kvtool("top", fake.url, "--json")
    assert document.code == code and document.json["error"]["exit_code"] == code


def test_connection_refused(unused_address: str, kvtool: Any) -> None:
    ran = kvtool("top", unused_address)
    assert ran.code == 9 and f"error: no server answers at {unused_address}" in ran.err
    assert "refused" in ran.err and "next: start it" in ran.err


def test_silent_server_times_out(kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ran = kvtool("top", f"127.0.0.1:{mute.getsockname()[1]}")
    assert ran.code == 9 and "does not answer" in ran.err and "there was no answer within 0.2 s" in ran.err


# --- the key, the address, the interval ---------------------------------------------------------------------------


def test_api_key_option_and_variable(fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.key = "sésame"
    assert kvtool("top", fake.url, "--api-key", "sésame").code == 0
    fake.key = "sesame"
    assert "wants an API key" in kvtool("top", fake.url).err
    wrong = kvtool("top", fake.url, "--api-key", "0pen")
    assert wrong.code == 2 and "wants another API key" in wrong.err and "0pen" not in wrong.err
    assert kvtool("top", fake.url, "--api-key", "sesame").code == 0
    monkeypatch.setenv("LLAMA_API_KEY", " sesame, other\n")  # the server accepts several keys in this variable
    assert kvtool("top", fake.url).code == 0
    assert kvtool("top", fake.url, "--api-key", "0pen").code == 2
    assert "sesame" not in kvtool("top", "--help").out


def test_invalid_api_key(fake: Fake, kvtool: Any) -> None:
    ran = kvtool("top", fake.url, "--api-key", "open\nsesame")
    assert ran.code == 2 and "not allowed in an HTTP header" in ran.err and "sesame" not in ran.err
    assert fake.asked == []


def test_address_forms(fake: Fake, kvtool: Any) -> None:
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
def test_invalid_address(url: str, kvtool: Any) -> None:
    ran = kvtool("top", url)
    assert ran.code == 2 and "is not an address" in ran.err and "next: kvtool top http://" in ran.err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_invalid_interval(fake: Fake, kvtool: Any, interval: str) -> None:
    ran = kvtool("top", fake.url, "-i", interval)
    assert ran.code == 2 and "not between 0.1 and 3600 seconds" in ran.err and fake.asked == []


def test_loopback_ignores_proxy(fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    assert kvtool("top", fake.url).code == 0
    ran = kvtool("top", "http://example.invalid")  # the tests set a proxy that refuses connections
    assert ran.code == 9 and "refused" in ran.err


# --- watching -----------------------------------------------------------------------------------------------------


@pytest.fixture
def watch(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `kvtool top`, with a step in place of each pause, and then Ctrl-C.

    The function returns the screens that `kvtool top` has drawn, and the exit code.
    """

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
        monkeypatch.setattr("kvtool.commands.top.time.sleep", pause)
        return pictures, cli.run(["top", fake.url, "--interval", "0.5"])

    return run


def test_watching_shows_changes(fake: Fake, watch: Any, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "target shrank once: 512 to 256 cells, -16.0 MiB" in pictures[2]
    assert pictures[2].index("shrank once:") < pictures[2].index("grew 2 times:"), "the newest comes first"
    assert "it fell asleep" not in pictures[2] and "asleep: its memory" not in pictures[2]
    out = capsys.readouterr()
    assert "asleep: its memory is freed" in out.out and out.err == ""


def test_json_reads_once_in_terminal(fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.Console, "interactive", True)
    for option in ("--json", "--once"):
        assert kvtool("top", fake.url, option).code == 0
    assert fake.asked == ["/props", "/slots"] * 2


def test_watching_waits_for_server(fake: Fake, watch: Any) -> None:
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
    assert pictures[3].count("it does not answer") == 1, "reported once, for any duration"


def test_interrupt_without_server_exits_9(fake: Fake, watch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = watch(lambda: fake.answers.update({"/props": (502, "")}))
    assert code == 9 and "could not reach llama-server" in capsys.readouterr().err


def test_watching_starts_during_loading(fake: Fake, watch: Any) -> None:
    fake.answers["/props"] = LOADING
    pictures, code = watch(lambda: fake.say())
    assert code == 0 and pictures[0].splitlines() == [
        fake.url,
        "waiting for it: Loading model",
        *pictures[0].splitlines()[2:],
    ]
    assert "16.0 MiB committed" in pictures[1]


def test_watching_stops_at_denied_key(fake: Fake, watch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = watch(lambda: fake.answers.update({"/props": DENIED}))
    assert code == 2 and "wants an API key" in capsys.readouterr().err


def test_watching_needs_server(unused_address: str, monkeypatch: pytest.MonkeyPatch, kvtool: Any) -> None:
    monkeypatch.setattr(console.Console, "interactive", True)
    assert kvtool("top", unused_address).code == 9
