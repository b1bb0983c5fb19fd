"""Test how processes are run: output, failure and interruption. No process may be left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtool import process
from kvtool.errors import BuildError, KvtoolError, MissingToolError

PY = sys.executable
posix = pytest.mark.skipif(sys.platform == "win32", reason="process groups of POSIX")


def test_capture_both_outputs_and_input(tmp_path: Path) -> None:
    code = "import sys; print(sys.stdin.read()); print('e', file=sys.stderr)"
    done = process.capture([PY, "-c", code], input="in")
    assert (done.returncode, done.stdout, done.stderr) == (0, "in\n", "e\n")
    (tmp_path / "file").write_bytes(b"from a file")
    assert process.capture([PY, "-c", code], input=tmp_path / "file").stdout == "from a file\n"


def test_late_reader_gets_input() -> None:
    late = "import sys, time; time.sleep(0.5); print(len(sys.stdin.read()))"
    assert process.capture([PY, "-c", late], input="x" * 2**20).stdout == f"{2**20}\n"


def test_capture_keeps_binary_bytes() -> None:
    done = process.capture([PY, "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)))"])
    assert done.stdout.encode("utf-8", "surrogateescape") == bytes(range(256))
    assert (
        process.capture([PY, "-c", "import sys; print(len(sys.stdin.buffer.read()))"], input=done.stdout).stdout
        == "256\n"
    )


def test_environment_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAYS", "1")
    monkeypatch.setenv("GOES", "1")
    code = "import os; print(os.environ.get('STAYS'), os.environ.get('GOES'), os.environ.get('NEW'))"
    assert process.capture([PY, "-c", code], env={"GOES": None, "NEW": "2"}).stdout == "1 None 2\n"


def test_failure_shows_output() -> None:
    with pytest.raises(BuildError) as caught:
        process.capture([PY, "-c", "import sys; print('seen'); sys.exit(3)"], error=BuildError)
    assert "exit code 3" in caught.value.what and caught.value.output == "seen"
    assert process.capture([PY, "-c", "raise SystemExit(3)"], check=False).returncode == 3


def test_timeout_kills_process() -> None:
    with pytest.raises(KvtoolError, match="did not finish"):
        process.capture([PY, "-c", "import time; time.sleep(60)"], timeout=0.2)


def test_missing_program_is_named() -> None:
    with pytest.raises(MissingToolError, match="no-such-program is not installed"):
        process.capture(["no-such-program"])
    with pytest.raises(MissingToolError):
        process.capture([Path("/no/such/program")])


def test_which_searches_python_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process.which(Path(sys.executable).name) is not None
    assert process.which("no-such-program") is None


def test_ticks_while_running(tmp_path: Path) -> None:
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    process.capture([PY, "-c", code, tmp_path / "ticked"], on_tick=(tmp_path / "ticked").touch, timeout=60)


def test_stream_splits_at_line_ends() -> None:
    code = r"import sys; sys.stdout.write('a\rb\nc\r\nd'); sys.stdout.flush(); sys.stderr.write('\ne')"
    lines: list[str] = []
    done = process.stream([PY, "-c", code], on_line=lines.append)
    assert lines == ["a", "b", "c", "d", "e"]
    assert (done.returncode, done.stdout) == (0, "a\nb\nc\nd\ne")


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 30  # the process would run for 60 seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # there is no /proc, or the process ended just now
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        time.sleep(0.05)
    return False


FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\ntime.sleep(60)\n"
)


@posix
def test_stream_exception_kills_children() -> None:
    pids: list[int] = []

    def stop(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.stream([PY, "-c", FAMILY], on_line=stop)
    assert gone(pids[0])


@posix
def test_spawn_kills_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process.spawn([PY, "-c", FAMILY], stdout=log) as running:
        while not log.read_text().strip():
            assert running.poll() is None
        child = int(log.read_text())
    assert running.returncode is not None and gone(child)


@posix
def test_children_have_no_terminal() -> None:
    asks = "from kvtool import process; process.capture(['sh', '-c', 'read x </dev/tty'], check=False)"
    on_a_terminal = "import pty, sys; pty.spawn([sys.executable, '-c', sys.argv[1]])"
    subprocess.run([PY, "-c", on_a_terminal, asks], stdin=subprocess.DEVNULL, timeout=30, check=True)


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("way", ["capture", "stream", "spawn"])
def test_signal_during_start_kills_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, number: signal.Signals
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)
            signal.raise_signal(number)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGTERM, stop)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored if this runs as a background job
    argv = [PY, "-c", "import time; time.sleep(60)"]
    try:
        with pytest.raises(KeyboardInterrupt):
            if way == "capture":
                process.capture(argv)
            elif way == "stream":
                process.stream(argv, on_line=stop)
            else:
                with process.spawn(argv, stdout=tmp_path / "log"):
                    pytest.fail("the program was started")
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ignored)
    assert started[0].returncode is not None and gone(started[0].pid)


@posix
def test_start_in_thread_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ask = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, signal.pthread_sigmask(0, ()))"
        with ThreadPoolExecutor(1) as pool:
            assert process.capture([PY, "-c", ask]).stdout == "True set()\n"
            assert pool.submit(process.capture, [PY, "-c", ask]).result().stdout == "True set()\n"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_on_command_sees_each_command() -> None:
    seen: list[str] = []
    process.on_command(lambda argv: seen.append(process.quote(argv)))
    process.capture([PY, "-c", "print('a b')"])
    assert len(seen) == 1 and seen[0].endswith("""-c 'print('"'"'a b'"'"')'""")
