"""Test how llama-server is controlled, with an imitated server that starts, dies or hangs. It must always be ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx
import pytest

from kvtool.errors import VerifyError
from kvtool.verify.server import Request, free_port, json_of_events, llama_server, together
from tests import fakes


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    return fakes.programs(tmp_path / "bin") / "llama-server"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_parallel_requests_keep_order(binary: Path, tmp_path: Path) -> None:
    model = fakes.model(tmp_path, "good")
    with llama_server(binary, model, [], tmp_path / "log") as server:
        asked = [Request(f"prompt {i}", 8, i) for i in range(4)]
        answers = together(server.complete, asked)
        assert answers == tuple(server.complete(r) for r in asked)
        assert len({a.content for a in answers}) == 4
        assert answers[0].tokens_evaluated == 2
        assert server.slot("save", 0, "a.bin") == {"n_saved": 7, "n_restored": 7}
        pid = server.process.pid
    assert gone(pid)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_server_ends_after_exception(binary: Path, tmp_path: Path, error: type[BaseException]) -> None:
    pid = 0
    with pytest.raises(error), llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        pid = server.process.pid
        raise error
    assert pid and gone(pid)


def test_dead_server_reports_log(binary: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(VerifyError, match="did not start") as caught,
        llama_server(binary, fakes.model(tmp_path, "dies"), [], tmp_path / "log"),
    ):
        pass
    assert "exit code 1" in caught.value.why
    assert "no such model" in caught.value.output


def test_server_never_ready_times_out(binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.verify.server.START_SECONDS", 1)
    with (
        pytest.raises(VerifyError, match="did not start") as caught,
        llama_server(binary, fakes.model(tmp_path, "never-ready"), [], tmp_path / "log"),
    ):
        pass
    assert "not ready after 1 s" in caught.value.why


def test_port_in_use_is_retried(binary: Path, tmp_path: Path) -> None:
    with llama_server(binary, fakes.model(tmp_path, "port-taken"), [], tmp_path / "log") as server:
        assert server.complete(Request("hello", 1)).content
    assert (tmp_path / "port-taken.starts").read_text() == "xxx"


@pytest.mark.parametrize(
    ("name", "words"), [("http-500", "HTTP 500"), ("nonsense", "HTTP 200"), ("no-tokens", "not a completion")]
)
def test_invalid_answer_is_error(binary: Path, tmp_path: Path, name: str, words: str) -> None:
    with (
        llama_server(binary, fakes.model(tmp_path, name), [], tmp_path / "log") as server,
        pytest.raises(VerifyError, match=words),
    ):
        server.complete(Request("hello", 1))


def test_killed_server_reports_exit_code(binary: Path, tmp_path: Path) -> None:
    with llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        server.process.kill()
        server.process.wait()
        with pytest.raises(VerifyError, match="did not answer /completion") as caught:
            server.complete(Request("hello", 1))
        assert "exit code -9" in caught.value.why


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_resident_memory_matches_proc(binary: Path, tmp_path: Path) -> None:
    with llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        pages = int(Path(f"/proc/{server.process.pid}/statm").read_text("ascii").split()[1])
        assert server.resident() == pytest.approx(pages * os.sysconf("SC_PAGESIZE"), rel=0.2)
        server.process.kill()
        server.process.wait()
        assert server.resident() is None


def test_proxy_variables_are_ignored(binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        assert server.complete(Request("hello", 1)).tokens


def test_free_port_range() -> None:
    assert 1024 <= free_port() < 65536


@pytest.mark.parametrize("end", ["\x0b", "\x1c", "\x85", "\u2028"])
def test_stream_keeps_unicode_line_ends(end: str) -> None:
    said = [{"content": f"{end}a{end}"}, {"content": ""}]
    text = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in said) + "data: [DONE]\n\n"
    cut = (bytes([byte]) for byte in text.encode())
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=cut)
    assert list(json_of_events(answer)) == said
