"""Test kvtool bench --serve with an imitated llama-server: counts, failures and files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtool.bench import serve
from kvtool.bench.serve import Reply, ServeResult
from kvtool.console import Console
from kvtool.errors import MeasureError, UsageError
from tests import fakes
from tests.unit.benches import run_bench

# A prompt can reuse an earlier prompt that it begins with: of any slot with --kv-share-prefix, else only of its own
# slot. A token needs 10 bytes.
SERVER = """
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
args, fate = sys.argv[1:], os.environ.get("FAKE_SERVE", "")
if "--help" in args:
    print("--kv-dynamic" if fate == "old" else "--kv-dynamic --kv-share-prefix")
    sys.exit()
if fate == "dies":
    sys.exit(1)
known, lock, cells = [], threading.Lock(), 0
def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def reply(self, data, code=200, kind="application/json"):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())
    def do_GET(self):
        said = {"used_bytes": 10 * cells, "committed_bytes": 20 * cells} if "--kv-dynamic" in args else None
        self.reply(json.dumps({"kv_cache": {"target": said}} if said else {}))
    def do_POST(self):
        global cells
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            mine = [k for slot, k in known if "--kv-share-prefix" in args or slot == ask["id_slot"]]
            reused = max([common(k, ask["prompt"]) for k in mine], default=0)
            known.append((ask["id_slot"], ask["prompt"]))
            cells += len(ask["prompt"]) - reused
            turn = len(known)
        if fate == "full" and turn > 2:
            return self.reply(json.dumps({"error": {"message": "no room"}}), 503)
        end = {"stop": True, "timings": {"prompt_n": len(ask["prompt"]) - reused}}
        if fate == "ends" and turn > 2:
            end = {"error": {"message": "no room now"}}
        events = [{"tokens": [1, 2], "stop": False}, *([] if fate == "cut" and turn > 2 else [end])]
        self.reply("".join(f"data: {json.dumps(e)}\\n\\n" for e in events), kind="text/event-stream")
port = int(args[args.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    fakes.program(tmp_path / "bin/llama-server", SERVER)
    fakes.model(tmp_path, "small")
    return tmp_path


def run(place: Path, **options: object) -> ServeResult:
    given = {"serve": True, "quick": True, "chats": 3, "model": place / "small.gguf", **options}
    return run_bench(place, ServeResult, **given)


def test_all_modes_serve_same_chats(place: Path) -> None:
    static, dynamic, shared = run(place).rows
    assert [row.mode for row in (static, dynamic, shared)] == ["static", "dynamic", "shared"]
    # The prompt of the first turn has 500 shared tokens and 25 tokens of its chat. The prompt of the second turn also
    # has the 2 tokens of the first answer, and 25 more tokens of the chat.
    load = 3 * (525 + 552)
    for row in (static, dynamic, shared):
        assert (row.requests, row.errors, row.prompt_tokens) == (6, 0, load)
        assert row.first is not None and row.worst is not None and row.worst >= row.first
    alone, together = 3 * (525 + 27), 500 + 3 * (25 + 27)
    assert (static.computed, dynamic.computed, shared.computed) == (alone, alone, together)
    assert (static.used, dynamic.used, shared.used) == (None, 10 * alone, 10 * together)
    assert shared.committed == 20 * together


def test_sharing_bars_compare_savings(place: Path) -> None:
    bars = {bar.name: bar for bar in run(place, chats=8).bars}
    ratio = (500 + 8 * 52) / (8 * 552)
    assert bars["KV bytes used / without sharing"].value == pytest.approx(ratio)
    assert bars["prompt tokens computed / without sharing"].value == pytest.approx(ratio)
    assert bars["KV bytes used / without sharing"].met and bars["prompt tokens computed / without sharing"].met
    assert bars["requests that fail"].met is True


def test_server_without_sharing_skips_mode(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVE", "old")
    result = run(place)
    assert [row.mode for row in result.rows] == ["static", "dynamic"] and "--kv-share-prefix" in result.skipped
    assert {bar.met for bar in result.bars} == {None, True}


@pytest.mark.parametrize(("fate", "error"), [("full", "503"), ("ends", "no room now"), ("cut", "no end")])
def test_failed_requests_are_counted(place: Path, monkeypatch: pytest.MonkeyPatch, fate: str, error: str) -> None:
    monkeypatch.setenv("FAKE_SERVE", fate)
    result = run(place, strict=True)
    assert all(row.errors == 4 and error in row.error for row in result.rows)
    assert isinstance(result.failure, MeasureError) and "requests that fail" in result.failure.why


def test_server_start_failure_is_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVE", "dies")
    with pytest.raises(MeasureError, match="static: llama-server did not start"):
        run(place)


def test_interrupt_does_not_wait(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, answered = threading.Event(), list[bool]()

    def ask(_server: object, request: dict[str, Any]) -> Reply:
        if request["id_slot"] == 1:
            raise KeyboardInterrupt
        if request["id_slot"] == 2:
            answered.append(over.wait(30))
        return Reply(1)

    monkeypatch.setattr(serve, "_ask", ask)
    with pytest.raises(KeyboardInterrupt):
        run(place)
    over.set()
    assert answered in ([], [True])


def test_single_chat_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="cannot share a prompt"):
        run(place, chats=1)


def test_results_are_printed_and_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(place, out=place / "out")
    result.render(Console())
    assert "first s" in capsys.readouterr().out
    assert {file.name for file in (place / "out").iterdir()} == {"serve.md", "serve.json", "serve.svg"}
    text = (place / "out/serve.md").read_text("utf-8")
    assert "Each chat sends a fixed number of requests" in text
    assert (
        "3 chats of 2 turns, 500 tokens in common and 25 of their own a turn" in text and "![serve](serve.svg)" in text
    )
    assert json.loads((place / "out/serve.json").read_text("utf-8"))["rows"][2]["mode"] == "shared"
