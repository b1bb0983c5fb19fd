"""Run a check: if its program crashes or hangs, the result is still a Finding, with the seconds that it took."""

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

LOG = 2000  # characters of a failed program's log to keep
_Trial = TypeVar("_Trial", bound=Callable[..., Finding])


class Failed(Exception):
    """A check failed: raised where that is seen. details: as in a Finding."""

    def __init__(self, status: str, reason: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.status, self.details = status, details or {}


def trial(judge: _Trial) -> _Trial:
    """Make a function that judges a check return a Finding with its duration, also if it raises Failed."""

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
    """Run a program for a check with the check's timeout. more: the keyword arguments of process.capture()."""
    try:
        return process.capture(argv, check=False, error=VerifyError, **{"timeout": check.timeout, **more})
    except VerifyError as late:  # the caller judges the output so far
        raise Failed("timeout", late.what) from late


def run_side(check: Check, argv: Sequence[str | Path], *, dynamic: bool, **more: Any) -> process.Completed:
    """Run one of the two sides of a comparison, which must succeed."""
    done = run_trial(check, argv, **more)
    if done.returncode != 0:
        side, flag = ("dynamic", "with") if dynamic else ("static", "without")
        said = f"{Path(argv[0]).stem} {flag} the flag ended with exit code {done.returncode}"
        raise Failed(f"{side}-fails", said, {"log": done.stderr[-LOG:]})
    return done


def answer(done: process.Completed) -> dict[str, Any]:
    """Return the JSON document in a program's last line.

    "ok" also requires exit code 0: the program prints "ok" before it frees its memory, and may crash while it does.
    """
    doc = parse_last_json_line(done.stdout)
    if doc is None:
        return {"status": "garbage", "reason": f"no document on its output, exit code {done.returncode}"}
    if doc.get("status") == "ok" and done.returncode != 0:
        doc |= {"status": "crash", "reason": f"it printed ok, but ended with exit code {done.returncode}"}
    return doc


@contextlib.contextmanager
def failing(status: str, what: str = "") -> Iterator[None]:
    """Turn a VerifyError inside into this failure of the check."""
    try:
        yield
    except VerifyError as err:
        raise Failed(status, f"{what}{err}", {"log": err.output}) from err
