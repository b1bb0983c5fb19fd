"""Describe this machine and its free memory. Measurements and their reports need that."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True)
class Machine:
    """Hold the description of a machine."""

    system: str
    processor: str
    cores: int
    memory: int | None  # bytes of memory, None if unknown
    pages: str  # setting of transparent huge pages, "" if unknown


def machine() -> Machine:
    """Describe this machine."""
    return Machine(
        f"{platform.system()} {platform.release()}",
        _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores(),
        kib_of("/proc/meminfo", "MemTotal"),
        next((word.strip("[]") for word in _text(_HUGE_PAGES).split() if word.startswith("[")), ""),
    )


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(path: str) -> str:
    """Return the text of a system file; "" if it cannot be read."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    """Return the value of the first line "name : value" of a file; "" if there is no such line."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for key, colon, value in pairs if colon and key.strip() == name), "")


def kib_of(path: str, name: str) -> int | None:
    """Return the size in a line "name: 12 kB" of a file, in bytes; None if there is no such line."""
    words = _field(path, name).split()
    return int(words[0]) * 1024 if words else None


def available_memory() -> int | None:
    """Return the bytes of memory that can be filled without swapping; None if unknown.

    If the cgroup has a memory limit, the result is at most the memory that the limit leaves.

    A cgroup counts cached files as used memory. This function does not count inactive cached files as used, because the
    kernel can free their memory.
    """
    available = kib_of("/proc/meminfo", "MemAvailable")
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if available is None or not (limit.isdigit() and used.isdigit()):  # there is no cgroup v2, or it has no limit
        return available
    lines = (line.split() for line in _text("/sys/fs/cgroup/memory.stat").splitlines())
    inactive = sum(int(words[1]) for words in lines if words[0] == "inactive_file")
    return min(available, int(limit) - max(0, int(used) - inactive))


_HEADROOM = 2 * 2**30  # bytes of memory that are left for other processes


def memory_warning(needed: int, available: int | None) -> str:
    """Return the reason why `needed` bytes of memory should not be filled; "" if they may be."""
    if available is None or available >= needed + _HEADROOM:
        return ""
    return f"it needs {needed / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are available"
