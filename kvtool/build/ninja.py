"""Read what ninja prints: its counters, and the commands that failed with their output. Pure.

ninja without a terminal prints one line per finished step, `[3/220] Building CXX object ...`, below it what the step's
command printed (warnings), and for a failed step

    FAILED: [code=1] src/CMakeFiles/llama.dir/llama.cpp.o
    /usr/bin/c++ -O3 ... -c ../src/llama.cpp
    ../src/llama.cpp:1:1: error: ...

Several steps fail when several run at once. The total changes on the way when CMake runs again.
"""

import re
from dataclasses import dataclass

# Passed as NINJA_STATUS, so that a user's own value cannot change what is parsed here.
STATUS_FORMAT = "[%f/%t] "

_STATUS = re.compile(r"\[(\d+)/(\d+)\] (.*)")
_FAILED = re.compile(r"FAILED: (?:\[code=-?\d+\] )?(.*)")
# what ninja says itself, after the last step
_NINJA = re.compile(r"ninja: (.*)")
# what upstream's scripts/ui-assets.cmake says of llama-server's web page, as a status or in a warning
_PAGE = re.compile(r"[-\s]*UI: (.*)")
_TAIL_LINES = 40


@dataclass(frozen=True)
class Step:
    """One finished step: done of total, and ninja's description of it."""

    done: int
    total: int
    description: str


@dataclass(frozen=True)
class Failure:
    """One failed step: what it should have made, its command line, and what that printed."""

    outputs: str
    command: str
    output: str


class OutputParser:
    """Takes ninja's lines one by one; a Step comes back for a status line, the rest collects.

    steps: how many ran; compiled: how many of them were compilations; page: what was said of llama-server's web page.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.compiled = 0
        self.message = ""
        self.page: list[str] = []
        self._failed: list[list[str]] = []
        self._in_failure = False
        self._tail: list[str] = []

    def feed(self, line: str) -> Step | None:
        if status := _STATUS.match(line):
            self._in_failure = False
            step = Step(int(status[1]), int(status[2]), status[3].strip())
            # [0/1] announces that CMake runs again; it is not a finished step
            self.steps += 1 if step.done else 0
            self.compiled += step.description.startswith("Building ")
            return step
        if failed := _FAILED.match(line):
            self._failed.append([failed[1].strip()])
            self._in_failure = True
            return None
        if said := _NINJA.match(line):
            self.message = said[1]
            return None
        if page := _PAGE.match(line):
            self.page.append(page[1])
        if self._in_failure:
            self._failed[-1].append(line)
        else:
            self._tail = [*self._tail, line][-_TAIL_LINES:]
        return None

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(
            Failure(lines[0], lines[1] if len(lines) > 1 else "", "\n".join(lines[2:]).strip())
            for lines in self._failed
        )

    @property
    def tail(self) -> str:
        """The last lines that belong to no failed step: the reason when ninja or CMake itself failed."""
        return "\n".join(self._tail).strip()


def parse_targets(text: str) -> frozenset[str]:
    """Names one can build, from `ninja -t targets all` (lines `name: rule`); files with a directory are left out."""
    names = (line.rpartition(": ")[0] for line in text.splitlines())
    return frozenset(name for name in names if name and "/" not in name and "\\" not in name)


def short(description: str) -> str:
    """A step's description for a progress bar: `Building CXX object src/CMakeFiles/llama.dir/x.cpp.o` is `x.cpp`."""
    last = description.rsplit(" ", 1)[-1].replace("\\", "/").rsplit("/", 1)[-1]
    return last.removesuffix(".obj").removesuffix(".o") or description
