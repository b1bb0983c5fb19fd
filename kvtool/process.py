"""Run other programs. No other module imports subprocess.

capture() is for short commands whose output is data. stream() is for long commands whose lines move a progress bar.
spawn() is for servers. The path of the program is searched for first, so a missing program gives a clear error and
never a traceback. If capture() fails, its error contains the output. stream() has already passed the output to its
caller, so the caller decides what is an error.
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
Environment: TypeAlias = Mapping[str, str | None]  # changes of os.environ; None removes a variable

_observer: Callable[[Sequence[str]], None] | None = None


def on_command(callback: Callable[[Sequence[str]], None] | None) -> None:
    """Set a function that is called with each command before the command is run.

    With --verbose, console.py passes a function that prints the commands.
    """
    global _observer
    _observer = callback


@dataclass(frozen=True)
class Completed:
    """Hold the result of a process that has ended."""

    returncode: int
    stdout: str
    stderr: str = ""  # stderr as text, "" if it was not captured
    raw: bytes = b""  # stdout as bytes, if it was captured


def redact_urls(text: str) -> str:
    """Remove user names and passwords from the URLs in a text.

    The text may be published, for example in a log or an issue.
    """
    return re.sub(r"""(?i)\b((?:https?|ftps?|socks\w*)://)[^/?#\s"'<>,]*@""", r"\1", text)


def quote(argv: Sequence[str | Path]) -> str:
    """Return a command as a user would type it. URLs are printed without user names and passwords."""
    return redact_urls(shlex.join(str(a) for a in argv))


def this_python() -> str:
    """Return the path of the running Python as a user would type it.

    On Windows, the path is not quoted, because the shells there have other rules for quotes.
    """
    return sys.executable if sys.platform == "win32" else quote([sys.executable])


def pip_install() -> str:
    """Return "PYTHON -m pip install", to which the names of packages are appended, for the running Python."""
    return f"{this_python()} -m pip install"


def which(name: str) -> Path | None:
    """Find a program on PATH, then next to the running Python.

    A virtual environment that is not active has cmake and ninja there.
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return Path(found) if found else None


def program_in(name: str, *folders: Path) -> Path | None:
    """Find a program in the first folder that has it, with or without the suffix .exe."""
    files = (folder / file for folder in folders for file in (name, f"{name}.exe"))
    return next((file for file in files if file.is_file()), None)


def require_program(folder: Path, name: str, error: type[KvtoolError], next_step: str) -> Path:
    """Return the path of a program in a folder. Raise `error` if it does not exist."""
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
    """Run a program to its end, and return its stdout and stderr as text.

    The text is decoded as UTF-8. Bytes that are not UTF-8 become surrogates, so nothing is lost. An exception, or
    Ctrl-C, ends the program and its children.

    env: changes of os.environ
    input: a text, bytes, or a file that the program reads as stdin
    check: raise `error` with the output if the exit code is not 0
    timeout: the seconds after which `error` is raised, with or without `check`
    on_tick: called a few times in a second
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
    """Start a process in a session of its own. If the block raises an exception, end the process and its children.

    A new session has no terminal. A process group with a terminal is not enough: a program that asks for input there,
    such as ssh for a passphrase, would be stopped forever.
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
    """Delay Ctrl-C and kill signals until the yielded function is called.

    Without the delay, a signal could raise an exception inside of Popen(), which would leave a child process behind.
    The signals are not blocked, because the child would inherit the blocked signals. Only the main thread receives
    signals.
    """
    here = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if here and hasattr(signal, name)]
    # leave ignored signals as they are, because the child must inherit that they are ignored
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
    # use one call without on_tick: CPython 3.11 does not write the rest of the input after a timeout
    if on_tick is None:
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
    """End a process and its children. Never raises an exception."""
    if sys.platform == "win32":
        if process.poll() is None:
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True)
            process.wait()
        return
    # The process itself may have exited. SIGKILL also ends children that ignored SIGTERM.
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)


def stream(argv: Sequence[str | Path], *, env: Environment | None = None, on_line: Callable[[str], None]) -> Completed:
    """Run a program to its end, and call `on_line` with each line of its stdout and stderr.

    The exit code is not checked.

    Completed.stdout has all lines. An exception in `on_line`, or Ctrl-C, ends the program and its children.
    """
    args = _resolve(argv)
    collected: list[str] = []
    with _started(args, env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        # the lines of progress counters end in CR, which this stream treats as a line end
        with io.TextIOWrapper(process.stdout, "utf-8", "replace") as output:
            for line in output:
                collected.append(line.rstrip("\n"))
                on_line(collected[-1])
        process.wait()
    return Completed(process.returncode, "\n".join(collected))


@contextlib.contextmanager
def spawn(argv: Sequence[str | Path], *, stdout: Path) -> Iterator[Process]:
    """Run a process in the background, with its output in the file `stdout`. On exit, end it and its children."""
    args = _resolve(argv)
    with (
        stdout.open("wb") as log,
        _started(args, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        yield process
        _end(process)
