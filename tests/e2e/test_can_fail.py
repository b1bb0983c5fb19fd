"""Prove that the checks can fail: break the line of each trap, and expect that a check fails.

A trap is a known mistake. tests/e2e/traps defines the traps, and broken.py builds one library with all of their broken
lines. Each run is a process with one thread. As many processes run at a time as there are cores, and the tests wait for
the results.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtool.machine import cores
from kvtool.verify import drafts, models
from tests.e2e import broken
from tests.e2e.conftest import ROOT, Real
from tests.e2e.traps import TRAPS
from tests.e2e.traps.base import DRAFT, LARGE, Run, Trap
from tests.e2e.traps.impossible import IMPOSSIBLE, Impossible

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the broken library is linked by Linux's rules")

NUMBERS = {trap.name: number for number, trap in enumerate(TRAPS, 1)}


@dataclass(frozen=True)
class Seen:
    """Hold the results of a program. `answer` is the JSON of kv-check, and `log` is its stderr."""

    code: int
    answer: dict[str, Any]
    log: str

    @property
    def checks(self) -> dict[str, str]:
        return {check["name"]: check["status"] for check in self.answer.get("checks", [])}

    def __str__(self) -> str:
        checks = shlex.join(f"{name}={status}" for name, status in self.checks.items())
        return (
            f"exit {self.code}, {self.answer.get('status')}: {self.answer.get('reason')}; {checks}; {self.log[-500:]}"
        )


@dataclass(frozen=True)
class Lab:
    """Hold the programs, the models, and the library in which each trap's line can be broken."""

    real: Real
    libraries: Path
    watch: Path
    pair: tuple[Path, Path]
    large: Path
    runs: dict[tuple[object, ...], Future[Seen]] = field(default_factory=dict)

    def model_args(self, name: str) -> tuple[str | Path, ...]:
        if name == DRAFT:
            target, draft = self.pair
            return ("-m", target, "-md", draft)
        if name == LARGE:
            return ("-m", self.large)
        return ("-m", self.real.toys / f"{name}.gguf") if name else ()

    def start(self, pool: ThreadPoolExecutor, trap: Trap) -> None:
        """Start the run of a trap with its line broken.

        Also start this run without a broken line, once for all traps that use it.
        """
        for number in (0, NUMBERS[trap.name]):
            if (key := (number, *trap.run.key)) not in self.runs:
                self.runs[key] = pool.submit(self.run, trap.run, number)

    def seen(self, trap: Trap, *, broken: bool) -> Seen:
        return self.runs[(NUMBERS[trap.name] if broken else 0, *trap.run.key)].result()

    def run(self, run: Run, number: int) -> Seen:
        env = {
            **os.environ,
            **run.env,
            "LD_LIBRARY_PATH": f"{self.libraries}:{self.real.bin}",
            broken.VARIABLE: str(number),
        }
        if "KV_WATCH" in run.env:
            env["LD_PRELOAD"] = str(self.watch)
        argv = [self.real.bin / run.program, *self.model_args(run.model), *run.args]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300)
        lines = done.stdout.splitlines()
        answer = json.loads(lines[-1]) if lines and run.program == "kv-check" else {}
        return Seen(done.returncode, answer, done.stderr)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, real: Real, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    out = tmp_path_factory.mktemp("broken")
    broken.build(real, [trap.edits for trap in TRAPS], out)
    compiler = shutil.which("cc")
    assert compiler is not None
    watch = out / "watch.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", watch, Path(__file__).parent / "watch.c", "-ldl"], check=True)
    made = Lab(real, out, watch, drafts.draft_pair(real.work), models.cache_model(models.QWEN35_27B, real.work))
    chosen = [
        item for item in request.session.items if isinstance(item, pytest.Function) and "lab" in item.fixturenames
    ]
    pool = ThreadPoolExecutor(cores())
    try:
        for item in chosen:
            trap = item.callspec.params["trap"]
            assert isinstance(trap, Trap)
            made.start(pool, trap)
        yield made
    finally:
        pool.shutdown(cancel_futures=True)


def trap_sprang(trap: Trap, seen: Seen) -> bool:
    """Return True if the output shows what the trap must cause."""
    kind, _, rest = trap.sees.partition(": ")
    if kind == "log":
        return rest in seen.log
    if kind == "status":
        return seen.answer.get("status") == rest
    if kind == "resident":
        return int(seen.answer["rss_context"]) > int(rest)
    if kind == "exit":
        return seen.code != 0
    return seen.code == 1 and seen.checks[trap.sees] in ("differs", "dynamic-fails")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: t.name)
def test_trap_fails_only_when_broken(lab: Lab, trap: Trap) -> None:
    before = lab.seen(trap, broken=False)
    assert before.code == 0, before
    assert before.answer.get("status", "same") in ("same", "ok"), before
    assert not trap_sprang(trap, before), before
    after = lab.seen(trap, broken=True)
    assert trap_sprang(trap, after), after


def test_names_of_traps_are_unique() -> None:
    assert len(NUMBERS) == len(TRAPS)


@pytest.mark.parametrize("trap", IMPOSSIBLE, ids=lambda t: t.name)
def test_design_excludes_trap(trap: Impossible) -> None:
    ours = sorted((ROOT / "cpp" / "src").iterdir())
    for file in (*ours, *sorted((ROOT / "patches").glob("*.patch"))):
        lines = file.read_text("utf-8").splitlines()
        upstream: list[str] = []
        if file.suffix == ".patch":  # a changed line of upstream that has the word already is not a new use
            upstream = [line[1:] for line in lines if line.startswith("-") and not line.startswith("---")]
            lines = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
        code, before = ("\n".join(line.partition("//")[0] for line in part) for part in (lines, upstream))
        assert [word for word in trap.absent if code.count(word) > before.count(word)] == [], file.name
