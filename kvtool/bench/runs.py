"""Start kv-bench, process after process, and collect what it says: of memory the medians, as the rows that bars,
tables, files and plots show, and pairs of calls for speed.py.

Sizes in bytes, times in seconds unless a name ends in _us.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvtool import process
from kvtool.bench import speed
from kvtool.bench.speed import Pairs, Speed
from kvtool.console import Console
from kvtool.errors import MeasureError
from kvtool.machine import available_memory, too_large
from kvtool.result import last_document, read

STATIC, COPY, IN_PLACE, OFF = "static", "copy", "in-place", "off"
MODES = (IN_PLACE, COPY, STATIC)
_STORAGE = {COPY: "copy", IN_PLACE: "inplace"}
_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Usage:
    """llama_memory_usage: what the memory of a context reserves, has taken and uses."""

    reserved: int
    committed: int
    used: int
    n_grow: int
    n_shrink: int
    n_bytes_copied: int
    t_grow_us: int
    t_grow_max_us: int


@dataclass(frozen=True)
class Point:
    """One moment. name: created, depth, after-clear; rss, peak: resident bytes of the process, -1 unknown."""

    name: str
    depth: int
    rss: int
    peak: int
    usage: Usage


@dataclass(frozen=True)
class Growth:
    """The growths of one call, and right after it the same bytes without a cache: memcpy of what was copied into fresh
    memory, commit of what was added."""

    depth: int
    seconds: float
    memcpy: float
    commit: float


@dataclass(frozen=True)
class Memory:
    """One process: one context from creation to its end."""

    n_layer: int
    create_seconds: float
    rss_before: int
    points: tuple[Point, ...]
    growths: tuple[Growth, ...]


_Answer = TypeVar("_Answer", Memory, Pairs)


@dataclass(frozen=True)
class KvBench:
    """The program, and the model that it measures with."""

    program: Path
    model: Path
    console: Console

    def memory(self, n_ctx: int, depths: Sequence[int], repeats: int) -> tuple[Mapping[str, Sequence[Memory]], str]:
        """The samples of each mode, and why the static one is left out, if it does not fit into memory.

        The modes take turns, and which of them begins changes: whatever the machine does meets all of them.
        """
        found: dict[str, list[Memory]] = {mode: [] for mode in MODES}
        turns = [MODES[(turn + i) % len(MODES)] for turn in range(repeats) for i in range(len(MODES))]
        skipped = ""
        with self.console.progress("measuring memory", float(len(turns))) as bar:
            for number, mode in enumerate(turns):
                bar.update(number, f"{mode} {number // len(MODES) + 1}")
                if mode == STATIC:
                    skipped = skipped or too_large(found[IN_PLACE][0].points[0].usage.reserved, available_memory())
                if mode != STATIC or not skipped:
                    found[mode].append(self._answer(Memory, mode, n_ctx, depths, "--limit"))
        return found, skipped

    def speeds(self, n_ctx: int, depths: Sequence[int], rounds: int, unpatched: Path | None) -> tuple[Speed, ...]:
        """Both contexts of each comparison in one process, call by call in turns; `rounds` times made anew.

        unpatched: a libllama without the patches, against which the flag off is held.
        """
        modes = (IN_PLACE, COPY, OFF) if unpatched else (IN_PLACE, COPY)
        turns = [(mode, flash) for mode in modes for flash in ("on", "off")]
        out: list[Speed] = []
        with self.console.progress("measuring speed", float(len(turns))) as bar:
            for number, (mode, flash) in enumerate(turns):
                bar.update(number, f"{mode}, flash attention {flash}")
                other = ["--other", str(unpatched)] if mode == OFF else []
                said = self._answer(Pairs, mode, n_ctx, depths, "--rounds", str(rounds), "-fa", flash, *other)
                kinds = (speed.GENERATE, speed.PROMPT, *([speed.CREATE] if mode == OFF else []))
                out += speed.speeds(mode, flash == "on", kinds, said.pairs)
        return tuple(out)

    def _answer(self, kind: type[_Answer], mode: str, n_ctx: int, depths: Sequence[int], *more: str) -> _Answer:
        """What one process says. Raises MeasureError when it fails, is too slow or says what is not understood."""
        dynamic = "on" if mode in _STORAGE else "off"
        argv: list[str | Path] = [self.program, "-m", self.model, "--kv-dynamic", dynamic, "-t", "1"]
        argv += ["-c", str(n_ctx), "-d", ",".join(map(str, depths)), *more]
        env = {"LLAMA_KV_DYNAMIC_STORAGE": _STORAGE.get(mode)}  # None: a variable of the user's shell goes
        done = process.capture(argv, env=env, check=False, timeout=_TIMEOUT, error=MeasureError)
        garbage = {"status": "garbage", "reason": f"no document on its output, exit code {done.returncode}"}
        doc = last_document(done.stdout) or garbage
        if doc.get("status") != "ok":
            raise MeasureError(
                f"kv-bench could not measure {mode}",
                why=f"{doc.get('status')}: {doc.get('reason')}",
                next_step=f"run it by hand: {process.quote(argv)}",
                output=done.stderr[-2000:],
            )
        try:
            return read(kind, doc)
        except (KeyError, TypeError) as err:
            why = f"{type(err).__name__}: {err}"
            raise MeasureError("kv-bench's answer is not understood", why=why, next_step="kvtool build") from err


@dataclass(frozen=True)
class Row:
    """One cache at one moment: created, at a depth (tokens), or after llama_memory_clear() and one more decode.

    resident: what the process grew by; peak: the most of it since the moment before, both None where that is not known;
    growth_seconds: of all growths so far, growth_worst: of one of them, growth_limit: of the same bytes without a
    cache, None where nothing grew.
    """

    mode: str
    moment: str
    depth: int
    n_layer: int
    create_seconds: float
    reserved: int
    committed: int
    used: int
    resident: int | None
    peak: int | None
    growths: int
    shrinks: int
    copied: int
    growth_seconds: float
    growth_worst: float
    growth_limit: float | None


def rows(measured: Mapping[str, Sequence[Memory]]) -> tuple[Row, ...]:
    """Of each mode and moment the medians over its processes."""
    moments = (same for mode in MODES for same in zip(*(_rows(mode, m) for m in measured[mode]), strict=True))
    return tuple(Row(*map(_median, zip(*map(astuple, same), strict=True))) for same in moments)


def at(found: Sequence[Row], mode: str, moment: str, depth: int | None = None) -> Row | None:
    """The row of a mode and a moment, and at a depth if one is given."""
    return next((r for r in found if (r.mode, r.moment) == (mode, moment) and depth in (None, r.depth)), None)


def _median(values: tuple[Any, ...]) -> Any:
    """One of the values; None as soon as one is not known."""
    return None if None in values else statistics.median_low(values)


def _rows(mode: str, said: Memory) -> Iterator[Row]:
    """What one process says, moment by moment."""
    for point in said.points:
        usage = point.usage
        rss, peak = (r - said.rss_before if min(r, said.rss_before) >= 0 else None for r in (point.rss, point.peak))
        before = [g for g in said.growths if point.name == "depth" and g.depth < point.depth]
        limit = sum(g.memcpy if mode == COPY else g.commit for g in before) or None
        sizes = usage.reserved, usage.committed, usage.used, rss, peak
        counts = usage.n_grow, usage.n_shrink, usage.n_bytes_copied
        seconds = 1e-6 * usage.t_grow_us, 1e-6 * usage.t_grow_max_us, limit
        yield Row(mode, point.name, point.depth, said.n_layer, said.create_seconds, *sizes, *counts, *seconds)
