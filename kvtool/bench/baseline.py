"""The patched build without the flag against an unpatched one: upstream's own programs, taking turns.

llama-bench gives prompt and generation speed. Nothing of upstream prints how long a context takes to create, but
llama-batched-bench takes -c and prints the time from loading the model to the first decode; with a model of 20 MB and
a decode of one token that is the creation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.bench import figures
from kvtool.bench.bars import Bar, bar
from kvtool.errors import MeasureError, UsageError

PROMPT, GENERATED = 512, 64
CONTEXT = 32768  # cells of the context whose creation is timed: 2 GiB for Qwen3.5-27B
_TIMEOUT = 600.0
_LOAD = re.compile(r"load time = +([0-9.]+) ms")


@dataclass(frozen=True)
class Speed:
    """One build, one turn: tokens per second, and seconds (None: llama-batched-bench is missing)."""

    prompt: float
    generation: float
    creation: float | None


def program(bin_dir: Path, name: str) -> Path | None:
    """A program of a build, None when it has not got it."""
    return next((f for f in (bin_dir / name, bin_dir / f"{name}.exe") if f.is_file()), None)


def measure(
    patched: Path,
    unpatched: Path,
    model: Path,
    repeats: int,
    threads: int,
    on_turn: Callable[[int, str], None] = lambda _done, _label: None,
) -> tuple[tuple[Speed, ...], tuple[Speed, ...]]:
    """Both builds, `repeats` turns each, the one that begins changing every turn.

    Raises UsageError when a build has no llama-bench, MeasureError when one fails.
    """
    sides: dict[Path, list[Speed]] = {patched: [], unpatched: []}
    for directory in sides:
        if program(directory, "llama-bench") is None:
            raise UsageError(
                f"there is no llama-bench in {directory}",
                next_step="cmake --build BUILD --target llama-bench llama-batched-bench",
            )
    both = all(program(directory, "llama-batched-bench") for directory in sides)
    for turn in range(repeats):
        order = (patched, unpatched) if turn % 2 == 0 else (unpatched, patched)
        for directory in order:
            on_turn(turn, "patched" if directory is patched else "unpatched")
            creation = _creation(directory, model, threads) if both else None
            sides[directory].append(Speed(*_speed(directory, model, threads), creation))
    return tuple(sides[patched]), tuple(sides[unpatched])


def _speed(directory: Path, model: Path, threads: int) -> tuple[float, float]:
    found = program(directory, "llama-bench")
    assert found is not None
    given = f"-p {PROMPT} -n {GENERATED} -r 3 -fa 1 -t {threads} -o json".split()
    argv: list[str | Path] = [found, "-m", model, *given]
    done = process.capture(argv, error=MeasureError, timeout=_TIMEOUT)
    try:
        tests = json.loads(done.stdout)
        # the best of three is what the build can do; what disturbs a run only makes it slower
        prompt = next(max(t["samples_ts"]) for t in tests if t["n_prompt"])
        generation = next(max(t["samples_ts"]) for t in tests if t["n_gen"])
        return float(prompt), float(generation)
    except (ValueError, KeyError, TypeError, StopIteration) as err:
        raise MeasureError(
            "llama-bench's answer is not understood",
            why=f"{type(err).__name__}: {err}",
            next_step=f"run it by hand: {process.quote(argv)}",
        ) from err


def _creation(directory: Path, model: Path, threads: int) -> float:
    found = program(directory, "llama-batched-bench")
    assert found is not None
    given = f"-c {CONTEXT} -npp 1 -ntg 1 -npl 1 -fa on -t {threads} -tb {threads} -fit off -lv 4".split()
    argv: list[str | Path] = [found, "-m", model, *given]
    done = process.capture(argv, error=MeasureError, timeout=_TIMEOUT)
    match = _LOAD.search(done.stdout + done.stderr)
    if match is None:
        raise MeasureError(
            "llama-batched-bench printed no load time", next_step=f"run it by hand: {process.quote(argv)}"
        )
    return float(match[1]) / 1e3


def bars(patched: Sequence[Speed], unpatched: Sequence[Speed], model: str) -> tuple[Bar, ...]:
    """The three bars of the flag being off."""
    wanted: tuple[tuple[str, Callable[[Speed], float | None]], ...] = (
        ("prompt speed", lambda s: s.prompt),
        ("generation speed", lambda s: s.generation),
        ("creation time", lambda s: s.creation),
    )
    out = []
    for name, value in wanted:
        found = figures.ratio(
            (a, b) for p, u in zip(patched, unpatched, strict=True) if (a := value(p)) and (b := value(u))
        )
        alone = figures.noise(b for u in unpatched if (b := value(u)))
        note = f"patched / unpatched; unpatched alone varies {alone}"
        if found is None:
            note = "one of the builds has no llama-batched-bench"
        out.append(bar(f"flag off: {name}", model, "off", found, least=0.99, most=1.01, note=note))
    return tuple(out)
