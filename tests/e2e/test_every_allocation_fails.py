"""Let every allocation of a growth fail: once alone, and once together with all later ones.

No cell may be lost, and a batch must still be computed if it fits into the memory that is left.

kv-check's check "no-memory" grows a cache several times, and "retype-fail" changes the types of its cells. In both,
--fail N makes the N-th allocation fail, and --fail N+ also all later ones. N increases until there is no N-th
allocation. scenarios-memory.cpp and scenarios-types.cpp describe in which state each failure must leave the cache.

Every failure is a process of kv-check with one thread. As many processes run at a time as there are cores.
KVTOOL_ALL_CLASSES=1 adds the memory classes whose models are slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtool.machine import cores
from tests.e2e.conftest import ROOT, Real

SLOW = pytest.mark.skipif(
    os.environ.get("KVTOOL_ALL_CLASSES") != "1", reason="takes minutes; KVTOOL_ALL_CLASSES=1 runs it"
)
ONE, TWO = (), ("-fa", "off", "--seqs", "2")
RUNS = (
    pytest.param("llama-dense", ONE, id="plain"),
    pytest.param("llama-dense", TWO, id="plain-two-streams"),
    pytest.param("qwen35-dense", ONE, id="hybrid"),
    pytest.param("minimax-m3-moe", ONE, id="MSA"),
    pytest.param("gemma3-dense", ONE, id="iSWA", marks=SLOW),
    pytest.param("deepseek2-moe", ONE, id="MLA", marks=SLOW),
    pytest.param("qwen4exp-moe", ONE, id="hybrid-idx", marks=SLOW),
    pytest.param("dots3note-moe", ONE, id="DSA-iSWA", marks=SLOW),
    pytest.param("deepseek32-moe", ONE, id="DSA", marks=SLOW),
    # the caches have rows for 2048 cells
    pytest.param("deepseek4-moe", ("--fill", "1100", "-c", "8192"), id="DSV4", marks=SLOW),
)
LIMIT = 400  # more than the number of allocations of any growth tested here


def points(real: Real, toy: str, suffix: str, *args: str, check: str = "no-memory") -> Iterator[dict[str, Any]]:
    """Yield the answer of kv-check for each allocation that fails."""
    argv: list[str | Path] = [
        real.bin / "kv-check",
        "-m",
        real.toys / f"{toy}.gguf",
        "--quick",
        "--checks",
        check,
    ]

    def fail(number: int) -> dict[str, Any]:
        done = subprocess.run([*argv, *args, "--fail", f"{number}{suffix}"], capture_output=True, text=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    pool = ThreadPoolExecutor(cores())
    try:
        for answer in pool.map(fail, range(1, LIMIT)):
            if answer["failed_allocations"] == 0:
                return
            yield answer
        pytest.fail(f"{toy}: more than {LIMIT} allocations")
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize(("toy", "args"), RUNS)
def test_growth_survives_every_failure(real: Real, toy: str, args: tuple[str, ...], storage: str) -> None:
    tried = 0
    for suffix in ("", "+"):
        for answer in points(real, toy, suffix, "--storage", storage, *args):
            tried += 1
            assert answer["status"] in ("same", "same-not-grown"), f"{tried}: {answer['reason']}"
    assert tried > 0
    note(f"{toy} {storage} {' '.join(args)}: {tried} allocation points, all survived")


CHANGES = (("f16:q8_0", "on"), ("q8_0:f16", "on"), ("f32:f16", "off"), ("f16:f32", "off"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize(("types", "fa"), CHANGES)
def test_type_change_survives_every_failure(real: Real, types: str, fa: str, storage: str) -> None:
    tried = 0
    for suffix in ("", "+"):
        args = ("--storage", storage, "-fa", fa, "--retype", types)
        for answer in points(real, "llama-dense", suffix, *args, check="retype-fail"):
            tried += 1
            assert answer["status"] in ("same", "same-not-grown"), f"{tried}: {answer['reason']}"
    assert tried > 0
    note(f"llama-dense {storage} {types}: {tried} allocation points, all survived")


def note(line: str) -> None:
    """Write a line of the report. `pytest -s` prints it, and CI keeps the file."""
    print(line, file=sys.stderr)
    report = ROOT / "report" / "allocations.txt"
    report.parent.mkdir(exist_ok=True)
    with report.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
