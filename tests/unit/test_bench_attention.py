"""Test kvtool bench --attention with an imitated kv-bench: comparisons, targets and plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.bench.attention import AttentionResult
from kvtool.errors import MeasureError, UsageError
from tests import fakes
from tests.unit.benches import run_bench


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes.program(fakes.programs(tmp_path / "bin") / "kv-bench", fakes.KV_BENCH)
    monkeypatch.setenv("FAKE_BENCH_LOG", str(tmp_path / "log"))
    return tmp_path


def run(place: Path, **options: object) -> AttentionResult:
    return run_bench(place, AttentionResult, **{"attention": True, "model": fakes.model(place, "small"), **options})


def baseline(place: Path) -> Path:
    folder = place / "unpatched"
    folder.mkdir()
    (folder / "libllama.so").touch()
    return folder


def test_types_are_compared_with_f16(place: Path) -> None:
    found = run(place)
    assert [(s.type, s.base, s.kind, s.depth) for s in found.speeds] == [
        (name, "f16", kind, depth)
        for name in ("q8_0", "q4_0")
        for kind in ("prompt", "generate")
        for depth in (512, 2048, 4096, 8192)
    ]
    assert (place / "log").read_text().splitlines() == ["static rounds"] * 2
    assert [s.ratio.value for s in found.speeds if s.type == "q4_0"] == pytest.approx([1.0] * 4 + [1 / 0.98] * 4)
    assert {s.rounds for s in found.speeds} == {found.rounds} == {4}


def test_bars_cover_the_required_depths(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "slow-prompt")
    found = run(place, strict=True)
    assert [(bar.mode, bar.note, bar.met) for bar in found.bars if bar.name == "prompt speed / f16"] == [
        (name, at, False) for name in ("q8_0", "q4_0") for at in ("at 2048", "at 4096")
    ]
    assert all(bar.met for bar in found.bars if bar.name == "generate speed / f16")
    assert isinstance(found.failure, MeasureError)


def test_baseline_compares_every_type(place: Path) -> None:
    found = run(place, baseline=baseline(place), quick=True)
    assert {(s.type, s.base) for s in found.speeds} == {
        *((name, "f16") for name in ("q8_0", "q4_0")),
        *((name, "unpatched") for name in ("f16", "q8_0", "q4_0")),
    }
    # two rounds of two processes each; f16 has four times as many rounds as `rounds // 2`, which is 1 here
    others = [f"static rounds unpatched {seed}" for n_seeds in (8, 4, 4) for seed in range(n_seeds)]
    assert (place / "log").read_text().splitlines() == ["static rounds"] * 2 + others
    assert {bar.mode for bar in found.bars if bar.name.endswith("unpatched")} == {"f16"}


def test_plot_has_a_line_per_type_and_build(place: Path) -> None:
    out = place / "out"
    run(place, baseline=baseline(place), quick=True, out=out)
    assert {file.name for file in out.iterdir()} == {f"attention.{kind}" for kind in ("md", "json", "svg")}
    svg = (out / "attention.svg").read_text()
    assert svg.count(">q8_0<") == svg.count(">q4_0 unpatched<") == svg.count(">f16<") == 2
    assert "| q8_0 | f16 | prompt | 2048 | 640.0 |" in (out / "attention.md").read_text()


def test_depths_beyond_context_are_left_out(place: Path) -> None:
    assert {s.depth for s in run(place, n_ctx=4096).speeds} == {512, 2048}


def test_attention_and_types_are_exclusive(place: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        run(place, types=True)
