"""Print texts for all other modules.

A result is printed to stdout, as text or, with --json, as one document. Everything else (steps, progress, commands,
errors) is printed to stderr, so that stdout can be used in a pipe.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeAlias, TypeVar

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.markup import escape as escape
from rich.progress import BarColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment, Segments
from rich.table import Column, Table
from rich.text import Text

from kvtool import process
from kvtool.errors import KvtoolError

_T = TypeVar("_T")
_R = TypeVar("_R")
# seconds between two lines of progress if there is no terminal, for example in the log of a CI system
_QUIET_SECONDS = 10.0
# commands that use the tree, so they get --tree; fetch, doctor and others do not
_ON_TREE = re.compile(r"\bkvtool (apply|status|build|verify|package|bench|export|rebase|diff)\b(?! --help)")
_COMMAND = re.compile(r"(?<![\w/.-])kvtool (?=[a-z])")
_PLAIN = str.maketrans("█▓░", "#=.")  # characters of bars for a terminal without the block characters

Line: TypeAlias = Sequence[tuple[str, str]]  # one line of a picture: pieces of text, each with its style for rich
Draw: TypeAlias = Callable[[int, int], Sequence[Line]]  # returns a picture for a number of columns and lines


class Progress:
    """Show a progress bar on a terminal, or a line from time to time elsewhere.

    The caller chooses the unit of `done`.
    """

    def __init__(self, bars: RichProgress, say: Callable[[str], None], text: str, total: float | None) -> None:
        self._bars, self._say, self._text = bars, say, text
        self._task = bars.add_task(escape(text), total=total, note="")
        self._last, self._said = time.monotonic(), text

    def update(self, done: float, note: str = "") -> None:
        """Show how much is done, and a note."""
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
        """Set the total amount of work."""
        self._bars.update(self._task, total=total)


class _Stream(RichConsole):
    """Write to a stream, and drop the rest of the output if the pipe is closed, as in `kvtool ... | head`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _drop(self.file)


