"""Measure changes of the cells' types: their time, the tokens that a budget holds, and the loss of precision.

Changes: a full cache is changed to one type after the other with all cores, once in place and once by copy. *MiB* and
*then MiB* are the sizes of the cells before and after a change. For comparison, `memcpy` copies bytes into fresh memory
with as many threads. It copies half of the sum of both sizes, because a change reads the old bytes and writes the new
ones once. *Ratio* is the time of the change divided by the time of `memcpy`, so a smaller number is better. *Over
steady* is the additional memory of the process during the change: its peak, minus the larger of its sizes before and
after the change.

Budget: the number of tokens that fit into a budget of 2 GiB. A cell, the KV of one token, has 512 KiB, as in
Llama-2-7B. Smaller cells would make more tokens fit, and this measurement would need hours. The tokens of a *static*
cache are calculated from its size. The other caches are filled until they are full: *f16* keeps this type, and *ladder*
changes from f16 to q8_0 and then to q4_0. With `--quick`, the budget is 256 MiB. With a model of the user, the budget
is a quarter of the memory of the f16 cells with which *Changes* begins.

Loss: `kv-check --checks retype-quality` measures the loss of precision on llama.cpp's own test models (toys), whose
weights are random. Each model predicts the next token with an f16 cache and with the measured cache. The loss is the
Kullback-Leibler divergence (KL) between both distributions, as the median over the tokens that are computed after the
change. *KL changed* is the loss of cells that were changed from one type to another. *From the start* is the loss of
cells that always had one of these two types, whichever loses more. Both columns are medians over the models. *Ratio,
worst* divides the first loss by the second one, for the model with the largest ratio. A divergence below 1e-9 is
ignored, because it is a rounding error of floats.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.bench import plots
from kvtool.bench.report import COPY, IN_PLACE, MIB, SPARE, STATIC, Bar, Report, Table, bytes_bar, mib, ratio
from kvtool.bench.runs import KvBench
from kvtool.console import Console
from kvtool.machine import cores
from kvtool.result import CheckOutcome
from kvtool.verify import runner
from kvtool.verify.checks import Finding, toy_check
from kvtool.verify.devices import IN_MEMORY
from kvtool.verify.models import Geometry

HOW = (__doc__ or "").partition("\n\n")[2]
CHANGES = ("q8_0", "f16", "q4_0")
LADDER = ("f16", "q8_0", "q4_0")
BUDGET = 2048 * MIB
LARGE_CELLS = Geometry("Llama-2-7B", layers=32, kv_heads=32, head_size=128)
_CHECK = "retype-quality"
_CHANGE_COLUMNS = ("cache", "types", ">MiB", ">then MiB", ">s", ">memcpy s", ">ratio", ">over steady MiB")
# a divergence below this is a rounding error of the logits, which are floats; kv-check uses the same value
_NOTHING = 1e-9


@dataclass(frozen=True)
class Change:
    """Describe one change of the types of all cells.

    before: the bytes of all cells before the change
    after: the bytes of all cells after the change
    layer: the bytes of one layer's cells before the change
    over_steady: the peak of the resident memory during the change minus the larger of its values before and after the
                 change, in bytes; None if the resident memory is unknown
    """

    mode: str
    types: str
    before: int
    after: int
    layer: int
    seconds: float
    memcpy: float
    over_steady: int | None


@dataclass(frozen=True)
class BudgetCapacity:
    """Report how many tokens fit into a memory budget.

    type: the type of the cells when the budget was full
    committed: the bytes that the cache had allocated when the budget was full
    budget: the budget in bytes
    """

    cache: str
    tokens: int
    type: str
    committed: int
    budget: int


@dataclass(frozen=True)
class Loss:
    """Hold the divergence of one model from f16 in nats.

    types: the change of type, for example "f16 to q8_0"
    changed: the divergence of cells after this change
    start: the larger divergence of cells that have the first or the second of these types from the start
    """

    model: str
    types: str
    changed: float
    start: float

    @property
    def kl_ratio(self) -> float:
        """Return the loss of changed cells, divided by the loss of cells that were not changed.

        Those cells have one of the two types from the start. A loss below _NOTHING is a rounding error, and is ignored.
        """
        return max(0.0, self.changed - _NOTHING) / max(self.start, _NOTHING)


@dataclass(frozen=True)
class TypesResult(Report):
    """Report the measurements of `kvtool bench --types`."""

    name, how, said = "types", HOW, "`-c {cells}`"
    cells: int
    changes: tuple[Change, ...]
    held: tuple[BudgetCapacity, ...]
    losses: tuple[Loss, ...]

    def pictures(self) -> dict[str, bytes]:
        """Draw three plots.

        The first shows the time of each change and of memcpy. The second shows the tokens that a budget holds. The
        third shows, for each model, the loss of changed cells relative to the loss with the same types from the start.
        """
        with plots.picture("types", 3, rows=3, size=(8, 11)) as (files, (times, tokens, lost)):
            for name, place, cache in (("seconds", -0.2, IN_PLACE), ("memcpy", 0.2, STATIC)):
                at, values = [i + place for i in range(len(self.changes))], [getattr(c, name) for c in self.changes]
                times.barh(at, values, 0.4, color=plots.COLOURS[cache])
            names = [f"{c.types}, {c.mode}" for c in self.changes]
            times.set(
                yticks=range(len(names)),
                yticklabels=names,
                xlabel="seconds",
                title=f"Time of a change of {self.changes[0].before / MIB:,.0f} MiB of cells",
            )
            times.invert_yaxis()  # put the first change at the top
            ends = [("change", "memcpy")[i] if not c else "" for i in range(2) for c in range(len(names))]
            plots.label_bars(times, ends)
            tokens.barh([h.cache for h in self.held], [h.tokens for h in self.held], color=plots.BARS)
            tokens.set(title=f"Tokens in {self.held[0].budget / MIB:,.0f} MiB", xlabel="tokens")
            tokens.xaxis.set_major_formatter(plots.thousands)
            tokens.invert_yaxis()
            plots.label_bars(tokens, [f"{h.tokens:,}, {h.type}" for h in self.held])
            losses = by_types(self.losses)
            for row, same in enumerate(losses.values()):
                lost.plot([loss.kl_ratio for loss in same], [row] * len(same), "|", markersize=16, color=plots.BLUE)
            lost.axvline(1, color=plots.GREY, linestyle=":")
            lost.set(title="Loss after a change / loss with the type from the start", yticks=range(len(losses)))
            lost.set(yticklabels=list(losses), ylim=(len(losses) - 0.5, -0.5), xlim=(-0.03, None))
            lost.set(xlabel="ratio of the KL divergences from f16, one mark per model")
        return files

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of changes, budgets and losses."""
        changes = []
        for c in self.changes:
            times = c.seconds, c.memcpy, ratio(c.seconds, c.memcpy)
            changes.append((c.mode, c.types, *mib(c.before, c.after), *times, *mib(c.over_steady)))
        held = [(h.cache, h.tokens, h.type, *mib(h.committed, h.budget)) for h in self.held]
        losses = []
        for types, same in by_types(self.losses).items():
            medians = (statistics.median_high(getattr(loss, name) for loss in same) for name in ("changed", "start"))
            losses.append((types, len(same), *medians, max(loss.kl_ratio for loss in same)))
        return (
            ("Changes", _CHANGE_COLUMNS, changes),
            ("Budget", ("cache", ">tokens", "type", ">committed MiB", ">budget MiB"), held),
            ("Loss", ("types", ">models", ">KL changed", ">from the start", ">ratio, worst"), losses),
        )


