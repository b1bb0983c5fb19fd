"""Start kv-bench, process after process, and collect what it says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvtool import process
from kvtool.bench import speed
from kvtool.bench.rows import COPY, IN_PLACE, MODES, OFF, STATIC, Memory
from kvtool.bench.speed import Pairs, Speed
from kvtool.console import Console
from kvtool.errors import MeasureError
from kvtool.machine import available_memory, too_large
from kvtool.result import last_document, read

_STORAGE = {COPY: "copy", IN_PLACE: "inplace"}
_TIMEOUT = 1800.0

_Answer = TypeVar("_Answer", Memory, Pairs)


@dataclass(frozen=True)
class KvBench:
    """The program, and the model that it measures with."""

    program: Path
    model: Path
    console: Console

    def memory(self, n_ctx: int, depths: Sequence[int], repeats: int) -> tuple[Mapping[str, Sequence[Memory]], str]:
        """The samples of each mode, and why the static one is left out, if it does not fit into memory.

        The modes take turns, and which of them begins changes: whatever the machine does meets all of them.
        """
        found: dict[str, list[Memory]] = {mode: [] for mode in MODES}
        turns = [MODES[(turn + i) % len(MODES)] for turn in range(repeats) for i in range(len(MODES))]
        skipped = ""
        with self.console.progress("measuring memory", float(len(turns))) as bar:
            for number, mode in enumerate(turns):
                bar.update(number, f"{mode} {number // len(MODES) + 1}")
                if mode == STATIC:
                    skipped = skipped or too_large(found[IN_PLACE][0].points[0].usage.reserved, available_memory())
                if mode != STATIC or not skipped:
                    found[mode].append(self._answer(Memory, mode, n_ctx, depths, "--limit"))
        return found, skipped

    def speeds(self, n_ctx: int, depths: Sequence[int], rounds: int, unpatched: Path | None) -> tuple[Speed, ...]:
        """Both contexts of each comparison in one process, call by call in turns; `rounds` times made anew.

        unpatched: a libllama without the patches, against which the flag off is held.
        """
        modes = (IN_PLACE, COPY, OFF) if unpatched else (IN_PLACE, COPY)
        turns = [(mode, flash) for mode in modes for flash in ("on", "off")]
        out: list[Speed] = []
        with self.console.progress("measuring speed", float(len(turns))) as bar:
            for number, (mode, flash) in enumerate(turns):
                bar.update(number, f"{mode}, flash attention {flash}")
                other = ["--other", str(unpatched)] if mode == OFF else []
                said = self._answer(Pairs, mode, n_ctx, depths, "--rounds", str(rounds), "-fa", flash, *other)
                kinds = (speed.GENERATE, speed.PROMPT, *([speed.CREATE] if mode == OFF else []))
                out += speed.speeds(mode, flash == "on", kinds, said.pairs)
        return tuple(out)

    def _answer(self, kind: type[_Answer], mode: str, n_ctx: int, depths: Sequence[int], *more: str) -> _Answer:
        """What one process says. Raises MeasureError when it fails, is too slow or says what is not understood."""
        dynamic = "on" if mode in _STORAGE else "off"
        argv: list[str | Path] = [self.program, "-m", self.model, "--kv-dynamic", dynamic, "-t", "1"]
        argv += ["-c", str(n_ctx), "-d", ",".join(map(str, depths)), *more]
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
