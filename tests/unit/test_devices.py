"""Test the device of kvtool verify: ggml-rpc-servers that it starts and ends, or the GPU of a build."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.errors import VerifyError
from kvtool.verify import devices, server
from tests import fakes
from tests.unit.verifying import document, run, use_text_models


def test_rpc_starts_and_ends_servers(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_text_models(here, monkeypatch)
    seen: list[devices.Device] = []
    real = devices.device

    @contextlib.contextmanager
    def spy(backend: str, bin_dir: Path, work: Path, jobs: int) -> Iterator[devices.Device]:
        with real(backend, bin_dir, work, jobs) as on:
            seen.append(on)
            yield on

    monkeypatch.setattr(devices, "device", spy)
    assert run("--quick", "--rpc", "--jobs", "2", "--json") == 0
    ids = [f["id"] for f in document(capsys)["findings"]]
    assert ids[0] == "kv-check/llama-dense/fa-on/quick/rpc"
    assert "server/llama-dense/single/rpc" in ids
    # each job needs its own server, because a server accepts one client at a time
    ports = set()
    for lane in seen[0].lanes:
        with lane() as args:
            host, port = args[1].split(":")
            assert args == ("--rpc", f"{host}:{port}", "--device", "RPC0")
            socket.create_connection((host, int(port)), timeout=5).close()
        ports.add(port)
        with pytest.raises(OSError):
            socket.create_connection((host, int(port)), timeout=1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(seen[0].tools[1].split(":")[1])), timeout=1)
    assert len(ports) == 2


def test_killed_rpc_server_is_replaced(here: Path, tmp_path: Path) -> None:
    with devices.device("rpc", here / "bin", tmp_path, 1) as on:
        (lane,) = on.lanes
        with lane() as args:
            host, port = args[1].split(":")
            with socket.create_connection((host, int(port)), timeout=5) as client:
                client.sendall(b"abort")
                client.recv(1)
        with lane() as again:
            host, port = again[1].split(":")
            socket.create_connection((host, int(port)), timeout=5).close()


def test_rpc_port_in_use_is_retried(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listens = devices._listens

    def late(port: int) -> bool:
        time.sleep(1)  # wait until the server has noticed that the port is in use
        return listens(port)

    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = iter([taken, server.free_port(), server.free_port()])
        monkeypatch.setattr(devices, "free_port", lambda: next(ports))
        monkeypatch.setattr(devices, "_listens", late)
        with devices.device("rpc", here / "bin", tmp_path, 0) as on:
            assert int(on.tools[1].split(":")[1]) != taken


@pytest.mark.usefixtures("here")
def test_dead_rpc_server_is_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_RPC", "dies")
    assert run("--quick", "--rpc") == 8
    captured = capsys.readouterr()
    assert "ggml-rpc-server did not start" in captured.err
    assert "cannot allocate" in captured.err


def test_silent_rpc_server_is_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.program(tmp_path / "ggml-rpc-server", "import time; time.sleep(60)")
    monkeypatch.setattr(devices, "_START_SECONDS", 0.2)
    ports = iter([server.free_port()])  # only one port, so that a second attempt would fail
    monkeypatch.setattr(devices, "free_port", lambda: next(ports))
    with pytest.raises(VerifyError, match="it does not listen"), devices.device("rpc", tmp_path, tmp_path, 0):
        pass


@pytest.mark.usefixtures("here")
def test_gpu_build_uses_its_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_TOYS", "same@llama")
    monkeypatch.setenv("FAKE_DEVICES", "BLAS: Accelerate\nCPU: M4\nMTL0: Apple M4\nMTL1: another")
    assert run("--models", "*", "--metal", "--json") == 0
    assert document(capsys)["findings"][0]["id"] == "kv-check/same@llama/fa-on/metal"
    monkeypatch.setenv("FAKE_DEVICES", "BLAS: Accelerate\nCPU: M4")
    assert run("--models", "*", "--metal") == 8
    assert "the metal build sees no device here" in capsys.readouterr().err
    assert run("--models", "*", "--metal", "--cuda") == 2


@pytest.mark.parametrize(
    ("listing", "names"),
    [("CPU: x\nCUDA0: H200\nCUDA1: H200", ["CUDA0", "CUDA1"]), ("", []), ("BLAS: y\nno devices", [])],
)
def test_parse_devices_excludes_processors(listing: str, names: list[str]) -> None:
    assert devices.parse_devices(listing) == names