def by_types(losses: Sequence[Loss]) -> dict[str, list[Loss]]:
    """Group the losses by their change of type."""
    return {types: [loss for loss in losses if loss.types == types] for types in dict.fromkeys(x.types for x in losses)}


def _changes(mode: str, said: Mapping[str, Any]) -> list[Change]:
    """Parse the output of one kv-bench process with --retype.

    kv-bench measures the memory after the creation of the cache, when the cache is full, and after each change.
    """
    found = []
    for was, now in itertools.pairwise(said["points"][1 : 2 + len(CHANGES)]):
        known = min(was["rss"], now["peak"]) >= 0
        before, after = was["usage"]["used"], now["usage"]["used"]
        over_steady = max(0, now["peak"] - max(was["rss"], now["rss"])) if known else None
        types, layer = f"{was['type']} to {now['type']}", before // said["n_layer"]
        found.append(Change(mode, types, before, after, layer, now["seconds"], now["memcpy"], over_steady))
    return found


def measure_changes(bench: KvBench, cells: int) -> tuple[Change, ...]:
    """Measure the changes in place and by copy."""

    def change(mode: str) -> list[Change]:
        return bench.answer(_changes, mode, cells, [cells], "-t", str(cores()), "--retype", ",".join(CHANGES))

    return tuple(itertools.chain(*bench.console.each("changing types", (IN_PLACE, COPY), change)))


