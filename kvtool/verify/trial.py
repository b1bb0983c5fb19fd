"""How a check is run: whatever its program does, the answer is a Finding, with the seconds that it took."""

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
    """Make a function that judges a check tell all there is to tell, also what it raises and how long it took."""

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
    """Run a program for a check, with as much time as that has; more: as process.capture takes it."""
    try:
        return process.capture(argv, check=False, error=VerifyError, **{"timeout": check.timeout, **more})
    except VerifyError as late:  # what it did in time, the caller judges
        raise Failed("timeout", late.what) from late


def run_side(check: Check, argv: Sequence[str | Path], *, dynamic: bool, **more: Any) -> process.Completed:
    """One of the two runs of a comparison, which must succeed."""
    done = run_trial(check, argv, **more)
    if done.returncode != 0:
        side, flag = ("dynamic", "with") if dynamic else ("static", "without")
        said = f"{Path(argv[0]).stem} {flag} the flag ended with exit code {done.returncode}"
        raise Failed(f"{side}-fails", said, {"log": done.stderr[-LOG:]})
    return done


def answer(done: process.Completed) -> dict[str, Any]:
    """What a program says in its last line. "ok" counts only if it ended well, too: it says so before it gives its
    memory back, and may crash there."""
    doc = parse_last_json_line(done.stdout)
    if doc is None:
        return {"status": "garbage", "reason": f"no document on its output, exit code {done.returncode}"}
    if doc.get("status") == "ok" and done.returncode != 0:
        doc |= {"status": "crash", "reason": f"it said ok, and ended with exit code {done.returncode}"}
    return doc


@contextlib.contextmanager
def failing(status: str, what: str = "") -> Iterator[None]:
    """A VerifyError inside is this failure of the check."""
    try:
        yield
    except VerifyError as err:
        raise Failed(status, f"{what}{err}", {"log": err.output}) from err
