"""Run other programs. The only importer of subprocess.

Use capture() for short commands whose output is data, stream() for long commands whose lines drive a progress bar, and
spawn() for servers. The executable is resolved first, so a missing program is a clear error and never a traceback. The
error of a failed capture() contains the output. stream() has passed the output on already, so its caller decides.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvtool.errors import KvtoolError, MissingToolError

Process: TypeAlias = subprocess.Popen[bytes]
Environment: TypeAlias = Mapping[str, str | None]  # merged over os.environ; None removes a variable

_observer: Callable[[Sequence[str]], None] | None = None


def on_command(callback: Callable[[Sequence[str]], None] | None) -> None:
    """Call `callback` with each argv before it runs (console.py echoes it when verbose)."""
    global _observer
    _observer = callback


@dataclass(frozen=True)
class Completed:
    """A finished process."""

    returncode: int
    stdout: str
    stderr: str = ""  # "" if it was not captured
    raw: bytes = b""  # captured stdout as bytes


def redact_urls(text: str) -> str:
    """Remove logins from the URLs in a text, because output may end up in a public log or issue."""
    return re.sub(r"""(?i)\b((?:https?|ftps?|socks\w*)://)[^/?#\s"'<>,]*@""", r"\1", text)


def quote(argv: Sequence[str | Path]) -> str:
    """Return the command as a user would type it, without logins in URLs."""
    return redact_urls(shlex.join(str(a) for a in argv))


def this_python() -> str:
    """Return the running Python as a user would type it. Windows shells quote differently."""
    return sys.executable if sys.platform == "win32" else quote([sys.executable])


def pip_install() -> str:
    """Return the start of the command that installs packages for the running Python."""
    return f"{this_python()} -m pip install"


def which(name: str) -> Path | None:
    """Find a program on PATH, then next to the running Python: an inactive venv has cmake and ninja."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return Path(found) if found else None


def program_in(name: str, *folders: Path) -> Path | None:
    """Find a program in the first folder that has it, also with the suffix .exe."""
    files = (folder / file for folder in folders for file in (name, f"{name}.exe"))
    return next((file for file in files if file.is_file()), None)


def require_program(folder: Path, name: str, error: type[KvtoolError], next_step: str) -> Path:
    """Find a program in a folder; raise `error` if it is not there."""
    if found := program_in(name, folder):
        return found
    raise error(f"{name} is not in {folder}", next_step=next_step)


def _resolve(argv: Sequence[str | Path]) -> list[str]:
    out = [str(a) for a in argv]
    if Path(out[0]).name == out[0]:
        found = which(out[0])
        if found is None:
            why = f"it is not on PATH and not next to {sys.executable}"
            raise MissingToolError(f"{out[0]} is not installed", why=why)
        out[0] = str(found)
    if _observer is not None:
        _observer(out)
    return out


def capture(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Environment | None = None,
    input: str | bytes | Path | None = None,
    check: bool = True,
    error: type[KvtoolError] = KvtoolError,
    timeout: float | None = None,
    on_tick: Callable[[], None] | None = None,
) -> Completed:
    """Run to the end and return both outputs as text (UTF-8, undecodable bytes as surrogates, so nothing is lost).

    `env` is merged over os.environ. With `check`, a non-zero exit or a timeout (seconds) raises `error` with the
    output. `input` is text, bytes, or a file to read from. `on_tick` is called a few times a second. An exception or
    Ctrl-C ends the process and its children.
    """
    args = _resolve(argv)
    data = input.encode("utf-8", "surrogateescape") if isinstance(input, str) else input
    with (
        input.open("rb") if isinstance(input, Path) else contextlib.nullcontext(subprocess.PIPE) as stdin,
        _started(args, env, cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        try:
            out_bytes, err_bytes = _communicate(process, data if isinstance(data, bytes) else None, timeout, on_tick)
        except subprocess.TimeoutExpired as err:
            raise error(f"{Path(args[0]).name} did not finish within {timeout:g} s", why=quote(argv)) from err
    out, text = out_bytes.decode("utf-8", "surrogateescape"), err_bytes.decode("utf-8", "surrogateescape")
    if check and process.returncode != 0:
        what = f"{Path(args[0]).name} failed with exit code {process.returncode}"
        raise error(what, why=quote(argv), output=(text + out).strip())
    return Completed(process.returncode, out, text, out_bytes)


@contextlib.contextmanager
def _started(args: Sequence[str], env: Environment | None = None, **more: Any) -> Iterator[Process]:
    """Start a process in a session of its own. An exception in the block ends the process and its children.

    The session has no terminal. In a process group of its own with a terminal, a program that asks for input (ssh for a
    passphrase) would be stopped forever.
    """
    merged = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    with _signals_wait() as no_more:
        try:
            process = subprocess.Popen(
                args,
                env=merged,
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                **more,
            )
        except OSError as err:
            raise MissingToolError(f"cannot run {args[0]}", why=str(err)) from err
        try:
            no_more()
            yield process
        except BaseException:
            _end(process)
            raise


@contextlib.contextmanager
def _signals_wait() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C and kill until the yielded function is called: inside Popen() they would leak a child.

    The signals are not blocked, because a child would inherit that. Only the main thread receives them.
    """
    here = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if here and hasattr(signal, name)]
    # leave ignored signals alone: a child inherits that, too
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    came: list[int] = []

    def no_more() -> None:
        while handlers:
            signal.signal(*handlers.popitem())
        while came:
            signal.raise_signal(came.pop())

    try:
        for number in handlers:
            signal.signal(number, lambda got, _: came.append(got))
        yield no_more
    finally:
        no_more()


def _communicate(
    process: Process, data: bytes | None, timeout: float | None, on_tick: Callable[[], None] | None
) -> tuple[bytes, bytes]:
    if on_tick is None:  # one call: after a timeout, CPython 3.11 does not write the rest of the input
        return process.communicate(data, timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            return process.communicate(data, 0.2)
        except subprocess.TimeoutExpired:
            if deadline is not None and time.monotonic() > deadline:
                raise
            on_tick()


def _end(process: Process) -> None:
    """End a process and its children. Never raises."""
    if sys.platform == "win32":
        if process.poll() is None:
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True)
            process.wait()
        return
    # the leader may have exited; KILL also ends children that ignored TERM
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)


def stream(argv: Sequence[str | Path], *, env: Environment | None = None, on_line: Callable[[str], None]) -> Completed:
    """Run to the end and pass each line of merged stdout and stderr to `on_line`. Does not check the exit code.

    Completed.stdout contains all lines. An exception in `on_line` or Ctrl-C ends the whole process group.
    """
    args = _resolve(argv)
    collected: list[str] = []
    with _started(args, env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        with io.TextIOWrapper(process.stdout, "utf-8", "replace") as output:  # progress counters end lines with CR
            for line in output:
                collected.append(line.rstrip("\n"))
                on_line(collected[-1])
        process.wait()
    return Completed(process.returncode, "\n".join(collected))


@contextlib.contextmanager
def spawn(argv: Sequence[str | Path], *, stdout: Path) -> Iterator[Process]:
    """Run a process in the background with its output in the file `stdout`; end it and its children on exit."""
    args = _resolve(argv)
    with (
        stdout.open("wb") as log,
        _started(args, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        yield process
        _end(process)
