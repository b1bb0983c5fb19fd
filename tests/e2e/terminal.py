"""A real terminal of a chosen size, by tmux: what a program draws, and the keys that it gets."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

SECONDS = 60.0  # to wait for what is expected
_CUT = "8< cut 8<"


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def tmux(self, *args: str) -> str:
        return subprocess.run(
            ["tmux", "-u", "-f", os.devnull, "-L", self._socket, *args], check=True, capture_output=True, text=True
        ).stdout

    def until(self, expected: Callable[[list[str]], object]) -> list[str]:
        """The lines that stand there as soon as they are as expected, and none of them is broken.

        For a moment one may be: the terminal writes the ^C of a Ctrl-C where the cursor is.
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
    """The program in a terminal; when it ends, its exit code stands there as `exit code N`."""
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed (apt-get install tmux, brew install tmux)")
    opened = Terminal(f"kvtool-{os.getpid()}-{width}")
    # pytest sets COLUMNS and LINES, which programs believe before the terminal
    shell = f"unset COLUMNS LINES; LC_ALL=C.UTF-8 {shlex.join(argv)}; echo exit code $?; sleep 1000"
    try:
        opened.tmux("new-session", "-d", "-x", str(width), "-y", str(height), shell)
        yield opened
    finally:
        opened.tmux("kill-server")
