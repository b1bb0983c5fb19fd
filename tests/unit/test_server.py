"""The llama-server driver against a stand-in: ready, dead, deaf, and never left behind."""

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


def test_requests_at_once_are_answered_in_order_and_the_server_is_ended(binary: Path, tmp_path: Path) -> None:
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
def test_the_server_is_ended_whatever_happens_inside(binary: Path, tmp_path: Path, error: type[BaseException]) -> None:
    pid = 0
    with pytest.raises(error), llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        pid = server.process.pid
        raise error
    assert pid and gone(pid)


def test_a_server_that_dies_says_why(binary: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(VerifyError, match="did not start") as caught,
        llama_server(binary, fakes.model(tmp_path, "dies"), [], tmp_path / "log"),
    ):
        pass
    assert "exit code 1" in caught.value.why
    assert "no such model" in caught.value.output


def test_a_server_that_never_gets_ready_is_given_up(
    binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtool.verify.server.START_SECONDS", 1)
    with (
        pytest.raises(VerifyError, match="did not start") as caught,
        llama_server(binary, fakes.model(tmp_path, "never-ready"), [], tmp_path / "log"),
    ):
        pass
    assert "not ready after 1 s" in caught.value.why


def test_a_port_that_someone_took_is_tried_again_on_another(binary: Path, tmp_path: Path) -> None:
    with llama_server(binary, fakes.model(tmp_path, "port-taken"), [], tmp_path / "log") as server:
        assert server.complete(Request("hello", 1)).content
    assert (tmp_path / "port-taken.starts").read_text() == "xxx"


@pytest.mark.parametrize(
    ("name", "words"), [("http-500", "HTTP 500"), ("nonsense", "HTTP 200"), ("no-tokens", "not a completion")]
)
def test_an_answer_that_is_none_is_an_error(binary: Path, tmp_path: Path, name: str, words: str) -> None:
    with (
        llama_server(binary, fakes.model(tmp_path, name), [], tmp_path / "log") as server,
        pytest.raises(VerifyError, match=words),
    ):
        server.complete(Request("hello", 1))


def test_a_server_that_goes_away_is_an_error_with_its_exit_code(binary: Path, tmp_path: Path) -> None:
    with llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        server.process.kill()
        server.process.wait()
        with pytest.raises(VerifyError, match="did not answer /completion") as caught:
            server.complete(Request("hello", 1))
        assert "exit code -9" in caught.value.why


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_what_it_has_in_memory_is_what_the_system_says(binary: Path, tmp_path: Path) -> None:
    with llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        pages = int(Path(f"/proc/{server.process.pid}/statm").read_text("ascii").split()[1])
        assert server.resident() == pytest.approx(pages * os.sysconf("SC_PAGESIZE"), rel=0.2)
        server.process.kill()
        server.process.wait()
        assert server.resident() is None


def test_a_proxy_of_the_environment_is_not_asked(binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with llama_server(binary, fakes.model(tmp_path, "good"), [], tmp_path / "log") as server:
        assert server.complete(Request("hello", 1)).tokens


def test_free_ports_are_loopback_ports() -> None:
    assert 1024 <= free_port() < 65536


@pytest.mark.parametrize("end", ["\x0b", "\x1c", "\x85", "\u2028"])
def test_what_ends_no_line_of_a_stream(end: str) -> None:
    said = [{"content": f"{end}a{end}"}, {"content": ""}]
    text = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in said) + "data: [DONE]\n\n"
    cut = (bytes([byte]) for byte in text.encode())
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=cut)
    assert list(json_of_events(answer)) == said
