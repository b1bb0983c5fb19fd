"""Test `kvtool top` with a real llama-server.

The printed numbers must agree with the responses of the server and with the system, also in a terminal.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtool import process
from kvtool.top.reading import DEFAULT_URL, Phase, State
from kvtool.top.server import Server
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real, kvtool
from tests.e2e.servers import completion, resident, serving, until
from tests.e2e.terminal import terminal

ARGS = ("-c", "4096", "-np", "2", "--cache-ram", "0", "--kv-dynamic")
MIB = 2**20


def look(server: LlamaServer, *args: str) -> dict[str, Any]:
    code, document = kvtool("top", server.url, "--once", *args)
    assert code == 0
    seen: dict[str, Any] = document["server"]
    return seen


def test_default_address_is_that_of_llama_server(real: Real) -> None:
    usage = process.capture([real.bin / "llama-server", "--help"]).stdout
    found = re.search(r"--port PORT +port to listen \(default: (\d+)\)", usage)
    assert found and f"http://127.0.0.1:{found[1]}" == DEFAULT_URL


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_numbers_agree_with_server_and_system(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    args = ("--metrics", "--slot-save-path", str(tmp_path), "--no-warmup")
    with serving(real, large_cell_model, tmp_path / "log", *ARGS, *args) as server:
        for slot_id in (
            0,
            1,
            # both requests let the context allocate its first cells and its other memory before the measurement begins
        ):
            completion(server, prompt(slot_id, 240), 4, id_slot=slot_id)
        before, taken = look(server)["memory"][0], resident(server)
        completion(server, prompt(2, 1500), 4, id_slot=0)
        seen = look(server)
        (memory,) = seen["memory"]

        numbers = server.http.get("/props").json()["kv_cache"]["target"]
        shared = [slot["cells_shared"] for slot in numbers.pop("slots")]
        told = {**memory, **memory["more"]}
        assert {name: value for name, value in told.items() if name in numbers} == numbers
        line = re.compile(r'^llamacpp:kv_cache_(\w+)\{context="target"\} (\S+)$', re.MULTILINE)
        for name, value in line.findall(server.get("/metrics")):
            assert told[name] == float(value), name
        assert [slot["shared"] for slot in seen["slots"]] == shared

        for slot, said in zip(seen["slots"], server.http.get("/slots").json(), strict=True):
            assert (slot["id"], slot["n_ctx"], slot["task"]) == (said["id"], said["n_ctx"], said["id_task"])
            assert (slot["cells"], slot["phase"]) == (said["n_prompt_tokens"], "idle")
        assert sum(slot["cells"] for slot in seen["slots"]) == memory["cells_used"] > 1000

        # the difference may be up to 16 MiB, because the compute buffers also grow with the number of cells
        grown, committed = resident(server) - taken, memory["committed_bytes"] - before["committed_bytes"]
        assert committed >= 64 * MIB and abs(grown - committed) < 16 * MIB
        for slot_id in (0, 1):
            server.slot("erase", slot_id)
        after = look(server)["memory"][0]
        assert (after["cells_used"], after["shrink_total"] > memory["shrink_total"]) == (0, True)
        gone, given = taken + grown - resident(server), memory["committed_bytes"] - after["committed_bytes"]
        assert given >= 64 * MIB and abs(gone - given) < 16 * MIB


def test_servers_with_key_or_without_slots(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "key", *ARGS, "--api-key", "open,sesame", "--no-slots") as server:
        assert kvtool("top", server.url)[0] == 2
        assert kvtool("top", server.url, "--api-key", "0pen")[0] == 2
        seen = look(server, "--api-key", "sesame")
        assert seen["slots"] is None and seen["memory"][0]["cells_max"] == 4096
    assert kvtool("top", server.url)[0] == 9
    with serving(real, model, tmp_path / "static", *ARGS[:-1]) as server:
        code, document = kvtool("top", server.url)
        assert code == 8 and "without --kv-dynamic" in document["error"]["why"]


def test_sleeping_server_is_not_woken(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("--sleep-idle-seconds", "1")
    with serving(real, model, tmp_path / "log", *ARGS, *args) as running, Server(running.url) as server:
        completion(running, prompt(1, 300), 4, id_slot=0)
        until(lambda: running.http.get("/props").json()["is_sleeping"])
        for _ in range(10):
            seen = server.read()
            assert (seen.state, seen.slots) == (State.ASLEEP, ())
            assert seen.memory[0].committed_bytes == 0 and seen.memory[0].grow_total

        def awake() -> bool:  # this is true for a second after the request
            completion(running, prompt(1, 300), 4, id_slot=0)
            seen = server.read()
            return seen.state == State.AWAKE and any(slot.cells > 300 for slot in seen.slots or ())

        until(awake)


def test_draft_is_shown_with_target(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, "-md", model, "--spec-type", "draft-simple") as server:
        completion(server, prompt(1, 300), 4)
        assert [memory["context"] for memory in look(server)["memory"]] == ["target", "draft"]


@pytest.mark.parametrize("width", [80, 140])
def test_picture_in_terminal(real: Real, model: Path, tmp_path: Path, width: int) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, "--slot-save-path", tmp_path) as server:
        command = [sys.executable, "-m", "kvtool", "top", server.url, "--interval", "0.2"]
        with terminal(width, 30, command) as shown:
            lines = shown.until(lambda lines: lines[1] == "awake   prompt 0.0 t/s   generated 0.0 t/s")
            assert lines[0].startswith(f"{server.url}  {model.name[:20]}")
            assert len(lines[3]) == width and re.fullmatch(r"target  [█▓░]+ +\d+\.\d %", lines[3])

            work = threading.Thread(target=completion, args=(server, prompt(1, 300), 1700), kwargs={"id_slot": 1})
            work.start()
            lines = shown.until(lambda lines: any(re.search(r" generating .* [1-9]\d*\.\d\b", line) for line in lines))
            assert re.fullmatch(r"awake   prompt \d+\.\d t/s   generated [1-9]\d*\.\d t/s", lines[1])
            work.join()

            said = server.http.get("/slots").json()[1]["n_prompt_tokens"]
            numbers = server.http.get("/props").json()["kv_cache"]["target"]
            cells = f"{numbers['cells_used']} used, {numbers['cells']} committed, 4096 reserved"
            lines = shown.until(lambda lines: any(cells in line for line in lines))
            assert any(re.match(rf" +1  idle +{said} +\d+ +2048\b", line) for line in lines)
            assert any(re.search(r"\d\d  target grew (once|\d+ times): \d+ to \d+ cells, \+", line) for line in lines)
            server.slot("erase", 1)
            shown.until(lambda lines: any(re.search(r"  target shrank once: .* cells, -", line) for line in lines))

            server.process.terminate()
            shown.until(lambda lines: lines[1].startswith("waiting for it: ") and "refused" in lines[1])
            shown.keys("C-c")
            lines = shown.until(lambda lines: "exit code 9" in lines)
            assert lines[0] == f"error: no server answers at {server.url}", "the old screen is restored"
            assert shown.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}") == "0 1\n"


def test_interrupt_exits_cleanly(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS) as server:
        command = [sys.executable, "-m", "kvtool", "top", server.url, "--interval", "3600"]
        with terminal(100, 24, command) as shown:
            shown.until(lambda lines: lines[1] == "awake")
            shown.keys("C-c")
            lines = shown.until(lambda lines: "exit code 0" in lines)
            assert lines[1] == "awake" and any(Phase.IDLE in line for line in lines), "the last picture remains"
            assert not any("Traceback" in line for line in lines)
