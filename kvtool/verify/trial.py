"""Run a check and return its result. If its program crashes or hangs, the result is a failed Finding."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.result import parse_last_json_line
from kvtool.verify.checks import Check, Finding, failed

LOG = 2000  # most characters of a failed program's log that are kept
_Trial = TypeVar("_Trial", bound=Callable[..., Finding])


class Failed(Exception):
    """Report that a check failed. A check raises this exception, and trial() turns it into a Finding.

    details: the details of that Finding
    """

    def __init__(self, status: str, reason: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.status, self.details = status, details or {}


def trial(judge: _Trial) -> _Trial:
    """Decorate a function that judges a check: measure its duration, and return a Finding even if it raises Failed."""

    @functools.wraps(judge)
    def timed(check: Check, *args: Any, **more: Any) -> Finding:
        started = time.monotonic()
        try:
            found = judge(check, *args, **more)
        except Failed as err:
            found = failed(check, err.status, str(err), details=err.details)
        return replace(found, seconds=time.monotonic() - started)

    return cast(_Trial, timed)


def run_trial(check: Check, argv: Sequence[str | Path], **more: Any) -> process.Completed:
    """Run the program of a check with the timeout of the check.

    more: keyword arguments of process.capture()
    """
    try:
        return process.capture(argv, check=False, error=VerifyError, **{"timeout": check.timeout, **more})
    except VerifyError as late:  # the program was too slow; its output so far is still judged
        raise Failed("timeout", late.what) from late


def run_side(check: Check, argv: Sequence[str | Path], *, dynamic: bool, **more: Any) -> process.Completed:
    """Run one of the two sides of a comparison. Raise Failed if its exit code is not 0."""
    done = run_trial(check, argv, **more)
    if done.returncode != 0:
        side, flag = ("dynamic", "with") if dynamic else ("static", "without")
        said = f"{Path(argv[0]).stem} {flag} the flag ended with exit code {done.returncode}"
        raise Failed(f"{side}-fails", said, {"log": done.stderr[-LOG:]})
    return done


def answer(done: process.Completed) -> dict[str, Any]:
    """Return the JSON document in the last line of a program's output.

    The status "ok" also requires exit code 0. The program prints "ok" before it frees its memory, and may crash while
    it does so.
    """
    doc = parse_last_json_line(done.stdout)
    if doc is None:
        return {"status": "garbage", "reason": f"no document on its output, exit code {done.returncode}"}
    if doc.get("status") == "ok" and done.returncode != 0:
        doc |= {"status": "crash", "reason": f"it printed ok, but ended with exit code {done.returncode}"}
    return doc


@contextlib.contextmanager
def failing(status: str, what: str = "") -> Iterator[None]:
    """Turn a VerifyError in the `with` block into the exception Failed with this status."""
    try:
        yield
    except VerifyError as err:
        raise Failed(status, f"{what}{err}", {"log": err.output}) from err
