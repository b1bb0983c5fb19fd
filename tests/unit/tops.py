"""Provide a server with scripted answers, and readings, for the tests of `kvtool top`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvtool import console
from kvtool.top.reading import Memory, Phase, Reading, Slot, State

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
# an older server reports no types
NO_TYPES = {"type_k": "", "type_v": "", "retype_total": 0, "retype_seconds_total": 0.0}
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
SHARING = {**BUSY, "kv_cache": {"target": {"bytes": MIB, "cells": 190, "cells_shared": 128, "runs": 2}}}
LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
DENIED = (401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})


class Fake(ThreadingHTTPServer):
    """Serve scripted answers: for each path a status, and JSON or a text.

    key: the API key that a request must have, if any
    """

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


def texts(lines: Sequence[console.Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def memory(context: str = "target", **other: Any) -> Memory:
    return Memory(context, **{**TARGET, **other}, more={})


def slot(id: int, phase: Phase = Phase.IDLE, **other: Any) -> Slot:
    usual = {"n_ctx": 4096, "cells": 0, "task": 1, "reused": 0, "prompt": 0, "generated": 0}
    return Slot(id, phase, **{**usual, **other})


def reading(*slots: Slot, state: State = State.AWAKE, **other: Any) -> Reading:
    return Reading(state, "toy", "b1-abc", (memory(**other),), slots)
