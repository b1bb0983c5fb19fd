"""What bench returns, and its tables: the same ones for a terminal and for bench.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvtool.bench.bars import Bar, missed
from kvtool.bench.runner import Skipped
from kvtool.bench.summary import Summary
from kvtool.console import Console
from kvtool.errors import KvtoolError, MeasureError
from kvtool.machine import Machine
from kvtool.result import Result, plain

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Table:
    """A table as text. A column whose name starts with ">" is right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Benched(Result):
    """Everything bench found. mode: quick, default or full; seconds: of the whole command; files: what --out wrote."""

    command: ClassVar[str] = "bench"

    tag: str
    mode: str
    bin_dir: Path
    machine: Machine
    n_ctx: int
    depths: tuple[int, ...]
    repeats: int
    threads: int
    models: tuple[str, ...]
    bars: tuple[Bar, ...]
    summary: Summary
    skipped: tuple[Skipped, ...]
    strict: bool
    files: tuple[Path, ...]
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
            why=f"{first.name}, {first.model}, {first.mode}: {number(first.value)}, the bar is {first.bound}",
            next_step="again on an idle machine, or without --strict",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields, and for each bar whether it was met."""
        doc = super().to_json()
        doc["bars"] = [{**plain(b), "bound": b.bound, "met": b.met} for b in self.bars]
        return doc

    def render(self, console: Console) -> None:
        for table in tables(self):
            wide = table.columns[-1] == "note"  # too wide for a terminal; bench.md and --json have it
            rows = [row[:-1] for row in table.rows] if wide else table.rows
            console.table(table.columns[:-1] if wide else table.columns, rows, title=table.title)
            console.line()
        for left in self.skipped:
            console.line(f"left out: {left.model} {left.mode}: {left.why}", style="yellow")
        for file in self.files:
            console.line(f"written: {file}")
        wrong = missed(self.bars)
        console.line(verdict(self), style="bold yellow" if wrong else "bold green")


def verdict(result: Benched) -> str:
    """One line: how many bars."""
    known = [b for b in result.bars if b.met is not None]
    wrong = missed(result.bars)
    open_ = len(result.bars) - len(known)
    tail = f", {open_} not measured" if open_ else ""
    return f"{len(known) - len(wrong)} of {len(known)} bars met{tail}, {result.seconds:.0f} s"


def tables(result: Benched) -> tuple[Table, ...]:
    """All tables, the bars first."""
    return (
        bar_table(result.bars),
        _creation_table(result.summary),
        _memory_table(result.summary),
        _growth_table(result.summary),
        _speed_table(result.summary),
        _clear_table(result.summary),
        _rate_table(result.summary),
    )


def number(value: float | None) -> str:
    """Three significant digits, "-" for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mib(value: float | None) -> str:
    """Bytes as MiB."""
    return "-" if value is None else f"{value / MIB:.0f}"


def bar_table(bars: Sequence[Bar]) -> Table:
    """Every bar with what was measured."""
    word = {True: "met", False: "MISSED", None: "-"}
    rows = [
        (
            b.name,
            b.model,
            b.mode,
            number(b.value),
            f"{number(b.low)} to {number(b.high)}" if b.value is not None else "",
            b.bound,
            word[b.met],
            b.note,
        )
        for b in bars
    ]
    return Table("Bars", ("figure", "model", "cache", ">median", ">range", ">bar", "", "note"), tuple(rows))


def _creation_table(summary: Summary) -> Table:
    rows = [
        (c.model, c.mode, f"{1e3 * c.seconds:.1f}", mib(c.committed), mib(c.resident), str(c.repeats))
        for c in summary.creations
    ]
    columns = ("model", "cache", ">ms", ">KV committed MiB", ">resident MiB", ">runs")
    return Table("Creating a context", columns, tuple(rows))


def _memory_table(summary: Summary) -> Table:
    rows = [
        (d.model, d.mode, str(d.depth), mib(d.reserved), mib(d.committed), mib(d.used), mib(d.resident), mib(d.peak))
        for d in summary.depths
    ]
    columns = ("model", "cache", ">tokens", ">KV reserved MiB", ">committed", ">used", ">resident", ">peak")
    return Table("Memory at each depth", columns, tuple(rows))


def _growth_table(summary: Summary) -> Table:
    rows = []
    for d in summary.depths:
        if d.mode == "static":
            continue
        limit = next((g for g in summary.growths if (g.model, g.mode, g.cells) == (d.model, d.mode, d.depth)), None)
        over = f"{d.growth_seconds / limit.limit:.2f}" if limit and limit.limit else ""
        both = f"{d.growth_seconds / limit.both:.2f}" if limit and limit.both and d.copied else ""
        rows.append(
            (
                d.model,
                d.mode,
                str(d.depth),
                str(d.growths),
                str(d.shrinks),
                mib(d.copied),
                f"{1e3 * d.growth_seconds:.0f}",
                f"{1e3 * d.growth_worst:.1f}",
                over,
                both,
            )
        )
    columns = (
        "model",
        "cache",
        ">tokens",
        ">growths",
        ">shrinks",
        ">copied MiB",
        ">total ms",
        ">worst ms",
        ">/ limit",
        ">/ copy + zero",
    )
    return Table("Growth up to each depth", columns, tuple(rows))


def _speed_table(summary: Summary) -> Table:
    rows = [
        (d.model, d.mode, str(d.depth), number(d.generation), number(d.prompt))
        for d in summary.depths
        if d.generation is not None or d.prompt is not None
    ]
    return Table("Speed, tokens per second", ("model", "cache", ">tokens", ">generation", ">prompt"), tuple(rows))


def _clear_table(summary: Summary) -> Table:
    rows = [
        (c.model, c.mode, str(c.depth), mib(c.committed_before), mib(c.committed), mib(c.resident))
        for c in summary.cleared
    ]
    columns = ("model", "cache", ">tokens", ">KV committed MiB", ">after", ">KV resident after")
    return Table("Clear, and one more decode", columns, tuple(rows))


def _rate_table(summary: Summary) -> Table:
    rows = [
        (r.name, f"{r.chunk >> 10} KiB" if r.chunk else "all", *(f"{x / GIB:.2f}" for x in (r.rate, r.low, r.high)))
        for r in summary.rates
    ]
    columns = ("limit", ">at a time", ">GiB/s", ">lowest", ">highest")
    return Table("What the machine does without a cache", columns, tuple(rows))
