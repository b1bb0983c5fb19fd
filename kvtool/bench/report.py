"""What every measurement of bench ends in: bars, tables, the same ones for a terminal and for NAME.md, and pictures."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from kvtool.console import Console
from kvtool.errors import KvtoolError, MeasureError, writing
from kvtool.machine import Machine, machine
from kvtool.markdown import table as markdown_table
from kvtool.result import Result, to_plain

STATIC, COPY, IN_PLACE = "static", "copy", "in-place"
MIB = 2**20
SPARE = 32 * MIB  # allowance of a bar in bytes for memory outside of the cache
_SURE = 0.02  # how far a 95 % interval may reach beyond its bar

# title, columns as in Console.table(), rows (text is shown unchanged, numbers are rounded for people)
Table: TypeAlias = tuple[str, tuple[str, ...], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Bar:
    """Compare one figure with its bounds `least` and `most` (None: no such bound).

    value: the figure; None if it was not measured, and then `met` is None
    low, high: its 95 % interval, if it has one; it may exceed a bound by at most 0.02
    unit: "" for a ratio
    note: a remark that a reader of the figure needs
    """

    name: str
    mode: str
    value: float | None
    least: float | None = None
    most: float | None = None
    unit: str = ""
    note: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool | None:
        """Return True if the value is within its bounds, None if it was not measured."""
        if self.value is None:
            return None
        low = self.value if self.low is None else min(self.value, self.low + _SURE)
        high = self.value if self.high is None else max(self.value, self.high - _SURE)
        return (self.least is None or low >= self.least) and (self.most is None or high <= self.most)

    @property
    def bound(self) -> str:
        """Return the bounds as text: "<= 1.1", "0.99 to 1.01"."""
        least, most = self.least, self.most
        text = f">= {least:g}" if most is None else f"<= {most:g}" if least is None else f"{least:g} to {most:g}"
        return f"{text} {self.unit}".rstrip()


def ratio(value: float | None, under: float | None) -> float | None:
    """Return a ratio, or None if a number is unknown or the divisor is 0."""
    return value / under if value is not None and under else None


def bytes_bar(name: str, mode: str, value: int | None, most: float) -> Bar:
    """Return a Bar for a size in bytes, shown in MiB."""
    return Bar(name, mode, ratio(value, MIB), most=round(most / MIB, 1), unit="MiB")


def as_number(value: float | None) -> str:
    """Format a value with three significant digits, or as an integer from 1000 on."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mib(*values: float | None) -> tuple[str, ...]:
    """Format numbers of bytes in MiB."""
    return tuple("-" if value is None else f"{value / MIB:.0f}" for value in values)


@dataclass(frozen=True)
class Report(Result, command="bench"):
    """Hold the figures of a benchmark.

    skipped: the omitted part and the reason
    tag, machine: the upstream ("": unknown) and the machine of the measurement
    strict: treat a missed bar as a failure
    seconds: duration of the whole command
    error: the reason why the report could not be written to its files
    """

    name: ClassVar[str]  # of the files
    how: ClassVar[str]  # it was measured
    said: ClassVar[str]  # how much was measured, in words; the fields are filled in
    model: str
    bars: tuple[Bar, ...]
    skipped: str
    tag: str = field(default="", kw_only=True)
    machine: Machine = field(default_factory=machine, kw_only=True)
    strict: bool = field(default=False, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)

    @property
    def failure(self) -> KvtoolError | None:
        """Return exit code 8 for a missed bar if strict; otherwise the reason for a report without files."""
        if not (self.strict and self.missed):
            return self.error
        first = self.missed[0]
        return MeasureError(
            f"{len(self.missed)} of {len(self.bars)} bars were missed",
            why=f"{first.name}, {first.mode}: {as_number(first.value)}, the bar is {first.bound}",
            next_step="again on an idle machine, or without --strict",
        )

    @property
    def missed(self) -> list[Bar]:
        """Return the bars that were missed."""
        return [bar for bar in self.bars if bar.met is False]

    @property
    def verdict(self) -> str:
        """Return one sentence with the number of met and missed bars."""
        counts = Counter(b.met for b in self.bars)
        tail = f", {counts[None]} not measured" if counts[None] else ""
        return f"{counts[True]} of {counts[True] + counts[False]} bars met{tail}, {self.seconds:.0f} s"

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of the measurements."""
        raise NotImplementedError

    def pictures(self) -> dict[str, bytes]:
        """Return the plots by file name."""
        raise NotImplementedError

    def shown(self) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
        """Yield all tables as text."""
        word = {True: "met", False: "MISSED", None: "-"}
        bars = [(b.name, b.mode, b.value, b.bound, word[b.met], b.note) for b in self.bars]
        for title, columns, rows in (("Bars", ("figure", "cache", ">found", ">bar", "", "note"), bars), *self.tables()):
            yield title, columns, [[each if isinstance(each, str) else as_number(each) for each in row] for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**super().to_json(), "bars": [{**to_plain(b), "bound": b.bound, "met": b.met} for b in self.bars]}

    def render(self, console: Console) -> None:
        for title, columns, rows in self.shown():
            console.table(columns, rows, title=title)
            console.line()
        if self.skipped:
            console.line(f"left out: {self.skipped}", style="yellow")
        console.line(self.verdict, style="bold yellow" if self.missed else "bold green")

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

    def markdown(self, pictures: Iterable[str]) -> str:
        """Return the report as Markdown, with links to these pictures."""
        m, what = self.machine, f"{self.model}, {self.said.format(**vars(self))}"
        memory = f", {m.memory / 2**30:.0f} GiB" if m.memory else ""
        pages = f", transparent huge pages: {m.pages}" if m.pages else ""
        parts = [
            f"# kvtool bench{self.tag and f', llama.cpp {self.tag}'}\n",
            f"{what}, on {m.processor}, {m.cores} cores{memory}, {m.system}{pages}. {self.verdict}.\n",
            self.how,
            *(f"![{Path(name).stem}]({name})\n" for name in pictures if name.endswith(".svg")),
            *(f"## {title}\n\n{markdown_table(columns, rows)}" for title, columns, rows in self.shown()),
        ]
        return "\n".join([*parts, *([f"Left out: {self.skipped}.\n"] if self.skipped else [])])
