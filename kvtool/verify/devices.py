"""Where verify puts the cache: host memory, the build's own GPU, or a ggml-rpc-server on loopback.

The RPC server stands in, on any machine, for a device whose memory is not the host's: every byte of the cache goes
through backend calls, as it does with Metal and CUDA.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.build.cmake import RPC_SERVER
from kvtool.errors import VerifyError
from kvtool.verify.server import free_port

_START_SECONDS = 30.0
_NOT_A_GPU = ("CPU", "BLAS", "ACCEL")


@dataclass(frozen=True)
class Lane:
    """Room for one kv-check at a time. args: its arguments for the device.

    ready: called before every run; brings back a device that went away with the run before. Raises VerifyError when
    it cannot.
    """

    args: tuple[str, ...] = ()
    ready: Callable[[], None] = lambda: None


IN_MEMORY = Lane()


@dataclass(frozen=True)
class Device:
    """lanes: one for each kv-check that may run at once; tools: the arguments of llama-completion and llama-server.

    label: appended to the ids of checks, "" for host memory.
    """

    lanes: tuple[Lane, ...]
    label: str = ""
    tools: tuple[str, ...] = ()


def parse_devices(listing: str) -> list[str]:
    """The names in kv-check's --list-devices ("NAME: description" lines) that are accelerators."""
    names = [line.partition(":")[0].strip() for line in listing.splitlines() if ":" in line]
    return [name for name in names if not name.upper().startswith(_NOT_A_GPU)]


@contextlib.contextmanager
def device(backend: str, bin_dir: Path, work: Path, jobs: int) -> Iterator[Device]:
    """The device of a backend, or "rpc", for so many at once. Raises VerifyError when the build sees none here."""
    if backend == "cpu":
        yield Device((IN_MEMORY,) * jobs)
    elif backend == "rpc":
        with contextlib.ExitStack() as ends:
            # a server has one client at a time
            logs = [work / f"rpc-server-{i}.log" for i in range(jobs)]
            servers = [ends.enter_context(_RpcServer(bin_dir / RPC_SERVER, log)) for log in logs]
            for server in servers:
                server.start()
            lanes = [Lane(("--rpc", server.endpoint, "--device", "RPC0"), server.start) for server in servers]
            yield Device(tuple(lanes), "rpc", ("--rpc", servers[0].endpoint, "-dev", "RPC0", "-ngl", "99"))
    else:
        name = _first_accelerator(bin_dir / "kv-check", backend)
        yield Device((Lane(("--device", name)),) * jobs, backend, ("-dev", name, "-ngl", "99"))


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


class _RpcServer(contextlib.ExitStack):
    """A ggml-rpc-server on a loopback port of its own. Upstream's aborts on what its backend has no operation for."""

    def __init__(self, binary: Path, log: Path) -> None:
        super().__init__()
        self._port, self._log = free_port(), log
        self.endpoint = f"127.0.0.1:{self._port}"
        self._argv: list[str | Path] = [binary, *f"-H 127.0.0.1 -t 1 -p {self._port}".split()]
        self._running: process.Process | None = None

    def start(self) -> None:
        """Start it, unless it runs. Raises VerifyError when it does not come up."""
        if self._running is not None and self._running.poll() is None:
            return
        self.close()
        self._running = self.enter_context(process.spawn(self._argv, stdout=self._log))
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return
            if self._running.poll() is not None or time.monotonic() > deadline:
                output = self._log.read_text("utf-8", "replace")[-2000:]
                why = f"exit code {self._running.poll()}"
                raise VerifyError("ggml-rpc-server did not start", why=why, output=output)
            time.sleep(0.05)
