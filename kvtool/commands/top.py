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

SHORTEST, LONGEST = 0.1, 3600.0  # seconds between two readings


@dataclass(frozen=True)
class TopResult(Result, command="top"):
    """Report the last reading of the server."""

    url: str
    server: Reading

    def render(self, console: Console) -> None:
        console.picture(lambda width, height: draw(View(self.url, self.server), width, height))


def _look(server: "Server", view: View, awaited: type[NetworkError]) -> View:
    """Read the server again and return the new view.

    awaited: the errors after which the display continues; other errors end it
    """
    try:
        return view.with_reading(server.read(), time.monotonic())
    except awaited as err:
        return view.with_failure(err, time.monotonic())


def _watch(server: "Server", console: Console, interval: float) -> Reading:
    from kvtool.top.server import LoadingError

    # at the start, wait only for a server that is loading its model, not for one that does not answer
    view = _look(server, View(server.url), LoadingError)
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
        bool,
        Option("--once", help="Print the numbers once and exit. This is also done with --json or without a terminal."),
    ] = False,
    interval: Annotated[float, Option("--interval", "-i", metavar="SECONDS", help="Time between two readings.")] = 1.0,
    api_key: Annotated[
        str,
        Option("--api-key", metavar="KEY", envvar="LLAMA_API_KEY", help="API key of the server.", show_default=False),
    ] = "",
) -> TopResult:
    """Watch a llama-server that runs with --kv-dynamic.

    Shows the memory of the server's caches: how much is used, how much is allocated, and how much address space is
    reserved. Shows the cells and the state of each slot, the tokens per second, and a line whenever a cache grows or
    frees memory. Other numbers of the caches that the server reports follow. Ctrl-C ends the display.

        kvtool top                            # a server on this machine, port 9931
        kvtool top http://gpu.lan:9090 -i 5   # another server, every five seconds
        kvtool top --once --json              # one document for a script

    kvtool top reads /props and /slots, so the server does not need --metrics. A sleeping server is not woken. A server
    that is awake does not fall asleep, because each reading counts as use for --sleep-idle-seconds. The tokens per
    second include only requests that are running during a reading. For short requests, use a short --interval.

    If a server stops answering while it is watched, kvtool top waits for it.

    Exit codes: 0 success, also for a sleeping server, 2 the API key is missing or wrong, 8 the server does not report
    these numbers (it is unpatched, was started without --kv-dynamic, or is another program), 9 there is no answer, or
    the model is still loading.
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
