"""What this machine is and has: what a measurement needs to know before it starts, and to say afterwards."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True)
class Machine:
    """A machine in words. memory: bytes it has, None where that is not known; pages: transparent huge pages."""

    system: str
    processor: str
    cores: int
    memory: int | None
    pages: str


def machine() -> Machine:
    return Machine(
        f"{platform.system()} {platform.release()}",
        _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores(),
        kib_of("/proc/meminfo", "MemTotal"),
        next((word.strip("[]") for word in _text(_HUGE_PAGES).split() if word.startswith("[")), ""),
    )


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(path: str) -> str:
    """A file of the system, "" where there is none."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    """The value of the first line "name : value" of a file; "" without it."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for key, colon, value in pairs if colon and key.strip() == name), "")


def kib_of(path: str, name: str) -> int | None:
    """The bytes of a line "name: 12 kB", as Linux has them; None without it."""
    words = _field(path, name).split()
    return int(words[0]) * 1024 if words else None


def available_memory() -> int | None:
    """Bytes that could be filled without swapping, with a cgroup's limit honoured; None where that is not known.

    A cgroup counts the page cache as used; what is inactive of it the kernel gives up.
    """
    available = kib_of("/proc/meminfo", "MemAvailable")
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if available is None or not (limit.isdigit() and used.isdigit()):  # no cgroup v2, or none that limits
        return available
    lines = (line.split() for line in _text("/sys/fs/cgroup/memory.stat").splitlines())
    given_up = sum(int(words[1]) for words in lines if words[0] == "inactive_file")
    return min(available, int(limit) - max(0, int(used) - given_up))


_HEADROOM = 2 * 2**30  # bytes to leave to the rest of the machine


def too_large(needed: int, available: int | None) -> str:
    """Why so many bytes are better not filled, "" when they may be."""
    if available is None or available >= needed + _HEADROOM:
        return ""
    return f"it takes {needed / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are available"
