"""Parse ninja's output: the numbers of its steps, and the commands that failed with their output. Nothing is run here.

Without a terminal, ninja prints one line for each finished step, such as `[3/220] Building CXX object ...`. The output
of the step's command (warnings) follows. For a step that failed, ninja prints:

    FAILED: [code=1] src/CMakeFiles/llama.dir/llama.cpp.o
    /usr/bin/c++ -O3 ... -c ../src/llama.cpp
    ../src/llama.cpp:1:1: error: ...

Several steps that run in parallel can fail. The total number of steps changes if CMake runs again.
"""

import re
from collections import deque
from typing import NamedTuple

# kvtool sets NINJA_STATUS to this, so that the user's value of this variable does not change the lines.
STATUS_FORMAT = "[%f/%t] "

_STATUS = re.compile(r"\[(\d+)/(\d+)\] (.*)")
_FAILED = re.compile(r"FAILED: (?:\[code=-?\d+\] )?(.*)")
# message of ninja itself, after the last step
_NINJA = re.compile(r"ninja: (.*)")
# status or warning about llama-server's web page, from upstream's scripts/ui-assets.cmake
_PAGE = re.compile(r"^[-\s]*UI: (.*)")
_TAIL_LINES = 40


class BuildStep(NamedTuple):
    """Hold one finished step: its number, the total number of steps, and ninja's description."""

    done: int
    total: int
    description: str


class OutputParser:
    """Parse ninja's lines one by one. Return a BuildStep for a status line, and collect the other lines.

    steps: the number of steps that ran
    compiled: the number of steps that compiled a file
    page: the messages about llama-server's web page
    failed: by step, the output of a step that failed: its command and its messages
    tail: the last lines that belong to no step; they have the reason if ninja or CMake itself fails
    """

    def __init__(self) -> None:
        self.steps = self.compiled = 0
        self.message = ""
        self.page: list[str] = []
        self.failed: dict[str, list[str]] = {}
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._lines: deque[str] | list[str] = self.tail  # list to which the next line is added

    def feed(self, line: str) -> BuildStep | None:
        """Parse one line. Return a step for a status line."""
        if status := _STATUS.match(line):
            self._lines = self.tail
            step = BuildStep(int(status[1]), int(status[2]), status[3].strip())
            # [0/1] only announces that CMake runs again
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
    """Return the names of the targets, from the output of `ninja -t targets all`.

    Each line of this output is `name: rule`. A name with a slash is the path of a file, and is left out.
    """
    names = (line.rpartition(": ")[0] for line in text.splitlines())
    return frozenset(name for name in names if name and "/" not in name and "\\" not in name)


def short(description: str) -> str:
    """Return a short name of a step: `x.cpp` for `Building CXX object src/CMakeFiles/llama.dir/x.cpp.o`."""
    last = description.rsplit(" ", 1)[-1].replace("\\", "/").rsplit("/", 1)[-1]
    return last.removesuffix(".obj").removesuffix(".o") or description
