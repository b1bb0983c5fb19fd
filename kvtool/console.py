"""The only module that prints.

Results go to stdout: a human rendering, or with --json one document and nothing else. Everything on the way (steps,
progress, commands, errors) goes to stderr, so that stdout can be piped.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TypeAlias, TypeVar

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.markup import escape as escape
from rich.progress import BarColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from kvtool import process
from kvtool.errors import KvtoolError

_T = TypeVar("_T")
_R = TypeVar("_R")
_QUIET_SECONDS = 10.0  # how often a progress is told where nobody sees a bar (CI logs)
# what is done with a tree; of fetch, doctor and the like it is all the same where it is
_ON_TREE = re.compile(r"\bkvtool (apply|status|build|verify|package|bench|export|rebase|diff)\b(?! --help)")
_PLAIN = str.maketrans("█▓░", "#=.")  # bars where the terminal has no such characters

Line: TypeAlias = Sequence[tuple[str, str]]  # pieces of one line of a picture: a text and its rich style
Draw: TypeAlias = Callable[[int, int], Sequence[Line]]  # the picture for that many columns and lines


class Progress:
    """A bar that redraws itself on a terminal, a line now and then elsewhere. done, total: in the caller's unit."""

    def __init__(self, bars: RichProgress, say: Callable[[str], None], text: str, total: float | None) -> None:
        self._bars, self._say, self._text = bars, say, text
        self._task = bars.add_task(escape(text), total=total, note="")
        self._last, self._said = time.monotonic(), text

    def update(self, done: float, note: str = "") -> None:
        self._bars.update(self._task, completed=done, note=escape(note))
        if not self._bars.disable:
            return
        now, (task,) = time.monotonic(), self._bars.tasks
        share = f" {task.percentage:.0f}%" if task.total else ""
        line = f"{self._text}{share} {note}".rstrip()
        if line != self._said and now - self._last >= _QUIET_SECONDS:
            self._last, self._said = now, line
            self._say(line)

    def set_total(self, total: float | None) -> None:
        self._bars.update(self._task, total=total)


class _Stream(RichConsole):
    """Where a reader that goes away is no failure: the rest goes nowhere, and the command ends as it would have."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _drop(self.file)


class Console:
    """Made by cli.py, handed to every command. command: the verb that an error document names; places: what was typed
    to name the tree and the project, as " --tree DIR"."""

    def __init__(
        self, *, json: bool = False, quiet: bool = False, verbose: bool = False, command: str = "", places: str = ""
    ) -> None:
        self.json, self.quiet, self.verbose, self.command, self._places = json, quiet, verbose, command, places
        self.upstream = "llama.cpp"  # name of the project's upstream, set when the project is found
        self._out = _Stream(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
        self._err = _Stream(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
        process.on_command((lambda argv: self.aside(f"+ {process.quote(argv)}")) if verbose else None)

    def again(self, text: str) -> str:
        """What to do next, its commands as they are typed for the same tree and project as this one."""
        return _ON_TREE.sub(lambda command: command[0] + self._places, text)

    def step(self, text: str) -> None:
        if not self.quiet:
            self._err.print(_as_it_is(text))

    def aside(self, text: str) -> None:
        """What a person may want to know besides, on stderr: a command, the output of one, a traceback."""
        self._err.print(_as_it_is(text.rstrip()), style="dim")

    @contextlib.contextmanager
    def progress(self, text: str, total: float | None = None) -> Iterator[Progress]:
        """A bar on stderr while the block runs (total None: unknown); sparse lines where stderr is no terminal."""
        hidden = self.quiet or not self._err.is_terminal
        if hidden:
            self.step(text)
        what, share, note = "{task.description}", "{task.percentage:>3.0f}%", "[dim]{task.fields[note]}"
        columns = (what, BarColumn(), share, TimeElapsedColumn(), note)
        bars = RichProgress(*columns, console=self._err, transient=True, disable=hidden)
        with contextlib.nullcontext() if hidden else bars:
            yield Progress(bars, self.step, text, total)

    def each(self, text: str, items: Sequence[_T], do: Callable[[_T], _R], note: Callable[[_T], str] = str) -> list[_R]:
        """Do something with one item after the other, and show a progress (none for no items) that notes which."""
        found: list[_R] = []
        if items:
            with self.progress(text, len(items)) as bar:
                for item in items:
                    bar.update(len(found), note(item))
                    found.append(do(item))
        return found

    def line(self, text: str = "", style: str | None = None) -> None:
        """One line of a result, on stdout; for Result.render() only. style: a rich style such as "bold red"."""
        self._out.print(_as_it_is(text), style=style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
        """A table of a result, on stdout; a column whose name starts with ">" is right-aligned."""
        table = Table(title=escape(title) or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in columns:
            name = column.removeprefix(">")
            table.add_column(escape(name), justify="left" if name == column else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self._out.print(table, soft_wrap=False)

    @property
    def interactive(self) -> bool:
        """Whether stdout is a terminal on which a picture can be drawn again and again."""
        return self._out.is_terminal and not self._out.is_dumb_terminal

    def picture(self, draw: Draw) -> None:
        """A picture as part of a result, on stdout: as wide as the terminal, as high as it is."""
        self._out.print(drawn(draw(self._out.width, 0), plain=self._out.options.ascii_only), soft_wrap=False, crop=True)

    @contextlib.contextmanager
    def screen(self, draw: Draw) -> Iterator[None]:
        """The whole terminal shows the picture while the block runs; it is drawn anew all the time, and for each size.

        What stood there before stands there again afterwards.
        """
        console = RichConsole(file=sys.stdout, highlight=False)
        plain = console.options.ascii_only
        with Live(console=console, screen=True, get_renderable=lambda: drawn(draw(*console.size), plain=plain)):
            yield

    def error(self, err: KvtoolError) -> None:
        """An error: one JSON document on stdout, or what / why / next on stderr."""
        if self.json:
            try:
                self.document({"command": self.command, "ok": False, "error": err.to_json()})
                return
            except OSError:  # on a full disk it is told below
                _drop(sys.stdout)
        self._err.print("[bold red]error:[/bold red]", end=" ")
        self._err.print(_as_it_is(err.what))
        if err.why:
            self._err.print(_as_it_is(f"  why:  {err.why}"))
        if err.next_step:
            self._err.print(_as_it_is("  next: " + err.next_step.replace("\n", "\n        ")))
        if err.output:
            self.aside(err.output)

    def document(self, doc: object) -> None:
        """One JSON document on stdout, plain and in ASCII, so that no encoding of stdout matters."""
        try:
            sys.stdout.write(json.dumps(doc, indent=2, default=str) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            _drop(sys.stdout)


def _drop(stream: IO[str]) -> None:
    """What is still to be written there goes nowhere, also what Python writes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_output() -> bool:
    """Write what stdout still holds. False when that cannot be; Python's own attempt would end with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)
        return False
    return True


def _as_it_is(text: str) -> Segments:
    """A text for rich of which nothing changes: no tab, no backslash, nothing that could be markup or an emoji."""
    return Segments([Segment(text)], new_lines=True)


def drawn(lines: Sequence[Line], *, plain: bool = False) -> Group:
    """A picture for rich: no line is broken, and of one that is too long the end is left out."""
    marks = _PLAIN if plain else {}
    pieces = ([(text.translate(marks), style) for text, style in line] for line in lines)
    return Group(*(Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in pieces))
