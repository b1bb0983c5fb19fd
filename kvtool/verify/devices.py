"""Where verify puts the cache: host memory, the build's own GPU, or a ggml-rpc-server on loopback.

The RPC server stands in, on any machine, for a device whose memory is not the host's: every byte of the cache goes
through backend calls, as it does with Metal and CUDA.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.verify.server import free_port

_START_SECONDS = 30.0
_NOT_A_GPU = ("CPU", "BLAS", "ACCEL")


@dataclass(frozen=True)
class Device:
    """lanes: the arguments of each kv-check that may run at once; tools: those of llama-completion and llama-server.

    label: appended to the ids of checks, "" for host memory.
    """

    lanes: tuple[tuple[str, ...], ...]
    label: str = ""
    tools: tuple[str, ...] = ()


def parse_devices(listing: str) -> list[str]:
    """The names in kv-check's --list-devices ("NAME: description" lines) that are accelerators."""
    names = [line.partition(":")[0].strip() for line in listing.splitlines() if ":" in line]
    return [name for name in names if not name.upper().startswith(_NOT_A_GPU)]


@contextlib.contextmanager
def device(backend: str, bin_dir: Path, work: Path, jobs: int) -> Iterator[Device]:
    """The device of a build, for so many at once. Raises VerifyError when the build sees none here."""
    if backend == "cpu":
        yield Device(((),) * jobs)
    elif backend == "rpc":
        with contextlib.ExitStack() as servers:
            # a server has one client at a time
            endpoints = [
                servers.enter_context(_rpc_server(bin_dir / "ggml-rpc-server", work / f"rpc-server-{i}.log"))
                for i in range(jobs)
            ]
            yield Device(
                tuple(("--rpc", endpoint, "--device", "RPC0") for endpoint in endpoints),
                "rpc",
                ("--rpc", endpoints[0], "-dev", "RPC0", "-ngl", "99"),
            )
    else:
        name = _first_accelerator(bin_dir / "kv-check", backend)
        yield Device((("--device", name),) * jobs, backend, ("-dev", name, "-ngl", "99"))


def _first_accelerator(kv_check: Path, backend: str) -> str:
    listed = process.capture([kv_check, "--list-devices"], check=False, error=VerifyError, timeout=60)
    names = parse_devices(listed.stdout)
    if not names:
        raise VerifyError(
            f"the {backend} build sees no device here",
            why=f"kv-check --list-devices names none: {listed.stdout.strip() or 'nothing'}",
            next_step="verify on a machine that has one; kvtool verify --cpu tests the host's memory",
            output=listed.stderr[-2000:],
        )
    return names[0]


@contextlib.contextmanager
def _rpc_server(binary: Path, log: Path) -> Iterator[str]:
    """A ggml-rpc-server on a free loopback port; "HOST:PORT". Ended on the way out."""
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    argv: list[str | Path] = [binary, "-H", "127.0.0.1", "-p", str(port)]
    with process.spawn(argv, stdout=log) as running:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if running.poll() is not None or time.monotonic() > deadline:
                output = log.read_text("utf-8", "replace")[-2000:]
                raise VerifyError("ggml-rpc-server did not start", why=f"exit code {running.poll()}", output=output)
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
