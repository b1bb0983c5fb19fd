"""Measure the loss of small KV types on real text: perplexity and the divergence from an f16 cache.

llama.cpp's own program `llama-perplexity` measures the losses. It divides a text into chunks of the context's size,
computes each chunk with an empty cache, and scores the second half of each chunk. The first run has a static f16 cache
and stores its probabilities. Each further run has another cache and is compared with these probabilities. The table
*Loss* has the mean Kullback-Leibler divergence from f16 (KL, in nats per token), the change of the logarithm of the
perplexity, and the percentage of tokens for which both caches prefer the same token. Losses are small if the first two
numbers are near 0, and if the percentage is near 100. The probabilities are stored with 16 bits. For this reason, the
numbers of two equal caches are not exactly 0 and 100.

The row *f16, no flash attention* shows the error of the method. Its cells are f16, too, and only the roundings of the
attention differ. llama.cpp rounds the inputs of a product with quantized weights to 8 bits, so even the smallest
difference grows. Only the part of a KL above the one of this row is a loss of the cells.

If a cache changes its type within a chunk, a memory budget causes the change. The empty cache of the next chunk has the
type f16 again. *In the middle* means that the type changes at the first scored token, so no token is scored with f16
cells only. *Near the end* means that the type changes at the last quarter of the chunk. *Ladder* means that the type
changes to q8_0 at the second quarter of the chunk, and to q4_0 when the cells reach the same budget again. Short runs
find the budgets that cause these changes, because only the program knows when its compute buffers grow. *Changed at* is
the number of cells that the cache has at each change.

*Context shift* is the alternative to smaller types: llama.cpp forgets the older half of the conversation. It is
measured as a static f16 cache of half the size. A real context shift loses at least as much, because it also moves the
positions of the cells that stay. With half the size, the chunks are shorter, so other tokens of the text are scored.
Therefore the perplexity of the context shift and the perplexity of f16 are independent measurements, and the error of
their ratio is larger.

The text is the documentation of the Python language that every Python contains (`pydoc_data.topics`).
"""

import json
import math
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.bench import plots
from kvtool.bench.report import MIB, Bar, Report, Table, ratio
from kvtool.console import Console
from kvtool.errors import DiskError, MeasureError, UsageError
from kvtool.machine import cores
from kvtool.result import from_plain, to_plain
from kvtool.verify import models
from kvtool.verify.own_model import documentation

HOW = (__doc__ or "").partition("\n\n")[2]
PROGRAM = "llama-perplexity"
CONTEXT, BATCH = 1024, 256
CHUNKS, QUICK_CHUNKS = 98, 4  # 98 chunks of 1024 tokens are 100,352 tokens
QUARTER, MIDDLE, NEAR_END = CONTEXT // 4, CONTEXT // 2, CONTEXT * 3 // 4
_TIMEOUT = 6 * 3600.0
_NUMBER = r"\s*:?\s*(-?[\d.]+|-?nan|-?inf) ± +(-?[\d.]+|-?nan|-?inf)"
_PERPLEXITY = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
_GROWN = re.compile(r"resizing KV cache from (\d+) to (\d+) cells")
_CHANGED = re.compile(r"requantizing KV cache: .*\(([\d.]+) -> ([\d.]+) MiB\)")
_RESERVED = re.compile(r"KV memory reserved = +([\d.]+) MiB")
_STATISTICS = tuple(
    re.compile(name + _NUMBER)
    for name in (r"Mean PPL\(Q\)", r"Mean ln\(PPL\(Q\)/PPL\(base\)\)", "Mean +KLD", "Same top p")
)


@dataclass(frozen=True)
class Kind:
    """Describe one cache to measure.

    k: the type of the keys at the start
    v: the type of the values at the start
    ladder: the types of `--kv-auto-quant`, from large to small; "" without a memory budget
    at: the index of the token in a chunk at which the first change of type must happen
    n_ctx: the number of tokens in a chunk
    """

    name: str
    k: str = "f16"
    v: str = "f16"
    ladder: str = ""
    at: int = 0
    n_ctx: int = CONTEXT
    dynamic: bool = False
    flash_attn: bool = True


