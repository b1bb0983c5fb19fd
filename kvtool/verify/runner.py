"""Run checks: kv-check on many models at a time, and the measurement of memory.

texts.py runs the programs that write text.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeAlias

from kvtool.machine import memory_warning
from kvtool.verify.checks import MEMORY_CONTEXT, Check, Finding, judge_kv_check, judge_memory, skipped
from kvtool.verify.devices import IN_MEMORY, Lane
from kvtool.verify.models import QWEN35_27B
from kvtool.verify.trial import LOG, Failed, answer, run_trial, trial

OnFinding: TypeAlias = Callable[[Check, Finding], None]
_GRACE = 30.0  # seconds that kv-check may need in addition to the time of its two sides


@trial
def kv_check(check: Check, binary: Path, stop: threading.Event | None = None, lane: Lane = IN_MEMORY) -> Finding:
    """Run kv-check once, and return a Finding. If kv-check itself crashes or is too slow, the check fails.

    stop: an event that ends the program and this function, for Ctrl-C
    lane: yields the arguments for the device that this run of kv-check uses

    Raises VerifyError if the device of the lane does not work.
    """

    def look() -> None:
        if stop is not None and stop.is_set():
            raise KeyboardInterrupt

    # -v makes kv-check print the memory class. --timeout is kv-check's own limit for each side; with it, kv-check says
    # which step it interrupted.
    limit = str(max(1, int(check.timeout)))
    argv: list[str | Path] = [binary, "-m", check.model, *f"-t 1 -v --timeout {limit}".split(), *check.args]
    with lane() as device:
        done = run_trial(check, [*argv, *device], timeout=2 * check.timeout + _GRACE, on_tick=look)
    return judge_kv_check(check, done.returncode, done.stdout, done.stderr)


def kv_checks(
    checks: Sequence[Check],
    binary: Path,
    lanes: Sequence[Lane],
    on_progress: Callable[[int, str], None] = lambda *_: None,
    on_finding: OnFinding = lambda *_: None,
) -> list[Finding]:
    """Run the checks, one at a time in each lane. Return the findings in the order of the checks.

    on_progress: called with the number of finished checks and the names of the running models
    on_finding: called with each check and its finding

    Both functions are called from other threads, but never two calls at the same time.
    """
    # Start large models first. They take longest, and a large model that starts late would run alone at the end.
    waiting = sorted(checks, key=lambda check: -check.model.stat().st_size if check.model.exists() else 0)
    running, found = set[str](), dict[str, Finding]()
    lock, stop = threading.Lock(), threading.Event()

    def work(lane: Lane) -> None:
        while not stop.is_set():
            with lock:
                if not waiting:
                    return
                check = waiting.pop(0)
                label = check.id.removeprefix("kv-check/")
                running.add(label)
                on_progress(len(found), ", ".join(sorted(running)))
            finding = kv_check(check, binary, stop, lane)
            with lock:
                on_finding(check, finding)
                found[check.id] = finding
                running.remove(label)
                on_progress(len(found), ", ".join(sorted(running)))

    with ThreadPoolExecutor(len(lanes)) as pool:
        try:
            for worker in as_completed([pool.submit(work, lane) for lane in lanes]):
                worker.result()  # an exception here is a bug in kvtool, so end the run
        finally:  # this also runs after Ctrl-C: stop the running programs, and start no others
            stop.set()
    return [found[check.id] for check in checks]


@trial
def memory(check: Check, binary: Path, available: int | None) -> Finding:
    """Measure the resident bytes that a context of MEMORY_CONTEXT cells adds.

    Measures a dynamic cache and, if a static cache fits into the machine's memory, also a static cache.
    """
    cache = QWEN35_27B.bytes_per_cell() * MEMORY_CONTEXT
    dynamic = _resident(check, binary, dynamic=True)
    if dynamic is None:
        return skipped(check, "resident memory is not known on this system")
    why = memory_warning(cache, available)
    return judge_memory(check, None if why else _resident(check, binary, dynamic=False), dynamic, cache, why)


def _resident(check: Check, binary: Path, *, dynamic: bool) -> int | None:
    """Return the bytes that a context adds to the resident memory; None if the system does not say."""
    argv: list[str | Path] = [binary, "-m", check.model, *f"--memory -c {MEMORY_CONTEXT}".split()]
    done = run_trial(check, [*argv, "--kv-dynamic", "on" if dynamic else "off", *check.args])
    said, log = answer(done), {"log": done.stderr[-LOG:]}
    try:
        before, added, status = int(said["rss_before"]), int(said["rss_context"]), said["status"]
    except (ValueError, KeyError, TypeError) as err:
        reason = f"kv-check --memory printed no measurement (exit code {done.returncode})"
        raise Failed("garbage", reason, log) from err
    if status != "ok":
        raise Failed("dynamic-fails" if dynamic else "static-fails", str(said.get("reason", "")), log)
    return added if before >= 0 else None
