"""What bench returns, its tables, the same ones for a terminal and for bench.md, and the files that --out writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvtool.bench.bars import MIB, Bar, missed
from kvtool.bench.rows import Row
from kvtool.bench.runs import STATIC
from kvtool.bench.speed import Figure, Speed
from kvtool.console import Console
from kvtool.errors import KvtoolError, MeasureError, writing
from kvtool.machine import Machine
from kvtool.markdown import table as markdown_table
from kvtool.result import Result, plain

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

The model has random weights, the cache geometry of a real one, and everything else tiny: its decode calls are much
cheaper than the real one's, so a growth weighs more here than it does there.
"""


@dataclass(frozen=True)
class Table:
    """A table as text. A column whose name starts with ">" is right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Benched(Result):
    """Everything bench found. skipped: why the static cache was left out; seconds: of the whole command."""

    command: ClassVar[str] = "bench"

    tag: str
    model: str
    machine: Machine
    n_ctx: int
    repeats: int
    rounds: int
    bars: tuple[Bar, ...]
    rows: tuple[Row, ...]
    speeds: tuple[Speed, ...]
    skipped: str
    strict: bool
    seconds: float

    @property
    def failure(self) -> KvtoolError | None:
        """With strict, exit 8 when a bar was missed."""
        wrong = missed(self.bars)
        if not wrong or not self.strict:
            return None
        first = wrong[0]
        return MeasureError(
            f"{len(wrong)} of {len(self.bars)} bars were missed",
            why=f"{first.name}, {first.mode}: {_number(first.value)}, the bar is {first.bound}",
            next_step="again on an idle machine, or without --strict",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields, and for each bar whether it was met."""
        return {**super().to_json(), "bars": [{**plain(b), "bound": b.bound, "met": b.met} for b in self.bars]}

    def render(self, console: Console) -> None:
        for table in tables(self):
            console.table(table.columns, table.rows, title=table.title)
            console.line()
        if self.skipped:
            console.line(f"static left out: {self.skipped}", style="yellow")
        console.line(verdict(self), style="bold yellow" if missed(self.bars) else "bold green")


def verdict(result: Benched) -> str:
    """One line: how many bars."""
    known = [b for b in result.bars if b.met is not None]
    open_ = len(result.bars) - len(known)
    tail = f", {open_} not measured" if open_ else ""
    return f"{len(known) - len(missed(known))} of {len(known)} bars met{tail}, {result.seconds:.0f} s"


def tables(result: Benched) -> tuple[Table, ...]:
    return (_bars(result.bars), _speeds(result.speeds), _memory(result.rows), _growths(result.rows))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / MIB:.0f}"


def _figure(found: Figure | None) -> str:
    return f"{found.value:.3f} ({found.low:.3f}-{found.high:.3f})" if found else "-"


def _bars(bars: Sequence[Bar]) -> Table:
    word = {True: "met", False: "MISSED", None: "-"}
    rows = [(b.name, b.mode, _number(b.value), b.bound, word[b.met], b.note) for b in bars]
    return Table("Bars", ("figure", "cache", ">found", ">bar", "", "note"), tuple(rows))


def _speeds(speeds: Sequence[Speed]) -> Table:
    rows = [
        (
            *(
                s.mode,
                "on" if s.flash_attn else "off",
                f"{s.kind} {s.n_tokens or ''} at {s.depth}",
                f"{1e3 * s.seconds:.1f}",
            ),
            *(_figure(s.ratio), _figure(s.steady), f"{_number(s.growing)}, {s.growths} of {s.pairs}"),
        )
        for s in speeds
    ]
    columns = ("cache", "FA", "call", ">static ms", ">speed / static", ">without growths", ">time of those with one")
    return Table("Speed", columns, tuple(rows))


def _memory(found: Sequence[Row]) -> Table:
    rows = [
        (
            *(r.mode, str(r.depth) if r.moment == "depth" else r.moment),
            *(_mib(v) for v in (r.reserved, r.committed, r.used, r.resident, r.peak)),
            f"{1e3 * r.create_seconds:.0f}" if r.moment == "created" else "",
        )
        for r in found
    ]
    columns = ("cache", ">tokens", ">KV reserved MiB", ">committed", ">used", ">resident", ">peak", ">ms")
    return Table("Memory", columns, tuple(rows))


def _growths(found: Sequence[Row]) -> Table:
    rows = [
        (
            *(r.mode, str(r.depth), str(r.growths), str(r.shrinks), _mib(r.copied), f"{1e3 * r.growth_seconds:.0f}"),
            *(f"{1e3 * r.growth_worst:.1f}", f"{r.growth_seconds / r.growth_limit:.2f}" if r.growth_limit else ""),
        )
        for r in found
        if r.mode != STATIC and r.moment == "depth"
    ]
    columns = ("cache", ">tokens", ">growths", ">shrinks", ">copied MiB", ">total ms", ">worst ms")
    return Table("Growth up to each depth", (*columns, ">/ the same without a cache"), tuple(rows))


def write(out: Path, result: Benched, pictures: Mapping[str, bytes]) -> None:
    """bench.md, bench.json and the pictures, by file name. Raises DiskError."""
    contents = {
        "bench.md": markdown(result, [name for name in pictures if name.endswith(".svg")]).encode(),
        **pictures,
        # last, and with the others in it: who finds it finds all of them
        "bench.json": (json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n").encode(),
    }
    with writing(f"to {out}", "--out another directory"):
        out.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (out / name).write_bytes(data)


def markdown(result: Benched, pictures: Sequence[str]) -> str:
    m = result.machine
    memory = f", {m.memory / 2**30:.0f} GiB" if m.memory else ""
    pages = f", transparent huge pages: {m.pages}" if m.pages else ""
    parts = [
        f"# kvtool bench, llama.cpp {result.tag}\n",
        f"{result.model}, `-c {result.n_ctx}`, {result.repeats} runs and {result.rounds} rounds of each, "
        f"on {m.processor}, {m.cores} cores{memory}, {m.system}{pages}. {verdict(result)}.\n",
        HOW,
        *(f"![{Path(name).stem}]({name})\n" for name in pictures),
        *(f"## {table.title}\n\n{markdown_table(table.columns, table.rows)}" for table in tables(result)),
    ]
    return "\n".join([*parts, *([f"Static left out: {result.skipped}.\n"] if result.skipped else [])])
