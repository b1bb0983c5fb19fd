"""Programs that write, with and without --kv-dynamic: llama-completion's texts, and llama-bench, which only measures.

Equal texts are a weaker proof than kv-check's equal bits, and they prove something else: that the programs people use
pass the flag on. The server has a conversation to itself, in conversation.py.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.result import CheckOutcome
from kvtool.verify.checks import Check, Finding, failed, finding

FLAG = "--kv-dynamic"
VARIABLE = {"LLAMA_ARG_KV_DYNAMIC": "1"}
GREW = re.compile(r"resizing KV cache from (\d+) to (\d+) cells")

_WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know river stone window "
    "garden letter engine harbour winter music number silver mountain bridge paper morning forest market shadow"
)


def prompt(seed: int, length: int) -> str:
    """English words in a random order that the seed decides; about a token each."""
    rng = random.Random(seed)
    words = _WORDS.split()
    return " ".join(rng.choice(words) for _ in range(length))


_COMPLETION = (
    "-c 4096 -n 256 -t 1 --temp 0 --seed 1 --ignore-eos -no-cnv --no-display-prompt --no-warmup -lv 4"  # 4: INFO
)


_BENCH = "-p 512 -n 8 -r 1 -t 1 -o json -v"


def growths(log: str) -> list[list[int]]:
    """[from, to] in cells of each growth that the log tells of."""
    return [[int(a), int(b)] for a, b in GREW.findall(log)]


# ---- llama-completion ------------------------------------------------------------------------------------------------


def completion(check: Check, binary: Path, work: Path) -> Finding:
    """The same prompt, longer than the first 256 cells, without and with the flag; the texts must be equal bytes."""
    started = time.monotonic()
    file = work / "prompt.txt"
    file.write_text(prompt(1, 320), "utf-8")
    common: list[str | Path] = [binary, "-m", check.model, "-f", file, *_COMPLETION.split(), *check.args]
    runs = []
    for dynamic in (False, True):
        more = [FLAG] if dynamic and not check.by_env else []
        env = VARIABLE if dynamic and check.by_env else {}
        try:
            done = process.capture([*common, *more], env=env, check=False, timeout=check.timeout, error=_Late)
        except _Late as late:
            return failed(check, "timeout", str(late.what), seconds=time.monotonic() - started)
        if done.returncode != 0:
            status = "dynamic-fails" if dynamic else "static-fails"
            reason = f"llama-completion {' '.join(more)} ended with exit code {done.returncode}".replace("  ", " ")
            return failed(check, status, reason, details={"log": done.stderr[-2000:]})
        runs.append(done)
    first, second = runs
    seconds = time.monotonic() - started
    details = {"characters": len(second.stdout), "growths": growths(second.stderr)}
    return judge_logs(check, [first.stderr], second.stderr, details, seconds) or _judge_text(
        check, first.stdout, second.stdout, details, seconds
    )


class _Late(VerifyError):
    """A run that took too long (process.capture raises it; nothing else here does)."""


def _judge_text(check: Check, static: str, dynamic: str, details: dict[str, object], seconds: float) -> Finding:
    if not static.strip():
        return failed(check, "garbage", "the static run wrote no text", seconds=seconds, details=details)
    if static != dynamic:
        shorter = min(len(static), len(dynamic))
        at = next((i for i, (a, b) in enumerate(zip(static, dynamic, strict=False)) if a != b), shorter)
        seen = f"static {static[at : at + 40]!r}, dynamic {dynamic[at : at + 40]!r}"
        reason = f"the texts differ from character {at}: {seen}"
        return failed(check, "differs", reason, seconds=seconds, details=details)
    reason = f"{len(static)} characters equal"
    return finding(check, CheckOutcome.PASSED, "same", reason, grown=True, seconds=seconds, details=details)


def judge_logs(
    check: Check, statics: Sequence[str], dynamic: str, details: dict[str, object], seconds: float
) -> Finding | None:
    """Did the dynamic side grow, and only it? None when so."""
    if any(growths(log) for log in statics):
        return failed(check, "differs", f"a cache grew without {FLAG}", seconds=seconds, details=details)
    if not growths(dynamic):
        reason = f"with {FLAG} the log has no 'resizing KV cache': nothing grew, so nothing was tested"
        return failed(check, "not-grown", reason, seconds=seconds, details={**details, "log": dynamic[-2000:]})
    return None


# ---- llama-bench -----------------------------------------------------------------------------------------------------


def bench(check: Check, binary: Path) -> Finding:
    """llama-bench with --kv-dynamic 0 and 1: both measure a speed, only the second one grows. No speed is judged."""
    started = time.monotonic()
    logs, speeds = [], []
    for value in ("0", "1"):
        argv: list[str | Path] = [binary, "-m", check.model, *_BENCH.split(), *check.args]
        try:
            done = process.capture([*argv, FLAG, value], check=False, timeout=check.timeout, error=_Late)
            speeds.append([float(run["avg_ts"]) for run in json.loads(done.stdout)] if done.returncode == 0 else [])
        except _Late as late:
            return failed(check, "timeout", late.what, seconds=time.monotonic() - started)
        except (ValueError, KeyError, TypeError):
            return failed(check, "garbage", f"llama-bench {FLAG} {value} printed no results: {done.stdout[:200]!r}")
        if not speeds[-1]:
            name = "dynamic-fails" if value == "1" else "static-fails"
            reason = f"llama-bench {FLAG} {value} ended with exit code {done.returncode}"
            return failed(check, name, reason, details={"log": done.stderr[-2000:]})
        logs.append(done.stderr)
    seconds = time.monotonic() - started
    details: dict[str, object] = {"growths": growths(logs[1]), "tokens_per_second": speeds}
    return judge_logs(check, logs[:1], logs[1], details, seconds) or finding(
        check, CheckOutcome.PASSED, "same", "it measures both", grown=True, seconds=seconds, details=details
    )
