"""Implement `kvtool top`: watch the caches and slots of a running llama-server."""

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvtool.console import Console
from kvtool.errors import NetworkError, UsageError
from kvtool.options import Context, env_of
from kvtool.result import Result
from kvtool.top.draw import draw
from kvtool.top.reading import DEFAULT_URL, Reading
from kvtool.top.view import View

if TYPE_CHECKING:
    from kvtool.top.server import Server

SHORTEST, LONGEST = 0.1, 3600.0  # seconds between two looks


@dataclass(frozen=True)
class TopResult(Result, command="top"):
    """Hold the last numbers of the server."""

    url: str
    server: Reading

    def render(self, console: Console) -> None:
        console.picture(lambda width, height: draw(View(self.url, self.server), width, height))


def _look(server: "Server", view: View, awaited: type[NetworkError]) -> View:
    """Return the view after another reading. awaited: the errors that do not end the display."""
    try:
        return view.with_reading(server.read(), time.monotonic())
    except awaited as err:
        return view.with_failure(err, time.monotonic())


def _watch(server: "Server", console: Console, interval: float) -> Reading:
    from kvtool.top.server import LoadingError

    view = _look(server, View(server.url), LoadingError)  # nothing is there to wait for where nothing listens
    with contextlib.suppress(KeyboardInterrupt), console.screen(lambda width, height: draw(view, width, height)):
        while True:
            time.sleep(interval)
            view = _look(server, view, NetworkError)
    if view.trouble:
        raise view.trouble
    assert view.reading is not None
    return view.reading


def command(
    ctx: Context,
    url: Annotated[str, Argument(metavar="URL", help="Address of the server.")] = DEFAULT_URL,
    once: Annotated[
        bool, Option("--once", help="Print the numbers once and exit, like --json or without a terminal.")
    ] = False,
    interval: Annotated[float, Option("--interval", "-i", metavar="SECONDS", help="Time between two readings.")] = 1.0,
    api_key: Annotated[
        str,
        Option("--api-key", metavar="KEY", envvar="LLAMA_API_KEY", help="API key of the server.", show_default=False),
    ] = "",
) -> TopResult:
    """Watch a llama-server that runs with --kv-dynamic.

    Shows used, committed and reserved memory of its caches; the cells and the state of each slot; tokens per second;
    growth and freed memory as events; and all other numbers of the caches that the server reports. Ctrl-C ends it.

        kvtool top                            # a server on this machine, port 8080
        kvtool top http://gpu.lan:9090 -i 5   # another one, every five seconds
        kvtool top --once --json              # one document for a script

    It reads /props and /slots, so the server needs no --metrics. It does not wake a sleeping server. A server that is
    awake stays awake, because each reading counts as use for --sleep-idle-seconds. Tokens per second include only
    requests that are running during a reading; use a short --interval for short requests.

    Exit codes: 2 missing or wrong API key; 8 the server does not report these numbers (unpatched, started without
    --kv-dynamic, or another program); 9 no answer, or the model is still loading; 0 on success, also for a sleeping
    server. If a server stops answering, kvtool top waits for it.
    """
    env = env_of(ctx)
    from kvtool.top.server import Server

    console = env.console
    if not SHORTEST <= interval <= LONGEST:
        raise UsageError(f"--interval {interval:g} is not between {SHORTEST:g} and {LONGEST:g} seconds")
    with Server(url, api_key) as server:
        if once or console.json or not console.interactive:
            return TopResult(server.url, server.read())
        return TopResult(server.url, _watch(server, console, interval))
