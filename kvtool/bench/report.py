"""Define the parts of every report of `kvtool bench`: figures with targets, tables, plots, and the files."""

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
SPARE = 32 * MIB  # bytes that a target allows for memory outside of the cache
_SURE = 0.02  # a 95 % interval may reach this far beyond a target and still meet it
# text of the report that explains the first table
_TARGETS = """\
The table *Targets* compares each figure with the target that was set for it. If a figure has a 95 % interval, the whole
interval must meet the target, with a tolerance of 0.02. So a figure can miss its target although its value meets it.
A note such as *at 2048* names the depth of the figure.
"""

# A table: its title, its columns as in Console.table(), and its rows. Texts are printed as they are; numbers are
# rounded.
Table: TypeAlias = tuple[str, tuple[str, ...], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Bar:
    """Compare one figure with its target, the bounds `least` and `most`. None means that there is no such bound.

    value: the figure; None if it was not measured, and then `met` is None
    low, high: the ends of the figure's 95 % interval, None if there is no such end; each end may be at most 0.02
        outside of the bounds
    unit: the unit of the figure, "" for a ratio
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
        """Return True if the figure is within its bounds, None if it was not measured."""
        if self.value is None:
            return None
        low = self.value if self.low is None else min(self.value, self.low + _SURE)
        high = self.value if self.high is None else max(self.value, self.high - _SURE)
        return (self.least is None or low >= self.least) and (self.most is None or high <= self.most)

    @property
    def bound(self) -> str:
        """Return the bounds as text, for example "<= 1.1" or "0.99 to 1.01"."""
        least, most = self.least, self.most
        text = f">= {least:g}" if most is None else f"<= {most:g}" if least is None else f"{least:g} to {most:g}"
        return f"{text} {self.unit}".rstrip()


def ratio(value: float | None, under: float | None) -> float | None:
    """Return the ratio of two numbers, or None if one is unknown or the divisor is 0."""
    return value / under if value is not None and under else None


def bytes_bar(name: str, mode: str, value: int | None, most: float) -> Bar:
    """Return a Bar for a size in bytes, which is shown in MiB."""
    return Bar(name, mode, ratio(value, MIB), most=round(most / MIB, 1), unit="MiB")


def as_number(value: float | None) -> str:
    """Format a number with three significant digits, or as an integer if it is 1000 or more."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mib(*values: float | None) -> tuple[str, ...]:
    """Format numbers of bytes in MiB."""
    return tuple("-" if value is None else f"{value / MIB:.0f}" for value in values)


@dataclass(frozen=True)
class Report(Result, command="bench"):
    """Hold the figures of a benchmark.

    skipped: what was left out and why, "" for nothing
    tag: the upstream tag, "" if it is unknown
    machine: the machine of the measurement
    strict: treat a figure that misses its target as a failure
    seconds: the duration of the whole command
    error: the reason why the report could not be written to files
    """

    name: ClassVar[str]  # name of the files, without extension
    how: ClassVar[str]  # text for the report that explains the method
    said: ClassVar[str]  # how much was measured; the names in braces are replaced by the values of fields
    model: str
    bars: tuple[Bar, ...]
    skipped: str
    tag: str = field(default="", kw_only=True)
    machine: Machine = field(default_factory=machine, kw_only=True)
    strict: bool = field(default=False, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)

    @property
    def failure(self) -> KvtoolError | None:
        """Return the error of the report.

        If `strict` is True and a figure misses its target, this is a MeasureError, whose exit code is 8. Otherwise it
        is the reason why the report could not be written to files, or None.
        """
        if not (self.strict and self.missed):
            return self.error
        first = self.missed[0]
        return MeasureError(
            f"{len(self.missed)} of {len(self.bars)} figures miss their target",
            why=f"{first.name}, {first.mode}: {as_number(first.value)}, the target is {first.bound}",
            next_step="measure again on an idle machine, or leave --strict out",
        )

    @property
    def missed(self) -> list[Bar]:
        """Return the figures that miss their target."""
        return [bar for bar in self.bars if bar.met is False]

    @property
    def verdict(self) -> str:
        """Return a sentence with the number of figures that meet and that miss their target."""
        counts = Counter(b.met for b in self.bars)
        tail = f", {counts[None]} not measured" if counts[None] else ""
        met = f"{counts[True]} of {counts[True] + counts[False]} figures meet their target{tail}"
        return f"{met}; the command needed {self.seconds:.0f} s"

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of the measurements."""
        raise NotImplementedError

    def pictures(self) -> dict[str, bytes]:
        """Return the plots by file name."""
        raise NotImplementedError

    def shown(self) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
        """Yield all tables with their numbers as text."""
        word = {True: "met", False: "MISSED", None: "-"}
        bars = [(b.name, b.mode, b.value, b.bound, word[b.met], b.note) for b in self.bars]
        targets = "Targets", ("figure", "cache", ">measured", ">target", "", "note"), bars
        for title, columns, rows in (targets, *self.tables()):
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
        """Write NAME.md, NAME.json and the plots to the folder `out`. Raise DiskError if that fails."""
        pictures = self.pictures()
        document = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        contents = {f"{self.name}.md": self.markdown(pictures).encode(), **pictures}
        contents[f"{self.name}.json"] = document.encode()  # written last: if NAME.json exists, all other files do, too
        with writing(f"to {out}", "--out another directory"):
            out.mkdir(parents=True, exist_ok=True)
            for file, data in contents.items():
                (out / file).write_bytes(data)

    def markdown(self, pictures: Iterable[str]) -> str:
        """Return the report as Markdown with links to the given plots."""
        m, what = self.machine, f"{self.model}, {self.said.format(**vars(self))}"
        option = f" --{self.name}" if self.name != "bench" else ""
        memory = f", {m.memory / 2**30:.0f} GiB" if m.memory else ""
        pages = f", transparent huge pages: {m.pages}" if m.pages else ""
        parts = [
            f"# kvtool bench{option}{self.tag and f', llama.cpp {self.tag}'}\n",
            f"Measured with {what}, on {m.processor}, {m.cores} cores{memory}, {m.system}{pages}. {self.verdict}.\n",
            self.how,
            *(f"![{Path(name).stem}]({name})\n" for name in pictures if name.endswith(".svg")),
            _TARGETS,
            *(f"## {title}\n\n{markdown_table(columns, rows)}" for title, columns, rows in self.shown()),
        ]
        return "\n".join([*parts, *([f"Left out: {self.skipped}.\n"] if self.skipped else [])])