def fill_budgets(bench: KvBench, budget: int, size: int) -> tuple[BudgetCapacity, ...]:
    """Return how many cells fit into a budget, for each kind of cache.

    budget: the budget in bytes
    size: the bytes of one cell in f16
    """
    budget = max(1, budget // MIB) * MIB
    cells = 4 * budget // size  # more cells than the budget can hold in any of the types
    fits = budget // size // 256 * 256  # llama.cpp pads a context to 256 cells
    kinds = {"f16": (), "ladder": ("--auto-quant", ",".join(LADDER))}

    def fill(name: str) -> BudgetCapacity:
        def full(_mode: str, said: Mapping[str, Any]) -> BudgetCapacity:
            point = said["points"][1]  # the first point is the creation, the second is the full cache
            return BudgetCapacity(name, point["depth"], point["type"], point["usage"]["committed"], budget)

        # this run is not timed, so it uses all cores
        more = "--budget", str(budget // MIB), "-t", str(cores()), *kinds[name]
        return bench.answer(full, IN_PLACE, cells, [cells], *more)

    static = BudgetCapacity(STATIC, fits, LADDER[0], fits * size, budget)
    return (static, *bench.console.each("filling a budget", list(kinds), fill))


def measure_losses(program: Path, toys: Sequence[Path], console: Console) -> tuple[tuple[Loss, ...], list[Finding]]:
    """Return the loss of precision of each change of type, on every test model that supports both types.

    Also return the failed checks.
    """
    checks = [toy_check(toy, "types", "--quick", "--checks", _CHECK, kind="retype") for toy in toys]
    with console.progress(f"loss of precision, on {len(checks)} models", len(checks)) as bar:
        found = runner.kv_checks(checks, program, (IN_MEMORY,) * cores(), bar.update)
    lost, end = list[Loss](), " kl changed"
    for finding in found:
        measured: dict[str, float] = finding.details.get("measured", {}).get(_CHECK, {})
        for kind in (name.removesuffix(end) for name in measured if name.endswith(end)):
            start = measured[f"{kind} kl from the start"]
            lost.append(Loss(finding.model, kind.replace(":", " to "), measured[kind + end], start))
    return tuple(lost), [finding for finding in found if finding.outcome is CheckOutcome.FAILED]


def type_bars(
    changes: Sequence[Change], held: Sequence[BudgetCapacity], losses: Sequence[Loss], failed: Sequence[Finding]
) -> tuple[Bar, ...]:
    """Return the figures for changes and budgets that have a target.

    held: the capacity of each cache, the static cache first
    failed: the checks of the models that lost too much
    """
    static, *dynamic = held
    worst = max((loss.kl_ratio for loss in losses), default=None)
    note = f"{failed[0].id}: {failed[0].reason}" if failed else ""
    return (
        *(  # a change may need one more layer; a change by copy may also need some memory for the rest of the process
            bytes_bar(f"peak over steady, {c.types}", c.mode, c.over_steady, c.layer + SPARE * (c.mode == COPY))
            for c in changes
            if c.after < c.before
        ),
        *(
            Bar(f"time / memcpy, {c.types}", c.mode, ratio(c.seconds, c.memcpy), most=1.5)
            for c in changes
            if c.types == "f16 to q8_0"
        ),
        *(Bar("committed / budget", h.cache, h.committed / h.budget, most=1) for h in dynamic),
        *(Bar("tokens / static", h.cache, ratio(h.tokens, static.tokens), least=1) for h in dynamic),
        Bar("KL of changed cells / from the start, worst", "ladder", worst, most=1.5),
        Bar("models that are worse", "ladder", float(len(failed)), most=0, note=note),
    )
