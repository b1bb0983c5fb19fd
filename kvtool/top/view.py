"""Follow a server over several readings: speeds, growth and freed memory, and whether it answers."""

import time
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from kvtool.errors import KvtoolError
from kvtool.top.reading import Memory, Phase, Reading, Slot, State

KEPT = 100  # number of events that are kept


def size(count: float) -> str:
    """Format a number of bytes, for example as 16.0 MiB."""
    power = next((power for power in range(3) if abs(count) < 1024 ** (power + 1)), 3)
    return f"{count / 1024**power:.1f} {' KMG'[power]}iB" if power else f"{count:.0f} B"


def times(count: int) -> str:
    """Format a count as "once" or "N times"."""
    return "once" if count == 1 else f"{count} times"


def types(memory: Memory) -> str:
    """Format the types of K and V."""
    return f"K {memory.type_k}, V {memory.type_v}"


class Speed(NamedTuple):
    """Hold the tokens per second of a slot."""

    prompt: float = 0.0
    generated: float = 0.0


@dataclass(frozen=True)
class View:
    """Hold the state of the display.

    at: the time of the last reading, in seconds of a clock that never goes back
    speeds: the speed of each slot; None before the second reading
    events: pairs of a time of day and a text, the newest first
    trouble: the reason why the server does not answer now; None if it answers
    since: the time since when the server does not answer
    """

    url: str
    reading: Reading | None = None
    at: float = 0.0
    speeds: dict[int, Speed] | None = None
    events: tuple[tuple[str, str], ...] = ()
    trouble: KvtoolError | None = None
    since: float = 0.0

    def with_reading(self, reading: Reading, now: float) -> Self:
        """Return the view after an answer of the server."""
        told = [f"it answers again after {now - self.since:.0f} s"] if self.trouble else []
        speeds = None
        if self.reading:
            told += changes(self.reading, reading)
            past = {slot.id: slot for slot in self.reading.slots or ()}
            speeds = {slot.id: _speed(past.get(slot.id), slot, now - self.at) for slot in reading.slots or ()}
        return replace(self, reading=reading, at=now, speeds=speeds, events=self._with(told), trouble=None)

    def with_failure(self, err: KvtoolError, now: float) -> Self:
        """Return the view after a request that failed."""
        if self.trouble:
            return replace(self, trouble=err)
        events = self._with([f"it does not answer: {err.why or err.what}"])
        return replace(self, speeds=None, events=events, trouble=err, since=now)

    def _with(self, told: list[str]) -> tuple[tuple[str, str], ...]:
        stamp = time.strftime("%H:%M:%S")
        return (*((stamp, text) for text in told), *self.events)[:KEPT]


def changes(before: Reading, now: Reading) -> list[str]:
    """Return texts about the changes of a server between two readings."""
    told = []
    if before.state != now.state:
        told.append("it fell asleep and freed all memory" if now.state == State.ASLEEP else "it woke up")
    past = {memory.context: memory for memory in before.memory}
    for memory in now.memory:
        old = past.get(memory.context)
        if old and memory.grow_total >= old.grow_total and memory.shrink_total >= old.shrink_total:
            told += _resized(old, memory) + _retyped(old, memory)
        elif old:
            return ["it was restarted"]  # its counters are smaller than before
    return told


def _resized(old: Memory, now: Memory) -> list[str]:
    grown, shrunk = now.grow_total - old.grow_total, now.shrink_total - old.shrink_total
    did = [f"grew {times(grown)}"] * bool(grown) + [f"shrank {times(shrunk)}"] * bool(shrunk)
    if not did:
        return []
    change = now.committed_bytes - old.committed_bytes
    parts = [f"{old.cells} to {now.cells} cells", f"{'-' if change < 0 else '+'}{size(abs(change))}"]
    if copied := now.copied_bytes_total - old.copied_bytes_total:
        parts.append(f"{size(copied)} copied")
    if seconds := now.grow_seconds_total - old.grow_seconds_total:
        parts.append(f"{1000 * seconds:.1f} ms")
    return [f"{now.context} {' and '.join(did)}: {', '.join(parts)}"]


def _retyped(old: Memory, now: Memory) -> list[str]:
    if now.retype_total <= old.retype_total:
        return []
    seconds = now.retype_seconds_total - old.retype_seconds_total
    freed = old.committed_bytes - now.committed_bytes
    did = "freed" if freed >= 0 else "taken"
    return [f"{now.context} {types(old)} became {types(now)}: {size(abs(freed))} {did}, {1000 * seconds:.1f} ms"]


def _speed(before: Slot | None, now: Slot, seconds: float) -> Speed:
    """Return the speed of a slot between two readings; no speed for an idle slot.

    If the slot was idle or had another task at the first reading, all tokens of the current task count.
    """
    if now.phase == Phase.IDLE or seconds <= 0:
        return Speed()
    same = before if before and before.task == now.task and before.phase != Phase.IDLE else None
    prompt, generated = (same.prompt, same.generated) if same else (0, 0)
    return Speed(max(0, now.prompt - prompt) / seconds, max(0, now.generated - generated) / seconds)
