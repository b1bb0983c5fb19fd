"""Measure memory and speed of a context with each kind of cache, by running kv-bench repeatedly.

Memory: each process has one context. A cache that grows in place, a cache that grows by copy and a static cache take
turns, and all figures are medians over the runs. To fill the cache without the cost of attention, each batch is decoded
as a separate sequence and then moved to the measured sequence (see `cpp/tools/kv-bench/README.md`). *Resident* is the
additional resident memory of the process since before the context was created, including compute buffers. *Peak* is the
maximum of *resident* since the row above. *The same without a cache* is measured right after each growth. For growth in
place, it is the time to allocate as many fresh pages. For growth by copy, it is the time of a `memcpy` of as many bytes
into fresh memory. The last column divides the time of all growths by this time, so a smaller number is better.

Speed: each row compares a cache with a static cache. *Speed / static* is the speed of the cache divided by the speed of
the static cache, so a number above 1 means that the cache is faster. One process has both contexts and calls them
alternately. The processor time of one thread is measured. Each round creates both contexts again and has one ratio. The
number in brackets is the 95 % confidence interval of Student's t over the rounds (`kvtool/bench/speed.py` has the
formula). *Speed / static* includes growths as often as they really occur. *Without growths* has only the calls in which
the cache did not grow. The last column has the time of a call with a growth divided by the time of the static call, and
how many of all calls had a growth.

Two further comparisons do not use a dynamic cache. In the rows *off*, the patched build, with the dynamic cache
switched off, is compared with an unpatched build. In the rows *same*, the patched build is compared with itself, which
shows how much equal builds differ. The library that is loaded first has an advantage. So both comparisons have half as
many rounds, and each round has two processes, one for each order.

The weights are random. For the measurement of memory, the cache is as large as the cache of a real model, and the rest
of the model is tiny. For the measurement of speed, the model is as large as one of the smallest models in use. In such
a model, a token is cheap to compute, so the cost of the cache is a larger share of the time than in other models.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvtool import process
from kvtool.bench import plots, speed
from kvtool.bench.report import COPY, IN_PLACE, SPARE, STATIC, Bar, Report, Table, as_number, bytes_bar, mib, ratio
from kvtool.bench.speed import OFF, SAME, Pair, Speed
from kvtool.console import Console
from kvtool.errors import MeasureError
from kvtool.machine import available_memory, memory_warning
from kvtool.result import from_plain
from kvtool.verify import trial

HOW = (__doc__ or "").partition("\n\n")[2]
MODES = (IN_PLACE, COPY, STATIC)
_MEANING = {IN_PLACE: "in place", COPY: "by copy"}
GIB = 2**30
_STORAGE = {COPY: "copy", IN_PLACE: "inplace"}
_TIMEOUT = 1800.0
_AFTER_CLEAR = 1.4  # allowed memory after a clear, as a multiple of the bytes of the live cells

_SPEED = ("cache", "FA", "call", ">static ms", ">speed / static", ">without growths", ">with a growth")
_MEMORY = ("cache", ">tokens", ">KV reserved MiB", ">committed", ">used", ">resident", ">peak", ">ms")
_GROWTH = ("cache", ">tokens", ">growths", ">shrinks", ">copied MiB", ">total ms", ">worst ms")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """Hold the measurements of one cache at one moment.

    The moment is "created", "depth" (the cache has `depth` tokens), or after llama_memory_clear() and one more decode.
    Sizes are in bytes and times in seconds.

    resident: the growth of the process's resident memory, None if it is unknown
    peak: the maximum of `resident` since the previous moment, None if it is unknown
    growth_seconds: the duration of all growths so far, None without growth
    growth_worst: the duration of the longest growth, None without growth
    growth_limit: the time that kv-bench needs without a cache for as many bytes as the cache added: to copy them, for
        growth by copy, or to commit their pages, for growth in place; None without growth
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


