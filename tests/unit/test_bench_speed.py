"""Test the speeds, intervals and targets of kvtool bench with invented samples. No program is run."""

from __future__ import annotations

import pytest

from kvtool.bench import runs, speed
from kvtool.bench.report import Bar
from kvtool.bench.speed import Figure, Pair

MIB = 2**20


def pair(i: int, base: float, test: float, added: int = 0, n_tokens: int = 1) -> Pair:
    return Pair(i, "generate", 100, n_tokens, base, test, int(added > 0), added)


def test_interval_uses_student_distribution() -> None:
    found = speed.interval([1.00, 1.02, 0.98, 1.01])
    assert found.value == pytest.approx(1.0024, abs=1e-4)
    assert found.low == pytest.approx(0.97550, abs=1e-5) and found.high == pytest.approx(1.03002, abs=1e-5)
    alone = speed.interval([1.0])
    assert (alone.low, alone.high, str(alone)) == (0, None, "1.000 (0.000-inf)"), "infinity is not a JSON number"


def test_interval_counts_rounds_not_pairs() -> None:
    few = [pair(i, 1.0, time) for i, time in enumerate((0.95, 1.0, 1.05))]
    assert speed.by_round(few * 50, speed.speed_without_growth) == speed.by_round(few, speed.speed_without_growth)


def test_outlier_pair_is_ignored() -> None:
    calm = [pair(0, 1.0, 1.0)] * 9
    assert speed.overall_speed([*calm, pair(0, 1.0, 30.0)]) == 1.0


def test_growths_weigh_by_frequency() -> None:
    some = [pair(0, 1.0, 1.0), pair(0, 1.0, 3.0, added=100)]
    assert speed.speed_without_growth(some) == 1.0
    assert speed.overall_speed(some) == pytest.approx(1 / 1.02)  # one of 100 calls needs 2 seconds more
    assert speed.overall_speed([pair(0, 1.0, 1.0, n_tokens=50), pair(0, 1.0, 3.0, 100, 50)]) == pytest.approx(1 / 2)
    assert speed.overall_speed([pair(0, 1.0, 2.0, added=8, n_tokens=64)]) == pytest.approx(
        1 / 2
    )  # 64 tokens need several growths of 8 cells, so every call has a growth


def test_growth_every_time_has_no_steady() -> None:
    (found,) = speed.speeds("copy", True, ["generate", "prompt"], [pair(i, 1.0, 2.0, added=8) for i in range(3)])
    assert found.steady is None and found.growing == 2.0 and found.ratio.value == pytest.approx(0.5)
    assert (found.growths, found.pairs, found.rounds) == (3, 3, 3)


@pytest.mark.parametrize(
    ("value", "low", "high", "least", "most", "met"),
    [
        (1.0, None, None, 0.99, 1.01, True),
        (1.02, None, None, 0.99, 1.01, False),
        (0.98, None, None, 0.99, None, False),
        (0.0, None, None, None, 0, True),
        (1.0, 0.975, 1.2, 0.99, None, True),
        (1.0, 0.965, 1.01, 0.99, None, False),  # too uncertain
        (0.985, 0.98, 0.99, 0.99, None, False),  # certain, but too low
        (1.0, 0.98, 1.04, 0.99, 1.01, False),
        (None, None, None, 0.99, None, None),
    ],
)
def test_bar_checks_limits_and_interval(
    value: float | None, low: float | None, high: float | None, least: float | None, most: float | None, met: bool
) -> None:
    assert Bar("x", "copy", value, least, most, low=low, high=high).met is met


def test_worst_depth_decides_bar() -> None:
    def at(depth: int, value: float, low: float) -> speed.Speed:
        ratio = Figure(value, low, value)
        return speed.Speed("copy", True, "generate", depth, 1, 1.0, ratio, None, None, 0, 4, 4)

    found = speed.speed_bars([at(250, 1.0, 0.98), at(1000, 0.985, 0.984), at(3000, 1.0, 0.99)])[0]
    assert found.note == "at 1000" and found.met is False


def sample(mode: str, points: list[tuple[str, int, int, int]]) -> list[runs.Row]:
    """Return rows for points (name, depth, resident MiB, committed MiB). The peak is always 10 MiB higher."""
    counted = {"n_grow": 1, "n_shrink": 0, "n_bytes_copied": 0, "t_grow_us": 1000, "t_grow_max_us": 1000}
    said = [
        {
            **{"name": name, "depth": depth, "rss": resident * MIB, "peak": (resident + 10) * MIB},
            "usage": {"reserved": 800 * MIB, "committed": size * MIB, "used": size * MIB, **counted},
        }
        for name, depth, resident, size in points
    ]
    growths = [{"depth": depth, "seconds": 6.0, "memcpy": 4.0, "commit": 2.0} for depth in (3, 9)]
    whole = {"n_layer": 4, "create_seconds": 0.1, "rss_before": 0, "points": said, "growths": growths}
    return runs.rows_of(mode, whole)


def test_unreturned_memory_counts_as_used() -> None:
    static = sample("static", [("created", 0, 1000, 1000), ("depth", 4, 1020, 1000), ("after-clear", 1, 1020, 1000)])
    hoards = sample("in-place", [("created", 0, 30, 20), ("depth", 4, 920, 400), ("after-clear", 1, 580, 20)])
    found = {b.name: b.value for b in runs.memory_bars([*hoards, *static])}
    assert found["peak over steady"] == 930 - 20 - 400
    assert found["KV resident after clear and a decode"] == 580 - 20
    assert {b.name: b.value for b in runs.memory_bars(hoards)}["peak over steady"] == 10


def test_medians_count_growths_to_depth() -> None:
    some = [sample("copy", [("created", 0, 5 + i, 1), ("depth", 8, r, 9)]) for i, r in enumerate((30, 10, 20))]
    created, deep = runs.medians(some)
    assert (created.resident, deep.resident) == (6 * MIB, 20 * MIB)
    assert created.growth_limit is None and deep.growth_limit == 4.0  # the second growth is beyond this depth
