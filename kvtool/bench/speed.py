"""Compute speed from pairs of calls: a ratio with a 95 % interval, and the effect of growths.

Each pair has the time of a call and the time of the same call in a static context. Within a round, `steady` is the
median of time / static time over the pairs without a growth, and `growing` is the median over the pairs with a growth.
One growth adds enough cells for several calls. If a call has n tokens and a growth adds `added` cells, a growth occurs
once in added / n calls. So the share of calls with a growth is p = n / added, and:

    time = steady * (1 - p) + growing * p        and the speed is 1 / time

Both contexts of a round keep their memory, and the place of that memory changes the time more than the difference that
is measured. So a round counts as one observation, and more pairs in a round do not replace more rounds. (T. Kalibera,
R. Jones: Rigorous benchmarking in reasonable time, ISMM 2013: repeat at the highest level that varies.) The interval is
the confidence interval of Student's t, computed from the logarithms of the rounds' ratios:

    exp(mean +- t(0.975, rounds - 1) * deviation / sqrt(rounds))
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtool.bench.report import IN_PLACE, Bar

# comparisons of a patched build with the dynamic cache off: with an unpatched build, and with itself
OFF, SAME = "off", "same"
KINDS = "generate", "prompt", "create"

# t(0.975, n) for n = 1, 2, ...; for larger n the last value is used, which makes the interval a little too wide
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


@dataclass(frozen=True)
class Pair:
    """Hold the times of one call in both contexts.

    kind: "create", "generate" or "prompt"
    base: the seconds of the call in the static context
    test: the seconds of the call in the other context
    n_grow: the number of growths during the call in the other context
    n_added: the number of cells that these growths added
    """

    round: int
    kind: str
    depth: int
    n_tokens: int
    base: float
    test: float
    n_grow: int
    n_added: int


@dataclass(frozen=True)
class Figure:
    """Hold a number and its 95 % interval. `high` is None for infinity, which JSON does not have."""

    value: float
    low: float
    high: float | None

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}-{math.inf if self.high is None else self.high:.3f})"


@dataclass(frozen=True)
class Speed:
    """Compare the speed of a context with the static context, for one kind of call at one depth.

    ratio: the speed with growths as often as they really occur, divided by the speed of the static context
    steady: the speed of calls without a growth, divided by the speed of the static context; None if each call had a
        growth
    growing: the time of a call with a growth, divided by the time of the same call in the static context; None if no
        call had a growth
    seconds: the median time of a call in the static context
    """

    mode: str
    flash_attn: bool
    kind: str
    depth: int
    n_tokens: int
    seconds: float
    ratio: Figure
    steady: Figure | None
    growing: float | None
    growths: int
    pairs: int
    rounds: int


def interval(ratios: Sequence[float]) -> Figure:
    """Return the geometric mean of the rounds' ratios and its 95 % interval.

    For a single round, the interval is 0 to infinity.
    """
    logs = [math.log(r) for r in ratios]
    middle = statistics.fmean(logs)
    if len(logs) == 1:
        return Figure(math.exp(middle), 0.0, None)
    half = _T[min(len(logs) - 2, len(_T) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Figure(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def by_round(pairs: Sequence[Pair], value: Callable[[Sequence[Pair]], float | None]) -> Figure | None:
    """Compute `value` for each round, and return the mean and the interval of the numbers.

    Rounds for which `value` returns None are left out. Return None if no round is left.
    """
    rounds = ([p for p in pairs if p.round == number] for number in {p.round for p in pairs})
    found = [v for r in rounds if (v := value(r)) is not None]
    return interval(found) if found else None


def medians(speeds: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the median of the speeds at each depth, in the order of the depths. Each item is (depth, tokens/s)."""
    found: dict[int, list[float]] = {}
    for depth, tokens_per_second in speeds:
        found.setdefault(depth, []).append(tokens_per_second)
    return {depth: statistics.median(found[depth]) for depth in sorted(found)}


def _time(pairs: Sequence[Pair]) -> float | None:
    return statistics.median(p.test / p.base for p in pairs) if pairs else None


def speed_without_growth(pairs: Sequence[Pair]) -> float | None:
    """Return the speed of the calls without a growth, divided by the speed of the static context.

    Return None if every call had a growth.
    """
    time = _time([p for p in pairs if not p.n_grow])
    return 1 / time if time else None


def overall_speed(pairs: Sequence[Pair]) -> float:
    """Return the speed with growths as often as they really occur, divided by the speed of the static context."""
    grew = [p for p in pairs if p.n_grow]
    still, growing = _time([p for p in pairs if not p.n_grow]), _time(grew)
    if growing is None or still is None:
        return 1 / (still or growing or math.nan)
    share = min(1.0, statistics.median(p.n_tokens / p.n_added if p.n_added else 1.0 for p in grew))
    return 1 / (still * (1 - share) + growing * share)


def speeds(mode: str, flash_attn: bool, kinds: Sequence[str], pairs: Sequence[Pair]) -> list[Speed]:
    """Return the speed of every kind of call at every measured depth."""
    found = []
    for kind, depth in itertools.product(kinds, sorted({p.depth for p in pairs})):
        calls = [p for p in pairs if (p.kind, p.depth) == (kind, depth)]
        if ratio := by_round(calls, overall_speed):
            grew, rounds = [p for p in calls if p.n_grow], {p.round for p in calls}
            call = mode, flash_attn, kind, depth, calls[0].n_tokens, statistics.median(p.base for p in calls)
            figures = ratio, by_round(calls, speed_without_growth), _time(grew)
            found.append(Speed(*call, *figures, len(grew), len(calls), len(rounds)))
    return found


def speed_bars(speeds: Sequence[Speed]) -> list[Bar]:
    """Return one figure with its target for each comparison and kind of call, and one for the time of a growth.

    Each figure of a comparison is from its worst depth. If the target is missed at some depths, only these depths are
    considered. The worst depth is the depth whose 95 % interval begins lowest. The time of a growth is the largest
    `growing` of generated tokens in a cache that grows in place, over all depths.
    """
    groups = itertools.groupby(speeds, lambda s: (s.mode, s.flash_attn, s.kind))
    found = [min(map(_bar, group), key=lambda b: (bool(b.met), b.low or 0.0)) for _key, group in groups]
    grew = [s.growing for s in speeds if s.mode == IN_PLACE and s.kind == "generate" and s.growing is not None]
    return [*found, Bar("token with a growth / static", IN_PLACE, max(grew, default=None), most=2)]


def _bar(s: Speed) -> Bar:
    base, most = {OFF: ("unpatched", 1.01), SAME: ("itself", 1.01)}.get(s.mode, ("static", None))
    name = f"{s.kind} speed / {base}{'' if s.flash_attn else ', no flash attention'}"
    return Bar(name, s.mode, s.ratio.value, 0.99, most, note=f"at {s.depth}", low=s.ratio.low, high=s.ratio.high)
