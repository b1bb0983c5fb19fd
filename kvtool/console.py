"""Print for every other module.

Results are printed to stdout: for people, or with --json as one document and nothing else. Everything else (steps,
progress, commands, errors) is printed to stderr, so that stdout can be piped.
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
_QUIET_SECONDS = 10.0  # interval of progress lines without a terminal, as in CI logs
# commands that depend on the tree; fetch, doctor and the like do not
_ON_TREE = re.compile(r"\bkvtool (apply|status|build|verify|package|bench|export|rebase|diff)\b(?! --help)")
_PLAIN = str.maketrans("█▓░", "#=.")  # bars for a terminal without these characters

Line: TypeAlias = Sequence[tuple[str, str]]  # one line of a picture: pieces of text, each with its rich style
Draw: TypeAlias = Callable[[int, int], Sequence[Line]]  # returns the picture for a number of columns and lines


class Progress:
    """A progress bar on a terminal, occasional lines elsewhere. `done` and `total` have the unit of the caller."""

    def __init__(self, bars: RichProgress, say: Callable[[str], None], text: str, total: float | None) -> None:
        self._bars, self._say, self._text = bars, say, text
        self._task = bars.add_task(escape(text), total=total, note="")
        self._last, self._said = time.monotonic(), text

    def update(self, done: float, note: str = "") -> None:
        """Show the number of finished items, and a note."""
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
        """Set the number of items."""
        self._bars.update(self._task, total=total)


class _Stream(RichConsole):
    """A console that ignores a closed pipe (`kvtool ... | head`): the remaining output is dropped."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _drop(self.file)


class Console:
    """All output of kvtool. Made by cli.py and passed to every command.

    `command` is the verb in an error document. `places` are the options that name tree and project, as " --tree DIR".
    """

    def __init__(
        self, *, json: bool = False, quiet: bool = False, verbose: bool = False, command: str = "", places: str = ""
    ) -> None:
        self.json, self.quiet, self.verbose, self.command, self._places = json, quiet, verbose, command, places
        self.upstream = "llama.cpp"  # name of the project's upstream, set when the project is found
        self._out = _Stream(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
        self._err = _Stream(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
        process.on_command((lambda argv: self.aside(f"+ {process.quote(argv)}")) if verbose else None)

    def again(self, text: str) -> str:
        """Add the --tree and --project of this call to the kvtool commands in a text."""
        return _ON_TREE.sub(lambda command: command[0] + self._places, text)

    def step(self, text: str) -> None:
        """Print one step of the work to stderr, unless --quiet."""
        if not self.quiet:
            self._err.print(_as_it_is(text))

    def aside(self, text: str) -> None:
        """Print extra detail to stderr: a command line, its output, or a traceback."""
        self._err.print(_as_it_is(text.rstrip()), style="dim")

    @contextlib.contextmanager
    def progress(self, text: str, total: float | None = None) -> Iterator[Progress]:
        """Show a bar on stderr while the block runs, or sparse lines without a terminal. `total` None means unknown."""
        hidden = self.quiet or not self._err.is_terminal
        if hidden:
            self.step(text)
        what, share, note = "{task.description}", "{task.percentage:>3.0f}%", "[dim]{task.fields[note]}"
        columns = (what, BarColumn(), share, TimeElapsedColumn(), note)
        bars = RichProgress(*columns, console=self._err, transient=True, disable=hidden)
        with contextlib.nullcontext() if hidden else bars:
            yield Progress(bars, self.step, text, total)

    def each(self, text: str, items: Sequence[_T], do: Callable[[_T], _R], note: Callable[[_T], str] = str) -> list[_R]:
        """Call `do` for each item and show progress with a note for the item."""
        found: list[_R] = []
        if items:
            with self.progress(text, len(items)) as bar:
                for item in items:
                    bar.update(len(found), note(item))
                    found.append(do(item))
        return found

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print one line of a result to stdout, for Result.render(). `style` is a rich style such as "bold red"."""
        self._out.print(_as_it_is(text), style=style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
        """Print a table of a result to stdout. A column whose name starts with ">" is right-aligned."""
        table = Table(title=escape(title) or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in columns:
            name = column.removeprefix(">")
            table.add_column(escape(name), justify="left" if name == column else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self._out.print(table, soft_wrap=False)

    @property
    def interactive(self) -> bool:
        """Return True if stdout is a terminal that can redraw a picture."""
        return self._out.is_terminal and not self._out.is_dumb_terminal

    def picture(self, draw: Draw) -> None:
        """Print a picture as part of a result to stdout, as wide as the terminal and as high as needed."""
        self._out.print(drawn(draw(self._out.width, 0), plain=self._out.options.ascii_only), soft_wrap=False, crop=True)

    @contextlib.contextmanager
    def screen(self, draw: Draw) -> Iterator[None]:
        """Show the picture on the whole terminal while the block runs, and redraw it continuously and on resize.

        The previous content of the terminal is restored afterwards.
        """
        console = RichConsole(file=sys.stdout, highlight=False)
        plain = console.options.ascii_only
        with Live(console=console, screen=True, get_renderable=lambda: drawn(draw(*console.size), plain=plain)):
            yield

    def error(self, err: KvtoolError) -> None:
        """Print an error: one JSON document on stdout, or what / why / next on stderr."""
        if self.json:
            try:
                self.document({"command": self.command, "ok": False, "error": err.to_json()})
                return
            except OSError:  # on a full disk, print the error below
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
        """Print one JSON document to stdout in ASCII, independent of the encoding of stdout."""
        try:
            sys.stdout.write(json.dumps(doc, indent=2, default=str) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            _drop(sys.stdout)


def _drop(stream: IO[str]) -> None:
    """Discard all further output of a stream, including what Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_output() -> bool:
    """Flush stdout. Return False if that fails; Python would exit with 120 when it tries at the end."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)
        return False
    return True


def _as_it_is(text: str) -> Segments:
    """Make rich print a text verbatim, without expanding tabs, markup or emoji codes."""
    return Segments([Segment(text)], new_lines=True)


def drawn(lines: Sequence[Line], *, plain: bool = False) -> Group:
    """Convert a picture for rich. Lines are not wrapped; a long line ends in an ellipsis."""
    marks = _PLAIN if plain else {}
    pieces = ([(text.translate(marks), style) for text, style in line] for line in lines)
    return Group(*(Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in pieces))
