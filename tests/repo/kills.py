"""Kill kvtool at chosen moments.

An imitated git kills kvtool and itself at its n-th call, before or after the call. So the tests cover the states that a
kill between two calls of git can leave. Only some of these states are tested, to save time; KILL_ALL=1 tests all of
them. Then each command is killed at random times. KVTOOL_KILLS=N kills each command N times (4 by default), and
KVTOOL_SEED chooses other times.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="the fake git is a shell script")

# read when the module is imported, because the tests later remove kvtool's settings from the environment
KILLS = int(os.environ.get("KVTOOL_KILLS", "4"))
SEED = int(os.environ.get("KVTOOL_SEED", "1"))

SCRIPT = """#!/bin/sh
echo >> {counter}
if [ "$(wc -l < {counter})" -eq "${{KILL_AT:-0}}" ]; then
    [ "$KILL_WHEN" = after ] && {git} "$@" > /dev/null 2>&1
    kill -KILL $PPID
    exit 137
fi
exec {git} "$@"
"""


def moments(calls: int) -> list[tuple[int, str]]:
    """Return the moments of the kills: the number of a call of git, and "before" or "after"."""
    every = [(at, when) for at in range(1, calls + 1) for when in ("before", "after")]
    # the step is odd, so that both "before" and "after" occur
    return every if os.environ.get("KILL_ALL") else every[:: max(1, len(every) // 10) | 1]


class Killer:
    """Run kvtool with a git that counts its calls, and that kills kvtool at a given call."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.counter = folder / "count"
        (folder / "git").write_text(SCRIPT.format(counter=self.counter, git=shutil.which("git")))
        (folder / "git").chmod(0o755)
        self.path = f"{folder}{os.pathsep}{os.environ['PATH']}"

    def run(self, *args: str, at: int = 0, when: str = "before") -> int:
        self.counter.write_text("")
        env = {**os.environ, "PATH": self.path, "KILL_AT": str(at), "KILL_WHEN": when}
        return subprocess.run([sys.executable, "-m", "kvtool", *args], env=env, capture_output=True).returncode

    def calls(self, *args: str) -> int:
        """Return the number of calls of git that a command makes."""
        assert self.run(*args) == 0
        return len(self.counter.read_text())


def restore(what: Path, saved: Path) -> None:
    shutil.rmtree(what, ignore_errors=True)
    if saved.exists():
        shutil.copytree(saved, what, symlinks=True)


def kill_family(pid: int) -> None:
    """Kill a process and all of its children, as a power failure would."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # stop it first, so that it cannot start another process in the meantime
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    pairs = list(zip(map(int, listed[::2]), map(int, listed[1::2]), strict=True))
    family = [pid]
    for member in family:
        family += [child for child, parent in pairs if parent == member]
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
