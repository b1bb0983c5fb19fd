"""Choose where the tested cache is: in host memory, in the memory of the build's GPU, or in a local ggml-rpc-server.

The RPC server simulates a device with memory of its own, and works on any machine. As with Metal and CUDA, every byte
of the cache passes through calls of a backend.
"""

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvtool import process
from kvtool.compile.cmake import RPC_SERVER
from kvtool.errors import VerifyError
from kvtool.verify.server import PORT_TRIES, free_port

_START_SECONDS = 30.0
_NOT_A_GPU = ("CPU", "BLAS", "ACCEL")

# A lane runs one kv-check at a time. Calling it returns a context manager with the arguments that choose the device for
# a run. It raises VerifyError if the device does not work.
Lane: TypeAlias = Callable[[], contextlib.AbstractContextManager[tuple[str, ...]]]


def _lane(*args: str) -> contextlib.nullcontext[tuple[str, ...]]:
    return contextlib.nullcontext(args)


IN_MEMORY: Lane = _lane


class Device(NamedTuple):
    """Describe where the cache of the tested programs is.

    lanes: one lane for each kv-check that may run at the same time (see Lane)
    label: the text that is appended to the ids of checks, "" for host memory
    tools: the arguments for llama-completion and llama-server
    """

    lanes: tuple[Lane, ...]
    label: str = ""
    tools: tuple[str, ...] = ()


def parse_devices(listing: str) -> list[str]:
    """Return the names of the accelerators in the output of kv-check's --list-devices ("NAME: description" lines)."""
    names = [line.partition(":")[0].strip() for line in listing.splitlines() if ":" in line]
    return [name for name in names if not name.upper().startswith(_NOT_A_GPU)]


@contextlib.contextmanager
def device(backend: str, bin_dir: Path, work: Path, jobs: int) -> Iterator[Device]:
    """Yield the device of a backend or, for "rpc", of an RPC server. `jobs` checks can run at the same time.

    Raises VerifyError if the build does not see such a device.
    """
    if backend == "cpu":
        yield Device((IN_MEMORY,) * jobs)
    elif backend == "rpc":
        # each lane needs a server of its own, because a server serves one client at a time
        logs = (work / f"rpc-server-{i}.log" for i in range(jobs + 1))
        lanes = [functools.partial(_rpc_server, bin_dir / RPC_SERVER, log) for log in logs]
        with lanes.pop()() as (flag, endpoint, *_):
            yield Device(tuple(lanes), "rpc", (flag, endpoint, "-dev", "RPC0", "-ngl", "99"))
    else:
        name = _first_accelerator(bin_dir / "kv-check", backend)
        yield Device((functools.partial(_lane, "--device", name),) * jobs, backend, ("-dev", name, "-ngl", "99"))


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
def _rpc_server(binary: Path, log: Path) -> Iterator[tuple[str, ...]]:
    """Start a ggml-rpc-server on this machine, and yield the arguments for kv-check.

    Each run starts its own server, because the server aborts on operations that it does not support.
    """
    deadline = time.monotonic() + _START_SECONDS
    for _ in range(PORT_TRIES):
        port = free_port()
        argv: list[str | Path] = [binary, *f"-H 127.0.0.1 -t 1 -p {port}".split()]
        with process.spawn(argv, stdout=log) as running:
            while running.poll() is None and time.monotonic() < deadline:
                if _listens(port) and running.poll() is None:  # if our server has ended, another program uses the port
                    yield "--rpc", f"127.0.0.1:{port}", "--device", "RPC0"
                    return
                time.sleep(0.02)
            ended = running.poll()
        why = "it does not listen" if ended is None else f"exit code {ended}"
        if ended is None:
            break
    output = log.read_text("utf-8", "replace")[-2000:]
    raise VerifyError("ggml-rpc-server did not start", why=why, output=output)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