@dataclass(frozen=True)
class Benched(Report):
    """Report the memory and speed of a context with each kind of cache."""

    name, how = "bench", HOW
    said = "`-c {n_ctx}`, {repeats} memory runs of each cache, {rounds} rounds of each speed comparison"
    n_ctx: int
    repeats: int
    rounds: int
    rows: tuple[Row, ...]
    speeds: tuple[Speed, ...]

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of speed, memory and growth."""
        speeds, memory, growth = list[Any](), list[Any](), list[Any]()
        for s in self.speeds:
            call = s.mode, "on" if s.flash_attn else "off", f"{s.kind} {s.n_tokens or ''} at {s.depth}"
            growing = f"{as_number(s.growing)}, {s.growths} of {s.pairs}"
            speeds.append((*call, f"{1e3 * s.seconds:.1f}", str(s.ratio), str(s.steady or "-"), growing))
        for r in self.rows:
            created = f"{1e3 * r.create_seconds:.0f}" if r.moment == "created" else ""
            sizes = mib(r.reserved, r.committed, r.used, r.resident, r.peak)
            memory.append((r.mode, r.depth if r.moment == "depth" else r.moment, *sizes, created))
            if r.mode != STATIC and r.moment == "depth":
                times = f"{1e3 * r.growth_seconds:.0f}", f"{1e3 * r.growth_worst:.1f}"
                ratio = f"{r.growth_seconds / r.growth_limit:.2f}" if r.growth_limit else ""
                growth.append((r.mode, r.depth, r.growths, r.shrinks, *mib(r.copied), *times, ratio))
        growths = "Growth up to each depth", (*_GROWTH, ">/ the same without a cache"), growth
        return ("Speed", _SPEED, speeds), ("Memory", _MEMORY, memory), growths

    def pictures(self) -> dict[str, bytes]:
        """Draw the memory against tokens, the duration of all growths so far, and the speed against the depth.

        The plot of growths also has the time that the same bytes need without a cache.
        """
        depths = [r for r in self.rows if r.moment == "depth"]
        grown = [r for r in depths if r.growth_limit]
        reserved = depths[0].reserved / GIB
        common = {"xlabel": "tokens in the conversation", "ylim": (0, None)}
        with plots.picture("memory") as (memory, (axis,)):
            # a static cache has the same size at each depth, so it need not be measured
            axis.plot([0, self.n_ctx], [reserved] * 2, color=plots.COLOURS[STATIC], label="static")
            for mode in (COPY, IN_PLACE):
                _line(axis, depths, mode, "committed", f"dynamic, {_MEANING[mode]}", GIB, marker="o")
            last = [r for r in depths if r.mode == IN_PLACE][-1]
            if last.depth < self.n_ctx:
                ends = [last.depth, self.n_ctx], [last.used / GIB, last.used * self.n_ctx / last.depth / GIB]
                axis.plot(*ends, color=plots.COLOURS[IN_PLACE], linestyle=":", label="dynamic, calculated")
            axis.set(title=f"Memory of the KV cache, {self.model.partition(' for ')[0]}", ylabel="GiB", **common)
            plots.mark_tokens(axis, self.n_ctx)
        with plots.picture("growth") as (growth, (axis,)):
            for mode, limit in ((IN_PLACE, "commit of the same pages"), (COPY, "memcpy of the same bytes")):
                _line(axis, grown, mode, "growth_seconds", f"growth {_MEANING[mode]}", marker="o")
                _line(axis, grown, mode, "growth_limit", limit, linestyle=":")
            axis.set(title="Time of all growths up to a depth", ylabel="seconds", **common)
            plots.mark_tokens(axis, max(r.depth for r in depths))
        return {**memory, **growth, **self._speed_picture()}

    def _speed_picture(self) -> dict[str, bytes]:
        """Draw tokens per second with flash attention against the depth; nothing without measurements.

        The speed of a dynamic cache is the speed of the static cache, times the ratio of both speeds. One process
        measured both speeds.
        """
        shown = [s for s in self.speeds if s.flash_attn and s.mode in (IN_PLACE, COPY)]
        kinds = {s.kind: s.n_tokens for s in shown if s.kind != "create"}
        if not kinds:
            return {}
        with plots.picture("speed", len(kinds), rows=len(kinds), size=(8, 4 * len(kinds))) as (files, axes):
            for (kind, n_tokens), axis in zip(kinds.items(), axes, strict=True):
                for mode, points in _speed_lines(shown, kind).items():
                    label = f"dynamic, {_MEANING[mode]}" if mode in _MEANING else mode
                    axis.plot(list(points), list(points.values()), color=plots.COLOURS[mode], label=label, marker="o")
                title = "Generated tokens" if n_tokens == 1 else f"Prompts of {n_tokens} tokens"
                plots.name_speed_axes(axis, title)
        return files


def _speed_lines(speeds: Sequence[Speed], kind: str) -> dict[str, dict[int, float]]:
    """Return the tokens per second of each cache at each depth.

    The static cache is measured in every comparison with another cache. Its speed is the median over all comparisons.
    """
    same = sorted((s for s in speeds if s.kind == kind), key=lambda s: s.depth)
    found = {STATIC: speed.medians((s.depth, s.n_tokens / s.seconds) for s in same)}
    for s in same:
        found.setdefault(s.mode, {})[s.depth] = found[STATIC][s.depth] * s.ratio.value
    return found


def _line(axis: Any, rows: Sequence[Row], mode: str, name: str, label: str, unit: int = 1, **style: str) -> None:
    """Draw one figure of one cache against tokens."""
    same = [r for r in rows if r.mode == mode]
    values = [getattr(r, name) / unit for r in same]
    style = {"color": plots.COLOURS[mode], **style}
    axis.plot([r.depth for r in same], values, label=label, clip_on=False, **style)


def rows_of(mode: str, said: Mapping[str, Any]) -> list[Row]:
    """Parse the output of one kv-bench process. Return a row for each moment.

    Raise KeyError or TypeError for unexpected output. A resident memory of -1 means that it is unknown. Right after
    each growth, kv-bench measured the time that the same bytes need without a cache. For growth by copy, it copied the
    same number of bytes into fresh memory. For growth in place, it committed as many bytes of fresh pages.
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
    """Return the median of each field of each row over all runs of one kind of cache.

    A field of the result is None if this field is None in any of the runs.
    """

    def median(values: tuple[Any, ...]) -> Any:
        return None if None in values else statistics.median_low(values)

    return [Row(*map(median, zip(*map(astuple, same), strict=True))) for same in zip(*samples, strict=True)]


