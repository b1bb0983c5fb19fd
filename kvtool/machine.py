"""What this machine is and has: what a measurement needs to know before it starts, and to say afterwards."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


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
        _huge_pages(),
    )


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _field(path: str, name: str) -> str:
    """The value of the first line "name : value" of a file; "" without it."""
    try:
        for line in Path(path).read_text("utf-8", "replace").splitlines():
            key, colon, value = line.partition(":")
            if colon and key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


def kib_of(path: str, name: str) -> int | None:
    """The bytes of a line "name: 12 kB", as Linux has them; None without it."""
    words = _field(path, name).split()
    return int(words[0]) * 1024 if words else None


def _huge_pages() -> str:
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text("ascii")
    except OSError:
        return ""
    return next((word.strip("[]") for word in modes.split() if word.startswith("[")), "")


def available_memory() -> int | None:
    """Bytes that could be filled without swapping, with a cgroup's limit honoured; None where that is not known."""
    available = kib_of("/proc/meminfo", "MemAvailable")
    if available is None:
        return None
    free = [available]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text("ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text("ascii"))
        if limit != "max":
            free.append(int(limit) - used)
    except (OSError, ValueError):
        pass  # no cgroup v2, or none that limits
    return min(free)


_HEADROOM = 2 * 2**30  # bytes to leave to the rest of the machine


def too_large(needed: int, available: int | None) -> str:
    """Why so many bytes are better not filled, "" when they may be."""
    if available is None or available >= needed + _HEADROOM:
        return ""
    return f"it takes {needed / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are available"
