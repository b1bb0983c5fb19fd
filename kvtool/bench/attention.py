"""Measure the speed of prompts and tokens with each type of cells, at several depths of the context.

Two comparisons are made. First, cells of each smaller type are compared with f16 cells in the same build. With
`--baseline DIR`, each type is then compared with the same type in the unpatched build in DIR. A ratio is the speed of
the type in the first column, divided by the speed of the column *compared with*. A ratio above 1 means that the type in
the first column is faster.

One process has both contexts and calls them alternately. Both are static caches with flash attention and use all cores.
The time is measured with a clock. Each round creates both contexts again and has one result: the median of the ratios
of its pairs of calls. The number in brackets is the 95 % confidence interval of Student's t over the rounds
(`kvtool/bench/speed.py` has the formula). A round with two builds is two processes, because the library that is loaded
first has an advantage. So there are half as many of these rounds, but at least two. f16 has about four times as many,
because the target of f16 has the smallest tolerance.

*Depth* is the number of tokens in the context before the measured calls. kv-bench fills the context up to this depth
without the cost of attention (`cpp/tools/kv-bench/README.md` describes how), and does not measure this time. The plot
shows tokens per second. Each ratio was measured in pairs, so the line of a smaller type is the line of f16 multiplied
by the ratio of that type to f16.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.bench import plots
from kvtool.bench.report import STATIC, Bar, Report, Table
from kvtool.bench.runs import Comparison, KvBench
from kvtool.bench.speed import Figure, Pair, by_round, medians, speed_without_growth
from kvtool.machine import cores

HOW = (__doc__ or "").partition("\n\n")[2]
F16, UNPATCHED = "f16", "unpatched"
TYPES = ("q8_0", "q4_0")
DEPTHS, QUICK_DEPTHS = (512, 2048, 4096, 8192), (512, 2048)
KINDS = "prompt", "generate"
BATCH = 64  # tokens of a prompt; llama.cpp's flash attention has other code for fewer than 64
CALLS = {"-p": BATCH, "-b": 7, "-n": 24}
F16_TIMES = 4  # f16 is compared with an unpatched build in F16_TIMES * rounds // 2 rounds of two processes, see HOW
BEYOND = 1024  # kv-bench needs room beyond the last depth for the calls and a batch of 512 tokens
_COLOURS = {"f16": plots.GREY, "q8_0": plots.BLUE, "q4_0": plots.ORANGE}
_TITLES = {"prompt": f"Prompts of {BATCH} tokens", "generate": "Generated tokens"}

# lowest speed relative to f16 that meets the target, by kind of call and type; it applies at the depths of _AT
_LEAST = {("prompt", "q8_0"): 0.97, ("prompt", "q4_0"): 0.95, ("generate", "q8_0"): 1.0, ("generate", "q4_0"): 0.95}
_AT = {"prompt": (2048, 4096), "generate": (4096,)}


@dataclass(frozen=True)
class TypeSpeed:
    """Compare the speed of one type of cells with f16, or with the same type in an unpatched build.

    base: "f16" or "unpatched", the name of the other side of the comparison
    kind: "prompt" or "generate"
    depth: the number of tokens in the context before the call
    n_tokens: the number of tokens of one call
    base_seconds: the median duration of a call on the other side, in seconds
    seconds: the median duration of a call with this type, in seconds
    ratio: the speed with this type, divided by the speed of the other side
    """

    type: str
    base: str
    kind: str
    depth: int
    n_tokens: int
    base_seconds: float
    seconds: float
    ratio: Figure
    pairs: int
    rounds: int


@dataclass(frozen=True)
class AttentionResult(Report):
    """Report the speed of each type at each depth."""

    name, how, said = "attention", HOW, "{threads} threads, {rounds} rounds of each comparison in one build"
    threads: int
    rounds: int
    speeds: tuple[TypeSpeed, ...]

    def tables(self) -> tuple[Table, ...]:
        """Return the table of speeds."""
        rows = []
        for s in self.speeds:
            each = [f"{s.n_tokens / seconds:.1f}" for seconds in (s.base_seconds, s.seconds)]
            rows.append((s.type, s.base, s.kind, str(s.depth), *each, str(s.ratio)))
        columns = "type", "compared with", "call", ">depth", ">tokens/s of that", ">tokens/s", ">ratio"
        return (("Speed", columns, rows),)

    def pictures(self) -> dict[str, bytes]:
        """Draw tokens per second against depth, for prompts and for generated tokens.

        A dotted line is the unpatched build.
        """
        with plots.picture(self.name, 2, rows=2, size=(8, 8)) as (files, axes):
            for kind, axis in zip(KINDS, axes, strict=True):
                for (name, build), points in _lines(self.speeds, kind).items():
                    depths = sorted(points)
                    label = f"{name} {build}".rstrip()
                    style = {"color": _COLOURS[name], "linestyle": ":" if build else "-", "marker": "o"}
                    axis.plot(depths, [points[depth] for depth in depths], label=label, **style)
                plots.name_speed_axes(axis, _TITLES[kind])
        return files


def _lines(speeds: Sequence[TypeSpeed], kind: str) -> dict[tuple[str, str], dict[int, float]]:
    """Return the tokens per second at each depth, for each type and build.

    The speed of f16 is the median over all comparisons with f16. The speed of another type is the speed of f16 times
    the ratio of this type. The speed of a type in the unpatched build is its speed in the patched build, divided by
    the ratio of both builds. Measured speeds are not used directly, because the machine can become faster or slower
    between two comparisons.
    """
    same = [s for s in speeds if s.kind == kind]
    found = {(F16, ""): medians((s.depth, s.n_tokens / s.base_seconds) for s in same if s.base == F16)}
    # begin with the patched build, because the speeds in the unpatched build are computed from its speeds
    for s in sorted(same, key=lambda s: s.base == UNPATCHED):
        key = (s.type, UNPATCHED if s.base == UNPATCHED else "")
        patched = found[s.type, ""][s.depth] if s.base == UNPATCHED else found[F16, ""][s.depth]
        found.setdefault(key, {})[s.depth] = patched / s.ratio.value if key[1] else patched * s.ratio.value
    return found


def measure_types(
    bench: KvBench, n_ctx: int, depths: Sequence[int], rounds: int, unpatched: Path | None
) -> tuple[TypeSpeed, ...]:
    """Measure the speed of each smaller type against f16.

    With an unpatched libllama, also measure each type against that library.
    """
    turns = [(name, F16) for name in TYPES] + [(name, UNPATCHED) for name in (F16, *TYPES) if unpatched]
    calls = [str(each) for call in CALLS.items() for each in call]

    def comparison(name: str, base: str) -> Comparison:
        more = ("--base-type", F16) if base == F16 else ()
        args = "-t", str(cores()), "-ctk", name, "-ctv", name, *calls, *more
        other = unpatched if base == UNPATCHED else None
        return Comparison(f"{name} against {base}", STATIC, args, other, F16_TIMES if name == F16 else 1)

    found = bench.compare(n_ctx, depths, rounds, [comparison(*turn) for turn in turns])
    return tuple(speed for turn, pairs in zip(turns, found, strict=True) for speed in _speeds(*turn, pairs))


def _speeds(name: str, base: str, pairs: Sequence[Pair]) -> list[TypeSpeed]:
    """Return the results of one comparison, for every kind of call and every depth."""
    found = []
    for kind in KINDS:
        for depth in sorted({p.depth for p in pairs if p.kind == kind}):
            calls = [p for p in pairs if (p.kind, p.depth) == (kind, depth)]
            if ratio := by_round(calls, speed_without_growth):
                base_seconds = statistics.median(p.base for p in calls)
                seconds = statistics.median(p.test for p in calls)
                call = name, base, kind, depth, calls[0].n_tokens
                found.append(TypeSpeed(*call, base_seconds, seconds, ratio, len(calls), len({p.round for p in calls})))
    return found


def attention_bars(speeds: Sequence[TypeSpeed]) -> tuple[Bar, ...]:
    """Return the figures that have a target.

    These are the speeds of the smaller types relative to f16 at the depths of _AT, and the speed of f16 relative to an
    unpatched build.
    """
    found = []
    for s in speeds:
        if s.base == F16 and s.depth in _AT[s.kind]:
            least = _LEAST[s.kind, s.type]
        elif s.base == UNPATCHED and s.type == F16:
            least = 0.99  # the patch may be faster, because it aligns the scratch memory of f16, too
        else:
            continue
        name, at = f"{s.kind} speed / {s.base}", f"at {s.depth}"
        found.append(Bar(name, s.type, s.ratio.value, least, note=at, low=s.ratio.low, high=s.ratio.high))
    return tuple(found)
