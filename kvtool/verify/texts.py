"""Compare the texts of llama-completion with and without --kv-dynamic, and run llama-bench with and without it.

Equal texts prove less than equal bits, which kv-check compares. But they also prove that the programs which people use
pass the flag on to the library. conversation.py compares llama-server.
"""

import contextlib
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool.contract import RESIZE_LINE, line_pattern
from kvtool.process import Completed
from kvtool.verify.checks import Check, Finding, passed
from kvtool.verify.trial import LOG, Failed, run_side, trial

FLAG = "--kv-dynamic"
VARIABLE = {"LLAMA_ARG_KV_DYNAMIC": "1"}
GREW = re.compile(line_pattern(RESIZE_LINE))

_WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know river stone window "
    "garden letter engine harbour winter music number silver mountain bridge paper morning forest market shadow"
)


def prompt(seed: int, length: int) -> str:
    """Return `length` English words, chosen at random with this seed. A word is about one token."""
    rng = random.Random(seed)
    words = _WORDS.split()
    return " ".join(rng.choice(words) for _ in range(length))


# -lv 4 prints messages of the level INFO
_COMPLETION = "-c 4096 -n 256 -t 1 --temp 0 --seed 1 --ignore-eos -no-cnv --no-display-prompt --no-warmup -lv 4"
_LOG_END = "total time ="  # common_perf_print() prints this; llama-completion prints nothing after it
_TRIES = 10
_BENCH = "-p 512 -n 8 -r 1 -t 1 -o json -v"


def growths(log: str) -> list[list[int]]:
    """Return the number of cells before and after each growth in the log."""
    return [[int(a), int(b)] for a, b in GREW.findall(log)]


@trial
def completion(check: Check, binary: Path, work: Path) -> Finding:
    """Complete a prompt with and without the flag. The texts must be equal.

    The prompt is longer than the first 256 cells, so the cache grows.
    """
    file = work / "prompt.txt"
    file.write_text(prompt(1, 320), "utf-8")
    common: list[str | Path] = [binary, "-m", check.model, "-f", file, *_COMPLETION.split(), *check.args]
    static = _write(check, common, dynamic=False)
    by_flag = [] if check.by_env else [FLAG]
    dynamic = _write(check, [*common, *by_flag], dynamic=True, env=VARIABLE if check.by_env else {})
    details = judge_logs([static.stderr], dynamic.stderr, characters=len(dynamic.stdout))
    _judge_text(static.stdout, dynamic.stdout, details)
    return passed(check, f"{len(static.stdout)} characters equal", grown=True, details=details)


def _write(check: Check, argv: Sequence[str | Path], *, dynamic: bool, **more: Any) -> Completed:
    """Run llama-completion once, static or dynamic, and return its complete output.

    Runs the program again if the end of its log is missing. llama-completion writes through the queue of
    common/log.cpp, and exits without waiting for the thread that empties the queue (issue 22142 of upstream). So on a
    busy machine, the end of the text and the end of the log can be lost.
    """
    for _ in range(_TRIES):
        done = run_side(check, argv, dynamic=dynamic, **more)
        if _LOG_END in done.stderr:
            return done
    side = "dynamic" if dynamic else "static"
    said = f"the {side} run's log lacks its end ({_LOG_END!r}) in {_TRIES} tries: its text may lack its own"
    raise Failed("garbage", said, {"log": done.stderr[-LOG:]})


def _judge_text(static: str, dynamic: str, details: dict[str, object]) -> None:
    if not static.strip():
        raise Failed("garbage", "the static run wrote no text", details)
    if static != dynamic:
        shorter = min(len(static), len(dynamic))
        at = next((i for i, (a, b) in enumerate(zip(static, dynamic, strict=False)) if a != b), shorter)
        seen = f"static {static[at : at + 40]!r}, dynamic {dynamic[at : at + 40]!r}"
        raise Failed("differs", f"the texts differ from character {at}: {seen}", details)


def judge_logs(statics: Sequence[str], dynamic: str, **more: object) -> dict[str, object]:
    """Raise Failed unless the cache of the dynamic run grew, and the caches of the static runs did not.

    Returns the growths and `more` as details of the finding.
    """
    details = {**more, "growths": growths(dynamic)}
    if any(map(growths, statics)):
        raise Failed("differs", f"a cache grew without {FLAG}", details)
    if not details["growths"]:
        reason = f"with {FLAG} the log has no 'resizing KV cache': nothing grew, so nothing was tested"
        raise Failed("not-grown", reason, {**details, "log": dynamic[-LOG:]})
    return details


@trial
def bench(check: Check, binary: Path) -> Finding:
    """Run llama-bench with --kv-dynamic 0 and with --kv-dynamic 1.

    Both runs must measure a speed. The cache must grow with --kv-dynamic 1, and must not grow with --kv-dynamic 0. The
    speed itself is not judged.
    """
    argv: list[str | Path] = [binary, "-m", check.model, *_BENCH.split(), *check.args]
    static, dynamic = (run_side(check, [*argv, FLAG, "01"[on]], dynamic=on) for on in (False, True))
    speeds = [_speeds(side.stdout) for side in (static, dynamic)]
    details = judge_logs([static.stderr], dynamic.stderr, tokens_per_second=speeds)
    return passed(check, "it measures both", grown=True, details=details)


def _speeds(stdout: str) -> list[float]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if speeds := [float(run["avg_ts"]) for run in json.loads(stdout)]:
            return speeds
    raise Failed("garbage", f"llama-bench printed no results: {stdout[:200]!r}")