STATIC_F16 = Kind("f16, static")
SHIFT = Kind("context shift", n_ctx=CONTEXT // 2)
KINDS = (
    Kind("f16, dynamic", dynamic=True),
    Kind("f16, no flash attention", flash_attn=False),
    Kind("q8_0 from the start", "q8_0", "q8_0"),
    Kind("f16 to q8_0 in the middle", ladder="f16,q8_0", at=MIDDLE),
    Kind("f16 to q8_0 near the end", ladder="f16,q8_0", at=NEAR_END),
    Kind("q4_0 from the start", "q4_0", "q4_0"),
    Kind("f16 to q4_0 in the middle", ladder="f16,q4_0", at=MIDDLE),
    Kind("f16 to q4_0 near the end", ladder="f16,q4_0", at=NEAR_END),
    Kind("ladder: f16, q8_0, q4_0", ladder="f16,q8_0,q4_0", at=QUARTER),
    Kind("K q8_0, V f16", "q8_0", "f16"),
    Kind("K f16, V q8_0", "f16", "q8_0"),
    Kind("K q4_0, V f16", "q4_0", "f16"),
    Kind("K f16, V q4_0", "f16", "q4_0"),
    SHIFT,
)
STEPS = (("f16 to q8_0 in the middle", "q8_0 from the start"), ("f16 to q4_0 in the middle", "q4_0 from the start"))


@dataclass(frozen=True)
class Loss:
    """Report the loss of one cache. Each tuple contains a value and its standard error.

    perplexity: the perplexity of the scored tokens
    log_ratio: ln(perplexity / perplexity of f16)
    divergence: the mean KL divergence from f16 in nats per token, () if it was not measured
    same_top: the percentage of tokens for which this cache and f16 prefer the same next token, () if not measured
    budget: the memory budget in MiB, 0 for a cache without a budget
    changes: for each change of type in the first chunk, the number of cells that the cache had then
    command: the arguments of llama-perplexity, without the files
    """

    kind: str
    perplexity: tuple[float, float]
    log_ratio: tuple[float, float]
    divergence: tuple[float, ...]
    same_top: tuple[float, ...]
    budget: int
    changes: tuple[int, ...]
    command: str
    seconds: float


@dataclass(frozen=True)
class QualityResult(Report):
    """Report the losses of all caches on one model."""

    name, how, said = "quality", HOW, "{chunks} chunks of {n_ctx} tokens"
    n_ctx: int
    chunks: int
    losses: tuple[Loss, ...]

    def tables(self) -> tuple[Table, ...]:
        """Return the table of losses and the table of commands."""
        rows, commands = [], []
        for loss in self.losses:
            kl = _with_error(loss.divergence) if loss.divergence else "-"
            top = f"{loss.same_top[0]:.2f}" if loss.same_top else "-"
            at = ", ".join(map(str, loss.changes)) or "-"
            rows.append((loss.kind, f"{loss.perplexity[0]:.3f}", _with_error(loss.log_ratio), kl, top, at))
            commands.append((loss.kind, f"`{PROGRAM} {loss.command}`"))
        columns = ("cache", ">perplexity", ">ln(perplexity / f16)", ">KL from f16", ">same token %", ">changed at")
        return ("Loss", columns, rows), ("Commands", ("cache", "command"), commands)

    def pictures(self) -> dict[str, bytes]:
        """Draw two plots with a bar for each kind of cache.

        One plot shows how much the predictions with this cache diverge from those with an f16 cache. The other plot
        shows by how much the perplexity differs from that of f16.
        """
        measured = [loss for loss in self.losses if loss.divergence]
        with plots.picture("quality", 2, rows=2, size=(8, 9)) as (files, (kl, log_ratio)):
            kl.barh([x.kind for x in measured], [x.divergence[0] for x in measured], color=plots.BLUE)
            plots.label_bars(kl, [f"{x.divergence[0]:.5f}" for x in measured])
            kl.set(title="Divergence from f16, nats per token")
            log_ratio.barh([x.kind for x in self.losses], [x.log_ratio[0] for x in self.losses], color=plots.ORANGE)
            plots.label_bars(log_ratio, [f"{x.log_ratio[0]:+.4f}" for x in self.losses])
            log_ratio.set(title="Change of the logarithm of the perplexity")
            for axis in (kl, log_ratio):
                axis.invert_yaxis()
                axis.margins(x=0.2)
        return files


def _with_error(pair: Sequence[float]) -> str:
    value, error = pair
    return f"{value:.5f} ± {error:.5f}"


@dataclass(frozen=True)
class Perplexity:
    """Measure the loss of precision of each kind of cache, with one program, model and text.

    The results of finished runs are kept in the folder `work`. After an interruption, a new call of measure() makes
    only the runs that have no result yet.

    chunks: the number of chunks, each of CONTEXT tokens
    """

    program: Path
    model: Path
    text: Path
    work: Path
    chunks: int
    console: Console

    def measure(self) -> tuple[Loss, ...]:
        """Return the losses of all caches. Raise MeasureError if a run fails, and DiskError if the disk is full."""
        fingerprint = self._fingerprint()
        base = self.work / f"{self.model.stem}-{fingerprint}.probabilities"
        kinds = [STATIC_F16, *KINDS]
        journal = _Journal(self.work / f"quality-{fingerprint}.json")
        todo = [kind for kind in kinds if kind.name not in journal.known]
        if todo:
            if STATIC_F16 in todo or not base.exists():
                self._store_base(base, journal)
            budgets = self._budgets([kind for kind in todo if kind.ladder])
            for kind in todo:
                if kind != STATIC_F16:
                    self.console.step(f"{kind.name}, {len(journal.known)} of {len(kinds)} done")
                    journal.add(self._run(kind, base, budgets.get(kind.name, 0), journal.known[STATIC_F16.name]))
        base.unlink(missing_ok=True)
        return tuple(journal.known[kind.name] for kind in kinds)

    def _fingerprint(self) -> str:
        """Return a hash of everything that changes the result of a run."""
        kinds = json.dumps([to_plain(kind) for kind in KINDS])
        return models.fingerprint([self.program, self.model, self.text], kinds, str(self.chunks))

    def _argv(self, kind: Kind, budget: int) -> list[str]:
        argv = ["-c", str(kind.n_ctx), "-b", str(BATCH), "-ub", str(BATCH)]
        argv += ["-fa", "on" if kind.flash_attn else "off", "-t", str(cores())]
        argv += ["-ctk", kind.k, "-ctv", kind.v]
        argv += ["--kv-budget", str(budget), "--kv-auto-quant", kind.ladder] if kind.ladder else []
        return argv + ["--kv-dynamic"] * kind.dynamic

    def _call(self, argv: Sequence[str | Path], chunks: int) -> str:
        """Run the program and return its output."""
        whole: list[str | Path] = [self.program, "-m", self.model, "-f", self.text, "--chunks", str(chunks), "-lv", "4"]
        done = process.capture([*whole, *argv], check=False, timeout=_TIMEOUT, error=MeasureError)
        if done.returncode != 0:
            what = f"{PROGRAM} ended with exit code {done.returncode}"
            raise MeasureError(what, why=process.quote([*whole, *argv]), output=(done.stderr + done.stdout)[-2000:])
        return done.stderr + done.stdout

    def _store_base(self, base: Path, journal: "_Journal") -> None:
        """Measure the static f16 cache and store its probabilities, which all other runs read.

        The file of the probabilities is renamed to `base` when it is complete. Raise DiskError if the disk has too
        little space for this file.
        """
        partial = base.with_suffix(".part")
        argv: list[str | Path] = [*self._argv(STATIC_F16, 0), "--kl-divergence-base", partial]
        self._call(argv, 1)
        one = partial.stat().st_size
        needed, free = one * self.chunks, shutil.disk_usage(self.work).free + one
        if needed > free:
            raise DiskError(
                f"the probabilities need {needed / MIB:.0f} MiB in {self.work}",
                why=f"{free / MIB:.0f} MiB are free",
                next_step="free some space, or use --quick",
            )
        self.console.step(f"{STATIC_F16.name}, with {needed / MIB:.0f} MiB of probabilities on the disk")
        started = time.monotonic()
        found = _search(_PERPLEXITY, self._call(argv, self.chunks))
        took = time.monotonic() - started
        partial.replace(base)
        same, command = (0.0, 0.0), process.quote(self._argv(STATIC_F16, 0))
        journal.add(Loss(STATIC_F16.name, found, same, same, (100.0, 0.0), 0, (), command, took))

    def _run(self, kind: Kind, base: Path, budget: int, f16: Loss) -> Loss:
        """Measure the loss of one cache."""
        started = time.monotonic()
        argv = self._argv(kind, budget)
        divergence, same_top = tuple[float, ...](), tuple[float, ...]()
        if kind.n_ctx == CONTEXT:
            more: list[str | Path] = ["--kl-divergence-base", base, "--kl-divergence"]
            output = self._call([*argv, *more], self.chunks)
            perplexity, log_ratio, *others = (_search(pattern, output) for pattern in _STATISTICS)
            divergence, same_top = others
        else:
            output = self._call(argv, self.chunks * CONTEXT // kind.n_ctx)
            perplexity = _search(_PERPLEXITY, output)
            errors = [error / value for value, error in (perplexity, f16.perplexity)]
            log_ratio = math.log(perplexity[0] / f16.perplexity[0]), math.hypot(*errors)
        took, command = time.monotonic() - started, process.quote(argv)
        return Loss(kind.name, perplexity, log_ratio, divergence, same_top, budget, changes_in(output), command, took)

    def _budgets(self, kinds: Sequence[Kind]) -> dict[str, int]:
        """Return, for each kind, the largest budget in MiB with which the first change of type is at `kind.at` cells.

        The budgets are found by short runs with one chunk each.
        """
        if not kinds:
            return {}
        most = math.ceil(sum(map(float, _RESERVED.findall(self._call(self._argv(KINDS[0], 0), 1)))))
        positions: dict[int, int] = {}

        def position(budget: int) -> int:
            """Return the number of cells at the first change of type; 0 if not even one cell fits into the budget."""
            if budget not in positions:
                probe = Kind("probe", ladder="f16,q8_0,q4_0")
                try:
                    found = changes_in(self._call(self._argv(probe, budget), 1))
                    positions[budget] = found[0] if found else CONTEXT
                except MeasureError:
                    positions[budget] = 0
            return positions[budget]

        def first(wanted: int) -> int:
            """Return the smallest budget with which the first change is at `wanted` cells or later."""
            low, high = 1, most + 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if position(middle) >= wanted else (middle + 1, high)
            return low

        with self.console.progress("looking for the budgets") as bar:
            found = dict[str, int]()
            for kind in kinds:
                bar.update(len(found), kind.name)
                found[kind.name] = max(first(kind.at + 1) - 1, first(kind.at))
        return found


def changes_in(log: str) -> tuple[int, ...]:
    """Parse a log. Return how many cells the cache had at each change of type in the first chunk."""
    cells = 0
    found = list[int]()
    for line in log.splitlines():
        if grown := _GROWN.search(line):
            before, after = int(grown[1]), int(grown[2])
            if found and after < cells:  # fewer cells than before: the next chunk began with an empty cache
                break
            if not cells:  # the first growth shows how many cells the cache had before it
                found = [before] * len(found)
            cells = max(cells, after)
        elif changed := _CHANGED.search(line):
            if float(changed[2]) > float(changed[1]):  # the empty cache of the next chunk has the type f16 again
                break
            found.append(cells)
    return tuple(found)


def _search(pattern: re.Pattern[str], output: str) -> tuple[float, float]:
    """Return a value and its standard error from the output. Raise MeasureError if they are missing."""
    found = pattern.search(output)
    if not found:
        raise MeasureError(f"{PROGRAM} printed no {pattern.pattern!r}", next_step="kvtool build", output=output[-2000:])
    return float(found[1]), float(found[2])


class _Journal:
    """Keep the results of finished runs in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.known: dict[str, Loss] = {}
        if file.is_file():
            found = [from_plain(Loss, each) for each in json.loads(file.read_text("utf-8"))]
            self.known = {loss.kind: loss for loss in found}

    def add(self, loss: Loss) -> None:
        self.known[loss.kind] = loss
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps([to_plain(each) for each in self.known.values()]), "utf-8")
        partial.replace(self._file)


def quality_bars(losses: Sequence[Loss]) -> tuple[Bar, ...]:
    """Return the figures that have a target.

    A cache that changes to a type in the middle of a text may lose at most 1.1 times as much as a cache that has this
    type from the start.
    """
    kl = {loss.kind: loss.divergence[0] for loss in losses if loss.divergence}
    name = "KL / KL of the type from the start"
    return tuple(Bar(name, step, ratio(kl.get(step), kl.get(start)), most=1.1) for step, start in STEPS)


def write_text(file: Path) -> Path:
    """Write the documentation of the Python language that every Python contains, about 466 KB."""
    text = "\n\n".join(documentation())
    if len(text) < 100_000:
        raise UsageError("this Python contains no text (pydoc_data.topics)", next_step="use another Python")
    file.write_text(text, "utf-8")
    return file
