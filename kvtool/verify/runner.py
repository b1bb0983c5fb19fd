"""Run checks: kv-check over many models at a time, the memory measurement; texts.py has the programs that write."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.result import CheckOutcome
from kvtool.verify.checks import MEMORY_CONTEXT, Check, Finding, failed, finding, judge_kv_check, judge_memory
from kvtool.verify.devices import IN_MEMORY, Lane
from kvtool.verify.models import QWEN35_27B

_GRACE = 30.0  # seconds for what kv-check does beside its two sides
_HEADROOM = 2 * 2**30  # bytes to leave to the rest of the machine when 8 GiB are about to be filled


class _Late(VerifyError):
    """A kv-check that did not come back in time."""


class _Stopped(Exception):
    """The run was given up (Ctrl-C); raised inside process.capture, it ends the program."""


def kv_check(check: Check, binary: Path, stop: threading.Event | None = None, lane: Lane = IN_MEMORY) -> Finding:
    """One kv-check run. Whatever it does, the answer is a Finding: a crash or a timeout of its own is a failure.

    stop: when it is set, the program is ended and _Stopped raised. Raises VerifyError when the lane's device is gone.
    """
    lane.ready()

    def look() -> None:
        if stop is not None and stop.is_set():
            raise _Stopped

    # -v: the log names the memory class. --timeout is kv-check's own, for a side: it then says what was under way.
    limit = str(max(1, int(check.timeout)))
    argv: list[str | Path] = [binary, "-m", check.model, *check.args, *lane.args, *f"-t 1 -v --timeout {limit}".split()]
    try:
        done = process.capture(argv, check=False, timeout=2 * check.timeout + _GRACE, error=_Late, on_tick=look)
    except _Late as late:
        return failed(check, "timeout", late.what, seconds=check.timeout, group=check.group or "other")
    return judge_kv_check(check, done.returncode, done.stdout, done.stderr, done.seconds)


@contextmanager
def _pool(jobs: int) -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """A pool that a Ctrl-C leaves at once: what has not started never does, what runs is told by the event."""
    pool, stop = ThreadPoolExecutor(jobs), threading.Event()
    try:
        yield pool, stop
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def kv_checks(
    checks: Sequence[Check],
    binary: Path,
    lanes: Sequence[Lane],
    on_progress: Callable[[int, str], None] = lambda _done, _running: None,
    on_finding: Callable[[Check, Finding], None] = lambda _check, _finding: None,
) -> list[Finding]:
    """All of them, one at a time in each lane; the findings in the order of the checks.

    on_progress is told how many are done and which models are running; on_finding each finding as it comes, one at a
    time.
    """
    running: set[str] = set()
    free = list(lanes)
    lock = threading.Lock()

    def one(check: Check) -> Finding:
        label = check.id.removeprefix("kv-check/")
        with lock:
            running.add(label)
            lane = free.pop()
        try:
            found = kv_check(check, binary, stop, lane)
            with lock:
                on_finding(check, found)
            return found
        finally:
            with lock:
                running.discard(label)
                free.append(lane)

    with _pool(len(lanes)) as (pool, stop):
        # The large models first: they take longest, and one that starts last would run alone at the end.
        heavy_first = sorted(range(len(checks)), key=lambda i: -_size(checks[i].model))
        started = {i: pool.submit(one, checks[i]) for i in heavy_first}
        futures: list[Future[Finding]] = [started[i] for i in range(len(checks))]
        pending: set[Future[Finding]] = set(futures)
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()  # an exception here is a bug of ours, and ends the run
            with lock:
                on_progress(len(futures) - len(pending), ", ".join(sorted(running)))
        return [future.result() for future in futures]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def memory(check: Check, binary: Path, available: int | None) -> Finding:
    """Resident bytes that a context of MEMORY_CONTEXT cells adds, dynamic and, where it fits, static."""
    cache = QWEN35_27B.bytes_per_cell() * MEMORY_CONTEXT
    seconds = 0.0
    sides: dict[str, int | None] = {"on": None, "off": None}
    too_little = available is not None and available < cache + _HEADROOM
    why = ""
    for side in sides:
        if side == "off" and too_little:
            why = f"it takes {cache / 2**30:.0f} GiB and {(available or 0) / 2**30:.1f} GiB are available"
            continue
        argv: list[str | Path] = [
            binary,
            "-m",
            check.model,
            "--memory",
            "-c",
            str(MEMORY_CONTEXT),
            "--kv-dynamic",
            side,
        ]
        argv += check.args
        try:
            done = process.capture(argv, check=False, timeout=check.timeout, error=_Late)
        except _Late as late:
            return failed(check, "timeout", late.what, seconds=check.timeout)
        seconds += done.seconds
        try:
            answer = json.loads(done.stdout)
            added = int(answer["rss_context"])
            known = int(answer["rss_before"]) >= 0 and answer["status"] == "ok"
        except (ValueError, KeyError, TypeError):
            reason = f"kv-check --memory printed no measurement (exit code {done.returncode})"
            return failed(check, "garbage", reason, details={"log": done.stderr[-2000:]}, seconds=seconds)
        if answer["status"] != "ok":
            name = "dynamic" if side == "on" else "static"
            return failed(check, f"{name}-fails", str(answer.get("reason", "")), seconds=seconds)
        if not known:
            return finding(check, CheckOutcome.SKIPPED, "skipped", "resident memory is not known on this system")
        sides[side] = added
    dynamic = sides["on"]
    assert dynamic is not None
    return _timed(judge_memory(check, sides["off"], dynamic, cache, why), seconds)


def _timed(found: Finding, seconds: float) -> Finding:
    from dataclasses import replace

    return replace(found, seconds=seconds)
