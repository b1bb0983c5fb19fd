"""What bench returns, its tables, the same ones for a terminal and for bench.md, and the files that --out writes."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from kvtool.bench import plots
from kvtool.bench.bars import MIB, Bar
from kvtool.bench.runs import STATIC, Row
from kvtool.bench.speed import Figure, Speed
from kvtool.console import Console
from kvtool.errors import KvtoolError, MeasureError, writing
from kvtool.machine import Machine, machine
from kvtool.markdown import table as markdown_table
from kvtool.result import Result, plain

# title, columns as in Console.table(), rows
Table: TypeAlias = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]

HOW = """\
Memory: each process has one context; in-place, copy and static take turns; figures are medians over the runs. The cache
is filled without paying for attention over it: each batch is decoded as a sequence of its own and then given to the
one that is measured (see `kv-bench`'s README). *Resident* is what the process grew by since before the context was
created, compute buffers included. *The same without a cache*, right after each growth: in place the commit of as many
fresh pages, by copy `memcpy` of what it copied into fresh memory.

Speed: both contexts in one process, call by call in turns, in processor time of one thread. They are made anew every
round, a round gives one ratio, and the interval is Student's over the rounds (`kvtool/bench/speed.py` has the formula).
*Speed* has growths as often as they come, *without growths* is that of the other calls; the last column has the time of
a call with a growth over the static one's, and how many there were. Cache *off* is the patched build without the flag
against an unpatched one.

The weights are random. For memory the model has the cache geometry of a real one and everything else tiny; for speed
all of it is as large as in one of the smallest models in use: where a token is cheap, what its cache costs weighs most.
"""


@dataclass(frozen=True)
class Report(Result, command="bench"):
    """What a benchmark found. skipped: what was left out, and why; tag, machine: on which upstream, and where; strict:
    a missed bar is a failure; seconds: of the whole command."""

    name: ClassVar[str]  # of the files
    how: ClassVar[str]  # it was measured
    model: str
    bars: tuple[Bar, ...]
    skipped: str
    tag: str = field(default="", kw_only=True)
    machine: Machine = field(default_factory=machine, kw_only=True)
    strict: bool = field(default=False, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)

    @property
    def failure(self) -> KvtoolError | None:
        """With strict, exit 8 when a bar was missed."""
        if not (self.strict and self.missed):
            return None
        first = self.missed[0]
        return MeasureError(
            f"{len(self.missed)} of {len(self.bars)} bars were missed",
            why=f"{first.name}, {first.mode}: {as_number(first.value)}, the bar is {first.bound}",
            next_step="again on an idle machine, or without --strict",
        )

    @property
    def said(self) -> str:
        """How much was measured, in words."""
        raise NotImplementedError

    def pictures(self) -> dict[str, bytes]:
        """By file name."""
        raise NotImplementedError

    @property
    def missed(self) -> list[Bar]:
        return [bar for bar in self.bars if bar.met is False]

    @property
    def verdict(self) -> str:
        counts = Counter(b.met for b in self.bars)
        tail = f", {counts[None]} not measured" if counts[None] else ""
        return f"{counts[True]} of {counts[True] + counts[False]} bars met{tail}, {self.seconds:.0f} s"

    def tables(self) -> tuple[Table, ...]:
        word = {True: "met", False: "MISSED", None: "-"}
        rows = [(b.name, b.mode, as_number(b.value), b.bound, word[b.met], b.note) for b in self.bars]
        return (("Bars", ("figure", "cache", ">found", ">bar", "", "note"), rows),)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "bars": [{**plain(b), "bound": b.bound, "met": b.met} for b in self.bars]}

    def render(self, console: Console) -> None:
        for title, columns, rows in self.tables():
            console.table(columns, rows, title=title)
            console.line()
        if self.skipped:
            console.line(f"left out: {self.skipped}", style="yellow")
        console.line(self.verdict, style="bold yellow" if self.missed else "bold green")

    def markdown(self, pictures: Iterable[str]) -> str:
        m = self.machine
        memory = f", {m.memory / 2**30:.0f} GiB" if m.memory else ""
        pages = f", transparent huge pages: {m.pages}" if m.pages else ""
        parts = [
            f"# kvtool bench, llama.cpp {self.tag}\n",
            f"{self.model}, {self.said}on {m.processor}, {m.cores} cores{memory}, {m.system}{pages}. {self.verdict}.\n",
            self.how,
            *(f"![{Path(name).stem}]({name})\n" for name in pictures if name.endswith(".svg")),
            *(f"## {title}\n\n{markdown_table(columns, rows)}" for title, columns, rows in self.tables()),
        ]
        return "\n".join([*parts, *([f"Left out: {self.skipped}.\n"] if self.skipped else [])])

    def write(self, out: Path) -> None:
        """NAME.md, NAME.json and the pictures. Raises DiskError."""
        pictures = self.pictures()
        document = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        contents = {f"{self.name}.md": self.markdown(pictures).encode(), **pictures}
        contents[f"{self.name}.json"] = document.encode()  # last: who finds it finds all of them
        with writing(f"to {out}", "--out another directory"):
            out.mkdir(parents=True, exist_ok=True)
            for file, data in contents.items():
                (out / file).write_bytes(data)


@dataclass(frozen=True)
class Benched(Report):
    """What a context costs with each kind of cache."""

    name, how = "bench", HOW
    n_ctx: int
    repeats: int
    rounds: int
    rows: tuple[Row, ...]
    speeds: tuple[Speed, ...]

    @property
    def said(self) -> str:
        return f"`-c {self.n_ctx}`, {self.repeats} runs and {self.rounds} rounds of each, "

    def pictures(self) -> dict[str, bytes]:
        return plots.draw(self.rows)

    def tables(self) -> tuple[Table, ...]:
        return (*super().tables(), _speeds(self.speeds), _memory(self.rows), _growths(self.rows))


def as_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def as_mib(value: float | None) -> str:
    return "-" if value is None else f"{value / MIB:.0f}"


def _figure(found: Figure | None) -> str:
    return f"{found.value:.3f} ({found.low:.3f}-{found.high:.3f})" if found else "-"


def _speeds(speeds: Sequence[Speed]) -> Table:
    columns = ("cache", "FA", "call", ">static ms", ">speed / static", ">without growths", ">time of those with one")
    rows = []
    for s in speeds:
        call = s.mode, "on" if s.flash_attn else "off", f"{s.kind} {s.n_tokens or ''} at {s.depth}"
        figures = f"{1e3 * s.seconds:.1f}", _figure(s.ratio), _figure(s.steady)
        rows.append((*call, *figures, f"{as_number(s.growing)}, {s.growths} of {s.pairs}"))
    return "Speed", columns, rows


def _memory(found: Sequence[Row]) -> Table:
    columns = ("cache", ">tokens", ">KV reserved MiB", ">committed", ">used", ">resident", ">peak", ">ms")
    rows = []
    for r in found:
        sizes = map(as_mib, (r.reserved, r.committed, r.used, r.resident, r.peak))
        created = f"{1e3 * r.create_seconds:.0f}" if r.moment == "created" else ""
        rows.append((r.mode, str(r.depth) if r.moment == "depth" else r.moment, *sizes, created))
    return "Memory", columns, rows


def _growths(found: Sequence[Row]) -> Table:
    columns = ("cache", ">tokens", ">growths", ">shrinks", ">copied MiB", ">total ms", ">worst ms")
    rows = []
    for r in (r for r in found if r.mode != STATIC and r.moment == "depth"):
        counts = str(r.depth), str(r.growths), str(r.shrinks), as_mib(r.copied)
        times = f"{1e3 * r.growth_seconds:.0f}", f"{1e3 * r.growth_worst:.1f}"
        rows.append((r.mode, *counts, *times, f"{r.growth_seconds / r.growth_limit:.2f}" if r.growth_limit else ""))
    return "Growth up to each depth", (*columns, ">/ the same without a cache"), rows