class Console:
    """Print all output of kvtool. cli.py makes it, and every command gets it.

    command: the name of the command, for an error as JSON
    places: the options --tree and --project as the user gave them, such as " --tree DIR"; "" for none
    """

    def __init__(
        self, *, json: bool = False, quiet: bool = False, verbose: bool = False, command: str = "", places: str = ""
    ) -> None:
        self.json, self.quiet, self.verbose, self.command, self._places = json, quiet, verbose, command, places
        self.upstream = "llama.cpp"  # name of the project's upstream; it is set when the project is found
        self._out = _Stream(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
        self._err = _Stream(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
        process.on_command((lambda argv: self.aside(f"+ {process.quote(argv)}")) if verbose else None)

    def again(self, text: str) -> str:
        """Return a text whose kvtool commands can be pasted.

        The user's --tree and --project are added to the commands. If `kvtool` is not in PATH, the commands begin with
        the path with which the user started it, for example .venv/bin/kvtool.
        """
        placed = _ON_TREE.sub(lambda command: command[0] + self._places, text)
        started = Path(sys.argv[0])
        if started.name != "kvtool" or shutil.which("kvtool"):
            return placed
        return _COMMAND.sub(lambda _command: process.quote([started]) + " ", placed)

    def step(self, text: str) -> None:
        """Print one step of the work to stderr, unless the user gave --quiet."""
        if not self.quiet:
            self._err.print(_as_it_is(text))

    def aside(self, text: str) -> None:
        """Print a detail to stderr: a command line, its output, or a traceback."""
        self._err.print(_as_it_is(text.rstrip()), style="dim")

    @contextlib.contextmanager
    def progress(self, text: str, total: float | None = None) -> Iterator[Progress]:
        """Show a progress bar on stderr while the block runs.

        Without a terminal, print a line from time to time instead.

        total: the amount of work, None if it is unknown
        """
        hidden = self.quiet or not self._err.is_terminal
        if hidden:
            self.step(text)
        what, share = "{task.description}", "{task.percentage:>3.0f}%"
        columns = (what, BarColumn(20), share, TimeElapsedColumn(), _Note())
        bars = RichProgress(*columns, console=self._err, transient=True, disable=hidden)
        with contextlib.nullcontext() if hidden else bars:
            yield Progress(bars, self.step, text, total)

    def each(self, text: str, items: Sequence[_T], do: Callable[[_T], _R], note: Callable[[_T], str] = str) -> list[_R]:
        """Call `do` for each item, and return the results. Show progress, with a note about the item."""
        found: list[_R] = []
        if items:
            with self.progress(text, len(items)) as bar:
                for item in items:
                    bar.update(len(found), note(item))
                    found.append(do(item))
        return found

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print one line of a result to stdout.

        style: a style of rich, such as "bold red"
        """
        self._out.print(_as_it_is(text), style=style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
        """Print a table of a result to stdout. A column whose name starts with ">" is aligned to the right."""
        table = Table(title=escape(title) or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in columns:
            name = column.removeprefix(">")
            table.add_column(escape(name), justify="left" if name == column else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self._out.print(table, soft_wrap=False)

    @property
    def interactive(self) -> bool:
        """Return True if stdout is a terminal on which a picture can be drawn again and again."""
        return self._out.is_terminal and not self._out.is_dumb_terminal

    def picture(self, draw: Draw) -> None:
        """Print a picture as a part of a result to stdout. It is as wide as the terminal, and as high as needed."""
        self._out.print(drawn(draw(self._out.width, 0), plain=self._out.options.ascii_only), soft_wrap=False, crop=True)

    @contextlib.contextmanager
    def screen(self, draw: Draw) -> Iterator[None]:
        """Show a picture on the whole terminal while the block runs.

        The picture is drawn again several times per second, so it also adapts to a new size of the terminal.

        Afterwards, the previous content of the terminal is restored.
        """
        console = RichConsole(file=sys.stdout, highlight=False)
        plain = console.options.ascii_only
        with Live(console=console, screen=True, get_renderable=lambda: drawn(draw(*console.size), plain=plain)):
            yield

    def error(self, err: KvtoolError) -> None:
        """Print an error: as one JSON document to stdout, or as what, why and next to stderr."""
        if self.json:
            try:
                self.document({"command": self.command, "ok": False, "error": err.to_json()})
                return
            except OSError:  # the disk is full, so print the error to stderr
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
        """Print one JSON document to stdout. It is ASCII, so the encoding of stdout does not matter."""
        try:
            sys.stdout.write(json.dumps(doc, indent=2, default=str) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            _drop(sys.stdout)


class _Note(TextColumn):
    """Show the note of a progress bar. If the line is too long, shorten the note, not the percentage or the time."""

    def __init__(self) -> None:
        # if a line is too long, rich first shortens the columns that may wrap, so let this column wrap
        super().__init__("[dim]{task.fields[note]}", table_column=Column(no_wrap=False))

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def _drop(stream: IO[str]) -> None:
    """Drop all further output of a stream, including what Python writes when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_output() -> bool:
    """Flush stdout, and return True. If flushing fails, drop the rest of the output and return False.

    Without this call, Python would flush stdout when it exits. If that failed, the exit code would be 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)
        return False
    return True


def _as_it_is(text: str) -> Segments:
    """Return an object that rich prints as the exact text: tabs, [markup] and :emoji: codes stay unchanged."""
    return Segments([Segment(text)], new_lines=True)


def drawn(lines: Sequence[Line], *, plain: bool = False) -> Group:
    """Convert lines of styled text to an object that rich can print.

    Lines are not wrapped: a line that is too long is cut off, and ends in an ellipsis.
    """
    marks = _PLAIN if plain else {}
    pieces = ([(text.translate(marks), style) for text, style in line] for line in lines)
    return Group(*(Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in pieces))