def memory_bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the figures of the dynamic caches that have a target: creation, growth and memory."""
    by_mode = {mode: list(same) for mode, same in itertools.groupby(rows, lambda r: r.mode)}
    static = by_mode.pop(STATIC, [])
    return [bar for same in by_mode.values() for bar in _bars(same, static)]


def _bars(rows: Sequence[Row], static: Sequence[Row]) -> list[Bar]:
    """Return the figures of one kind of cache that have a target.

    To find the memory of a cache, the memory outside of the cache is subtracted from the memory of its process. The
    memory outside of a cache is the resident memory of a process minus the bytes that the cache has allocated. It is
    taken from the process with the static cache at the same moment. If the static cache was left out, it is taken from
    the process with the dynamic cache. After llama_memory_clear(), the memory outside of the cache at the last depth is
    subtracted. So memory that was freed, but not returned to the system, counts as memory of the cache.
    """
    beside = [None if r.resident is None else r.resident - r.committed for r in static or rows]
    *_, last, cleared = rows
    seconds, size = (static[0].create_seconds, static[0].resident) if static else (None, None)
    limit, most = ("memcpy", 1.5) if last.mode == COPY else ("commit", 1.1)
    depths = list(zip(rows, beside, strict=True))[1:-1]
    peaks = [r.peak - r.committed - other for r, other in depths if r.peak and other is not None]
    left = None if cleared.resident is None or beside[-2] is None else max(0, cleared.resident - beside[-2])
    # one layer is in memory twice while it is copied
    layer = last.committed // last.n_layer if last.mode == COPY else 0
    return [
        Bar("creation time / static", last.mode, ratio(rows[0].create_seconds, seconds), most=0.02),
        Bar("resident after creation / static", last.mode, ratio(rows[0].resident, size), most=0.005),
        Bar(f"growth time / {limit}", last.mode, ratio(last.growth_seconds, last.growth_limit), most=most),
        bytes_bar("peak over steady", last.mode, max(peaks, default=None), SPARE + layer),
        bytes_bar("KV resident after clear and a decode", last.mode, left, SPARE + _AFTER_CLEAR * cleared.used),
    ]


@dataclass(frozen=True)
class Comparison:
    """Describe two contexts whose calls kv-bench measures in turns.

    note: the text that is shown as progress
    mode: the kind of cache of the second context
    args: further arguments for kv-bench
    other: the path of the first context's libllama; None for the libllama that kv-bench is linked with
    times: this comparison has so many times the usual number of rounds; only with `other`
    """

    note: str
    mode: str
    args: tuple[str, ...]
    other: Path | None
    times: int = 1


@dataclass(frozen=True)
class KvBench:
    """Run the program kv-bench with one model."""

    program: Path
    model: Path
    console: Console

    def memory(self, n_ctx: int, depths: Sequence[int], repeats: int) -> tuple[tuple[Row, ...], str]:
        """Return the medians of each kind of cache, and the reason why the static cache was left out, or "".

        The static cache is left out if it does not fit into the machine's memory. The kinds alternate, and each turn
        begins with another kind. So a disturbance of the machine affects all kinds.
        """
        found: dict[str, list[list[Row]]] = {mode: [] for mode in MODES}
        turns = [MODES[(turn + i) % len(MODES)] for turn in range(repeats) for i in range(len(MODES))]
        skipped = ""
        with self.console.progress("measuring memory", len(turns)) as bar:
            for number, mode in enumerate(turns):
                bar.update(number, f"{mode} {number // len(MODES) + 1}")
                if mode == STATIC:
                    skipped = skipped or memory_warning(found[IN_PLACE][0][0].reserved, available_memory())
                if mode != STATIC or not skipped:
                    found[mode].append(self.answer(rows_of, mode, n_ctx, depths, "--limit"))
        return tuple(row for mode in MODES for row in medians(found[mode])), skipped

    def speeds(self, n_ctx: int, depths: Sequence[int], rounds: int, unpatched: Path | None) -> tuple[Speed, ...]:
        """Measure the speed of each kind of cache, in `rounds` new pairs of contexts.

        In each comparison, both contexts are in one process and are called alternately.

        unpatched: the path of a libllama without the patches, or None. With this path, two comparisons are added. The
            patched library, with the dynamic cache switched off, is compared with the unpatched library. The patched
            library is also compared with itself, which shows how much equal libraries differ.
        """
        others = {OFF: unpatched, SAME: self.program.with_name(unpatched.name)} if unpatched else {}
        turns = [(mode, flash) for mode in (IN_PLACE, COPY, *others) for flash in ("on", "off")]
        comparisons = [
            Comparison(f"{mode}, flash attention {flash}", mode, ("-fa", flash), others.get(mode))
            for mode, flash in turns
        ]
        speeds: list[Speed] = []
        for (mode, flash), pairs in zip(turns, self.compare(n_ctx, depths, rounds, comparisons), strict=True):
            speeds += speed.speeds(mode, flash == "on", speed.KINDS if mode in others else speed.KINDS[:2], pairs)
        return tuple(speeds)

    def compare(
        self, n_ctx: int, depths: Sequence[int], rounds: int, comparisons: Sequence[Comparison]
    ) -> list[list[Pair]]:
        """Return the measured pairs of calls of each comparison.

        With one libllama, a single process creates `rounds` pairs of contexts, one pair after the other. With two
        libraries, there are half as many rounds, times `Comparison.times`, but at least two. Each of these rounds is
        two processes.
        """
        # The library that is loaded first is about 2 % faster or slower than the library that is loaded second. So with
        # two libraries, a round is two processes, one for each order.
        seeds = [range(2 * max(2, each.times * rounds // 2) if each.other else 1) for each in comparisons]
        runs = [(number, seed) for number, some in enumerate(seeds) for seed in some]

        def measure(run: tuple[int, int]) -> list[Pair]:
            number, seed = run
            each = comparisons[number]
            other = ["1", "--other", str(each.other)] if each.other else [str(rounds)]
            more = *each.args, "--seed", str(seed), "--rounds", *other
            pairs = self.answer(
                lambda _, said: [from_plain(Pair, p) for p in said["pairs"]], each.mode, n_ctx, depths, *more
            )
            return [replace(pair, round=pair.round + seed // 2) for pair in pairs]

        found = self.console.each("measuring speed", runs, measure, lambda run: comparisons[run[0]].note)
        pairs: list[list[Pair]] = [[] for _ in comparisons]
        for (number, _), some in zip(runs, found, strict=True):
            pairs[number] += some
        return pairs

    def answer(
        self, parse: Callable[[str, dict[str, Any]], _T], mode: str, n_ctx: int, depths: Sequence[int], *more: str
    ) -> _T:
        """Run kv-bench once and parse its output.

        Raises MeasureError if the process fails, is too slow, or prints something unexpected.
        """
        dynamic = "on" if mode in _STORAGE else "off"
        argv: list[str | Path] = [self.program, "-m", self.model, "--kv-dynamic", dynamic, "-t", "1"]
        argv += ["-c", str(n_ctx), "-d", ",".join(map(str, depths)), *more]
        # None removes the variable, in case the user's shell has set it
        env = {"LLAMA_KV_DYNAMIC_STORAGE": _STORAGE.get(mode)}
        done = process.capture(argv, env=env, check=False, timeout=_TIMEOUT, error=MeasureError)
        doc = trial.answer(done)
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
