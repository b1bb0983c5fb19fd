"""kvtool bench without a program: the plan, the models, and figures and bars out of samples made up here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from gguf import GGUFReader

from kvtool.bench import bars, figures, geometry, plan
from kvtool.bench.sample import Call, GrowthLimit, Point, Sample, Usage

USAGE = Usage(800, 400, 200, 4, 8, 2, 1, 0, 100, 1000, 1000)


def sample(**changes: object) -> Sample:
    base = Sample(True, 8, 2, 0.1, 0, True, (Point("created", 0, 0.0, 10, 10, USAGE),), (), ())
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def cross(depth: int, seconds: float, grew: int = 0) -> Call:
    limit = GrowthLimit(0.5, 2.0, 1.0) if grew else None
    return Call("cross", depth, 1, seconds, grew, 3.0 * grew, 7 * grew, 5 * grew, 0, limit)


def test_the_modes_take_turns_and_the_first_changes() -> None:
    planned = plan.make(quick=True, full=False, repeats=3)
    modes = [r.mode for r in plan.runs(planned)]
    assert modes[:3] == ["static", "copy", "in-place"]
    assert modes[3] == "copy" and modes[6] == "in-place"
    assert [r.repeat for r in plan.runs(planned)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_depths_are_those_of_the_mode_and_fit() -> None:
    assert plan.make(quick=False, full=False).depths == (89, 809, 6409, 25609, 32768)
    assert plan.make(quick=False, full=True).depths[-1] == 80009
    assert plan.make(quick=True, full=False).grown == 8192
    small = plan.make(quick=True, full=False, n_ctx=2048)
    assert small.depths == (89, 809) and small.grown == 809


def test_the_three_depths_of_speed_are_the_deepest() -> None:
    assert plan.make(quick=False, full=False).speed_depths == (809, 6409, 25609)


def test_the_storage_is_forced_and_a_static_run_is_told_nothing() -> None:
    env = {m: plan.Run(geometry.QWEN, m, 0).env for m in plan.MODES}
    assert env["copy"] == {plan.STORAGE: "copy"}
    assert env["in-place"] == {plan.STORAGE: "inplace"}
    assert env["static"] == {plan.STORAGE: None}  # a variable of the user's shell is taken away


@pytest.mark.parametrize("model", geometry.MODELS, ids=lambda m: m.name)
def test_the_models_have_the_geometry_that_they_claim(model: geometry.CacheModel, tmp_path: Path) -> None:
    path = model.make(tmp_path)
    fields = GGUFReader(path).fields
    arch = fields["general.architecture"].contents()
    count = fields[f"{arch}.block_count"].contents()
    row = 2 * fields[f"{arch}.attention.head_count_kv"].contents() * fields[f"{arch}.attention.key_length"].contents()
    if arch == "deepseek2":
        row //= 2  # V is a part of K
    assert model.cell_bytes == 2 * model.cell_layers * row
    assert path.stat().st_size < 32 * 2**20
    assert model.make(tmp_path).stat().st_mtime_ns == path.stat().st_mtime_ns
    if arch == "gemma3":
        window = fields["gemma3.attention.sliding_window"].contents()
        assert model.window_bytes == (count - model.cell_layers) * 2 * row * (2 * window + 512)


def test_a_ratio_is_made_within_a_repeat() -> None:
    fast, slow = sample(create_seconds=1.0), sample(create_seconds=10.0)
    dynamic = [sample(create_seconds=0.5), sample(create_seconds=5.0), sample(create_seconds=3.0)]
    found = figures.paired(dynamic, [fast, slow, slow], lambda s: s.create_seconds)
    assert found == figures.Figure(0.5, 0.3, 0.5)


def test_repeats_without_a_value_are_left_out() -> None:
    values: dict[float, float | None] = {1.0: None, 2.0: 4.0, 3.0: 0.0}
    some = [sample(create_seconds=s) for s in values]
    assert figures.paired(some, some, lambda s: values[s.create_seconds]) == figures.Figure(1.0, 1.0, 1.0)
    assert figures.paired([], some, lambda s: 1.0) is None
    assert figures.figure([]) is None


def test_the_worst_growth_call_is_held_against_its_neighbours() -> None:
    shallow = [cross(d, 0.001, d == 252) for d in range(248, 260)]
    deep = [cross(d, 0.1) for d in range(4088, 4100)]
    deep[5] = cross(4093, 0.3, 1)
    found = figures.worst_growth_call(sample(calls=tuple(shallow + deep)))
    assert found == pytest.approx(3.0)
    assert figures.growth_calls(sample(calls=tuple(shallow + deep))) == pytest.approx({252: 1.0, 4093: 3.0})
    assert figures.worst_growth_call(sample(calls=tuple(deep[:5]))) is None


def test_repeats_are_taken_together_depth_by_depth() -> None:
    runs = [sample(create_seconds=s) for s in (1.0, 2.0, 9.0)]
    found = figures.by_depth(runs, lambda s: {4: s.create_seconds} if s.create_seconds < 9 else {2: 7.0, 4: 5.0})
    assert found == {2: 7.0, 4: 2.0}


def test_growths_are_held_against_the_same_bytes_without_a_cache() -> None:
    some = sample(calls=(cross(1, 9.0, 1), cross(2, 9.0), cross(3, 9.0, 1), cross(8, 9.0, 1)))
    assert figures.spent(some, 8) == figures.Spent(6.0, 14, 10, 1.0, 4.0, 2.0)  # the third growth is beyond
    assert figures.growth_over_limit(some, 8, "commit") == pytest.approx(1.5)
    assert figures.growth_over_limit(some, 8, "memcpy") == pytest.approx(6.0)
    assert figures.growth_over_limit(some, 1, "commit") is None


def test_memory_that_is_freed_but_kept_counts_as_peak() -> None:
    static = sample(points=(Point("depth", 4, 0.0, 1020, 1020, dataclasses.replace(USAGE, committed=1000)),))
    hoards = sample(points=(Point("depth", 4, 0.0, 920, 930, dataclasses.replace(USAGE, committed=400)),))
    assert figures.peak_over_steady(hoards, static) == 930 - 20 - 400
    assert figures.peak_over_steady(hoards, None) == 10


def test_what_is_left_after_a_clear_is_without_the_compute_buffers() -> None:
    before = Point("depth", 4, 0.0, 1050, 1050, dataclasses.replace(USAGE, committed=1000))
    after = Point("after-clear", 1, 0.0, 80, 1050, USAGE)
    assert figures.left_after_clear(sample(points=(before, after)), None) == 30
    static = sample(points=(Point("depth", 4, 0.0, 2020, 2020, dataclasses.replace(USAGE, committed=2000)),))
    assert figures.left_after_clear(sample(points=(before, after)), static) == 60


@pytest.mark.parametrize(
    ("value", "least", "most", "met"),
    [(1.0, 0.99, 1.01, True), (1.02, 0.99, 1.01, False), (0.98, 0.99, None, False), (0.0, None, 0, True)],
)
def test_a_bar_has_two_sides(value: float, least: float | None, most: float | None, met: bool) -> None:
    found = bars.bar("x", "m", "copy", figures.Figure(value, value, value), least=least, most=most)
    assert found.met is met


def test_a_bar_that_was_not_measured_is_neither_met_nor_missed() -> None:
    found = bars.bar("x", "m", "copy", None, most=1)
    assert found.met is None and found.note == "not measured"
    assert bars.missed([found]) == ()
