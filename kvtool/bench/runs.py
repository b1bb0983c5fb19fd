"""Start kv-bench, process after process, and collect what it says: of memory the medians, as the rows that bars,
tables, files and plots show, and pairs of calls for speed.py.

Sizes in bytes, times in seconds unless a name ends in _us.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvtool import process
from kvtool.bench import speed
from kvtool.bench.speed import Pair, Speed
from kvtool.console import Console
from kvtool.errors import MeasureError
from kvtool.machine import available_memory, too_large
from kvtool.result import last_document, read

STATIC, COPY, IN_PLACE, OFF = "static", "copy", "in-place", "off"
MODES = (IN_PLACE, COPY, STATIC)
_STORAGE = {COPY: "copy", IN_PLACE: "inplace"}
_TIMEOUT = 1800.0

_T = TypeVar("_T")


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


def rows_of(mode: str, said: Mapping[str, Any]) -> list[Row]:
    """What one process says, moment by moment. Raises KeyError or TypeError where it says something else.

    -1 is resident memory that is not known. Right after each growth the same bytes were taken without a cache: memcpy
    of what was copied into fresh memory, commit of what was added.
    """
    found, before = [], said["rss_before"]
    for point in said["points"]:
        name, depth, usage = point["name"], point["depth"], point["usage"]
        rss, peak = (r - before if min(r, before) >= 0 else None for r in (point["rss"], point["peak"]))
        grown = [growth for growth in said["growths"] if name == "depth" and growth["depth"] < depth]
        limit = sum(growth["memcpy" if mode == COPY else "commit"] for growth in grown) or None
        sizes = usage["reserved"], usage["committed"], usage["used"], rss, peak
        counts = usage["n_grow"], usage["n_shrink"], usage["n_bytes_copied"]
        seconds = 1e-6 * usage["t_grow_us"], 1e-6 * usage["t_grow_max_us"], limit
        found.append(Row(mode, name, depth, said["n_layer"], said["create_seconds"], *sizes, *counts, *seconds))
    return found


def medians(samples: Sequence[Sequence[Row]]) -> list[Row]:
    """Of each moment, over processes of one mode; None as soon as one is not known."""

    def median(values: tuple[Any, ...]) -> Any:
        return None if None in values else statistics.median_low(values)

    return [Row(*map(median, zip(*map(astuple, same), strict=True))) for same in zip(*samples, strict=True)]


def at(found: Sequence[Row], mode: str, moment: str, depth: int | None = None) -> Row | None:
    """The row of a mode and a moment, and at a depth if one is given."""
    return next((r for r in found if (r.mode, r.moment) == (mode, moment) and depth in (None, r.depth)), None)


@dataclass(frozen=True)
class KvBench:
    """The program, and the model that it measures with."""

    program: Path
    model: Path
    console: Console

    def memory(self, n_ctx: int, depths: Sequence[int], repeats: int) -> tuple[tuple[Row, ...], str]:
        """The medians of each mode, and why the static one is left out, if it does not fit into memory.

        The modes take turns, and which of them begins changes: whatever the machine does meets all of them.
        """
        found: dict[str, list[list[Row]]] = {mode: [] for mode in MODES}
        turns = [MODES[(turn + i) % len(MODES)] for turn in range(repeats) for i in range(len(MODES))]
        skipped = ""
        with self.console.progress("measuring memory", len(turns)) as bar:
            for number, mode in enumerate(turns):
                bar.update(number, f"{mode} {number // len(MODES) + 1}")
                if mode == STATIC:
                    skipped = skipped or too_large(found[IN_PLACE][0][0].reserved, available_memory())
                if mode != STATIC or not skipped:
                    found[mode].append(self.answer(rows_of, mode, n_ctx, depths, "--limit"))
        return tuple(row for mode in MODES for row in medians(found[mode])), skipped

    def speeds(self, n_ctx: int, depths: Sequence[int], rounds: int, unpatched: Path | None) -> tuple[Speed, ...]:
        """Both contexts of each comparison in one process, call by call in turns; `rounds` times made anew.

        unpatched: a libllama without the patches, against which the flag off is held.
        """
        modes = (IN_PLACE, COPY, OFF) if unpatched else (IN_PLACE, COPY)
        turns = [(mode, flash) for mode in modes for flash in ("on", "off")]
        found: list[Speed] = []
        with self.console.progress("measuring speed", len(turns)) as bar:
            for number, (mode, flash) in enumerate(turns):
                bar.update(number, f"{mode}, flash attention {flash}")
                other = ["--other", str(unpatched)] if mode == OFF else []
                more = "--rounds", str(rounds), "-fa", flash, *other
                pairs = self.answer(lambda _, said: [read(Pair, p) for p in said["pairs"]], mode, n_ctx, depths, *more)
                kinds = (speed.GENERATE, speed.PROMPT, *([speed.CREATE] if mode == OFF else []))
                found += speed.speeds(mode, flash == "on", kinds, pairs)
        return tuple(found)

    def answer(
        self, parse: Callable[[str, dict[str, Any]], _T], mode: str, n_ctx: int, depths: Sequence[int], *more: str
    ) -> _T:
        """What one process says, parsed for its mode. Raises MeasureError when it fails, is too slow or says what is
        not understood."""
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
            return parse(mode, doc)
        except (KeyError, TypeError) as err:
            why = f"{type(err).__name__}: {err}"
            raise MeasureError("kv-bench's answer is not understood", why=why, next_step="kvtool build") from err
