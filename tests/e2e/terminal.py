"""Run a program in a terminal of a chosen size, with tmux. Read its screen, and send keys."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

SECONDS = 60.0  # seconds to wait for the expected screen
_CUT = "8< cut 8<"


class Terminal:
    """Hold a program in a terminal."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def tmux(self, *args: str) -> str:
        return subprocess.run(
            ["tmux", "-u", "-f", os.devnull, "-L", self._socket, *args], check=True, capture_output=True, text=True
        ).stdout

    def until(self, expected: Callable[[list[str]], object]) -> list[str]:
        """Return the lines of the screen as soon as they are as expected, and no line is broken.

        A line can be broken for a moment, because the terminal writes the ^C of a Ctrl-C at the cursor.
        """
        deadline = time.monotonic() + SECONDS
        while True:
            both = self.tmux("capture-pane", "-p", ";", "display-message", "-p", _CUT, ";", "capture-pane", "-p", "-J")
            lines, whole = ([line.rstrip() for line in part.splitlines()] for part in both.split(f"{_CUT}\n"))
            if lines == whole and expected(lines):
                return lines
            assert time.monotonic() < deadline, f"{'' if lines == whole else 'a line is broken'}\n" + "\n".join(lines)
            time.sleep(0.05)

    def keys(self, *names: str) -> None:
        self.tmux("send-keys", *names)


@contextlib.contextmanager
def terminal(width: int, height: int, argv: Sequence[str]) -> Iterator[Terminal]:
    """Run a program in a terminal. After the program, the screen shows `exit code N`."""
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed (apt-get install tmux, brew install tmux)")
    opened = Terminal(f"kvtool-{os.getpid()}-{width}")
    # pytest sets COLUMNS and LINES, and programs use these instead of the size of the terminal
    shell = f"unset COLUMNS LINES; LC_ALL=C.UTF-8 {shlex.join(argv)}; echo exit code $?; sleep 1000"
    try:
        opened.tmux("new-session", "-d", "-x", str(width), "-y", str(height), shell)
        yield opened
    finally:
        opened.tmux("kill-server")
