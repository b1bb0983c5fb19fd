"""Parse ninja's output: its counters, and the failed commands with their output. Pure.

Without a terminal, ninja prints one line per finished step, `[3/220] Building CXX object ...`, then the output of the
step's command (warnings), and for a failed step

    FAILED: [code=1] src/CMakeFiles/llama.dir/llama.cpp.o
    /usr/bin/c++ -O3 ... -c ../src/llama.cpp
    ../src/llama.cpp:1:1: error: ...

Several parallel steps can fail. The total changes if CMake runs again.
"""

import re
from collections import deque
from typing import NamedTuple

# Set as NINJA_STATUS, so that a user's own value cannot change the parsed lines.
STATUS_FORMAT = "[%f/%t] "

_STATUS = re.compile(r"\[(\d+)/(\d+)\] (.*)")
_FAILED = re.compile(r"FAILED: (?:\[code=-?\d+\] )?(.*)")
# ninja's own message after the last step
_NINJA = re.compile(r"ninja: (.*)")
# the status or warning of upstream's scripts/ui-assets.cmake about llama-server's web page
_PAGE = re.compile(r"^[-\s]*UI: (.*)")
_TAIL_LINES = 40


class BuildStep(NamedTuple):
    """One finished step: done of total, and ninja's description of it."""

    done: int
    total: int
    description: str


class OutputParser:
    """Parse ninja's lines one by one; return a Step for a status line, and collect the rest.

    steps: the steps that ran
    compiled: how many of them were compilations
    page: the messages about llama-server's web page
    failed: the output of each failed step, with its command line and its messages
    tail: the last lines of no step; the reason if ninja or CMake itself failed
    """

    def __init__(self) -> None:
        self.steps = self.compiled = 0
        self.message = ""
        self.page: list[str] = []
        self.failed: dict[str, list[str]] = {}
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._lines: deque[str] | list[str] = self.tail  # where the next one belongs

    def feed(self, line: str) -> BuildStep | None:
        """Parse one line. Return a step for a status line."""
        if status := _STATUS.match(line):
            self._lines = self.tail
            step = BuildStep(int(status[1]), int(status[2]), status[3].strip())
            # [0/1] announces that CMake runs again; it is not a finished step
            self.steps += 1 if step.done else 0
            self.compiled += step.description.startswith("Building ")
            return step
        if failed := _FAILED.match(line):
            self._lines = self.failed.setdefault(failed[1].strip(), [])
        elif said := _NINJA.match(line):
            self.message = said[1]
        else:
            self.page += _PAGE.findall(line)
            self._lines.append(line)
        return None


def parse_targets(text: str) -> frozenset[str]:
    """Names one can build, from `ninja -t targets all` (lines `name: rule`); files with a directory are left out."""
    names = (line.rpartition(": ")[0] for line in text.splitlines())
    return frozenset(name for name in names if name and "/" not in name and "\\" not in name)


def short(description: str) -> str:
    """Return a step's name for a progress bar: `Building CXX object src/CMakeFiles/llama.dir/x.cpp.o` is `x.cpp`."""
    last = description.rsplit(" ", 1)[-1].replace("\\", "/").rsplit("/", 1)[-1]
    return last.removesuffix(".obj").removesuffix(".o") or description
