"""Start kv-bench, process after process, and collect what it says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvtool import process
from kvtool.bench import speed
from kvtool.bench.rows import COPY, IN_PLACE, MODES, OFF, STATIC, Memory
from kvtool.bench.speed import Pairs, Speed
from kvtool.errors import MeasureError
from kvtool.machine import available_memory, too_large
from kvtool.result import last_document, read

_STORAGE = {COPY: "copy", IN_PLACE: "inplace"}
_TIMEOUT = 1800.0

_Answer = TypeVar("_Answer", Memory, Pairs)
OnRun = Callable[[int, str], None]


@dataclass(frozen=True)
class Plan:
    """What to run. repeats: processes of each mode for memory; rounds: how often both contexts of a comparison are
    made; speed_*: what speed is measured with; other: libllama of an unpatched build."""

    program: Path
    model: Path
    n_ctx: int
    depths: tuple[int, ...]
    repeats: int
    rounds: int
    speed_ctx: int
    speed_depths: tuple[int, ...]
    other: Path | None

    @property
    def turns(self) -> tuple[tuple[str, bool], ...]:
        """What is compared with a static context: modes, with and without flash attention."""
        modes = (IN_PLACE, COPY, OFF) if self.other else (IN_PLACE, COPY)
        return tuple((mode, flash_attn) for mode in modes for flash_attn in (True, False))


def memory(plan: Plan, on_run: OnRun) -> tuple[Mapping[str, Sequence[Memory]], str]:
    """The samples of each mode, and why the static one is left out, if it does not fit into memory.

    The modes take turns, and which of them begins changes: whatever the machine does meets all of them.
    """
    found: dict[str, list[Memory]] = {mode: [] for mode in MODES}
    skipped = ""
    for repeat in range(plan.repeats):
        turn = repeat % len(MODES)
        for i, mode in enumerate((*MODES[turn:], *MODES[:turn])):
            on_run(repeat * len(MODES) + i, f"{mode} {repeat + 1}")
            if mode == STATIC:
                skipped = skipped or too_large(found[IN_PLACE][0].points[0].usage.reserved, available_memory())
            if mode != STATIC or not skipped:
                sizes = ["-c", str(plan.n_ctx), "-d", _listed(plan.depths), "--limit"]
                found[mode].append(_answer(plan, mode, sizes, Memory))
    return found, skipped


def speeds(plan: Plan, on_run: OnRun) -> tuple[Speed, ...]:
    """Both contexts of each comparison in one process, call by call in turns."""
    out: list[Speed] = []
    for i, (mode, flash_attn) in enumerate(plan.turns):
        flash = "on" if flash_attn else "off"
        on_run(i, f"{mode}, flash attention {flash}")
        sizes = ["-c", str(plan.speed_ctx), "-d", _listed(plan.speed_depths), "--rounds", str(plan.rounds)]
        other = ["--other", str(plan.other)] if mode == OFF else []
        pairs = _answer(plan, mode, [*sizes, "-fa", flash, *other], Pairs).pairs
        kinds = (speed.GENERATE, speed.PROMPT, *((speed.CREATE,) if mode == OFF else ()))
        out += speed.speeds(mode, flash_attn, kinds, pairs)
    return tuple(out)


def _listed(depths: Sequence[int]) -> str:
    return ",".join(map(str, depths))


def _answer(plan: Plan, mode: str, given: Sequence[str], kind: type[_Answer]) -> _Answer:
    """What one process says. Raises MeasureError when it fails, is too slow or says what is not understood."""
    dynamic = "on" if mode in _STORAGE else "off"
    argv: list[str | Path] = [plan.program, "-m", plan.model, "--kv-dynamic", dynamic, "-t", "1", *given]
    env = {"LLAMA_KV_DYNAMIC_STORAGE": _STORAGE.get(mode)}  # None: a variable of the user's shell goes
    done = process.capture(argv, env=env, check=False, timeout=_TIMEOUT, error=MeasureError)
    garbage = {"status": "garbage", "reason": f"no document on its output, exit code {done.returncode}"}
    doc = last_document(done.stdout) or garbage
    if doc.get("status") != "ok":
        raise MeasureError(
            f"kv-bench could not measure {mode}",
            why=f"{doc.get('status')}: {doc.get('reason')}",
            next_step=f"run it by hand: {process.quote(argv)}",
            output=done.stderr[-2000:],
        )
    try:
        return read(kind, doc)
    except (KeyError, TypeError) as err:
        why = f"{type(err).__name__}: {err}"
        raise MeasureError("kv-bench's answer is not understood", why=why, next_step="kvtool build") from err
