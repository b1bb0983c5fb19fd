"""Test kvtool bench --types with an imitated kv-bench and kv-check: measurements, targets and plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtool.bench.types import Loss, TypesResult
from kvtool.errors import MeasureError, UsageError
from kvtool.verify import models
from tests import fakes
from tests.unit.benches import run_bench


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes.program(fakes.programs(tmp_path / "bin") / "kv-bench", fakes.KV_BENCH)
    toys = [fakes.model(tmp_path, name) for name in ("llama-dense", "gemma3-dense", "no-cache")]
    monkeypatch.setattr(models, "toys", lambda *_: tuple(toys))
    monkeypatch.setenv("FAKE_BENCH_LOG", str(tmp_path / "log"))
    return tmp_path


def run(place: Path, **options: object) -> TypesResult:
    return run_bench(
        place, TypesResult, **{"types": True, "model": fakes.model(place, "small"), "n_ctx": 32768, **options}
    )


def test_changes_are_measured_per_storage(place: Path) -> None:
    found = run(place)
    assert found.cells == 8192
    assert [(c.mode, c.types) for c in found.changes] == [
        (mode, types) for mode in ("in-place", "copy") for types in ("f16 to q8_0", "q8_0 to f16", "f16 to q4_0")
    ]
    first = found.changes[0]
    assert (first.before, first.after, first.layer) == (2**29, 2**28, 2**25)
    assert (first.seconds, first.memcpy, first.over_steady) == (0.5, 0.4, 24 * 2**10)


def test_budget_is_quarter_of_context(place: Path) -> None:
    static, alone, ladder = run(place).held
    assert {h.budget for h in (static, alone, ladder)} == {2**27}
    assert (static.tokens, alone.tokens, ladder.tokens) == (2048, 2048, 4096)
    assert (alone.type, ladder.type) == ("f16", "q4_0")


@pytest.mark.parametrize(("quick", "mib", "tokens"), [(False, 2048, 4096), (True, 256, 512)])
def test_budget_without_model_uses_large_cells(
    place: Path, monkeypatch: pytest.MonkeyPatch, quick: bool, mib: int, tokens: int
) -> None:
    made: list[str] = []

    def cache_model(geometry: models.Geometry, _work: Path) -> Path:
        made.append(geometry.name)
        return fakes.model(place, "made")

    monkeypatch.setattr(models, "cache_model", cache_model)
    found = run(place, model=None, quick=quick)
    assert made == ["Qwen3.5-27B", "Llama-2-7B"] and found.name == "types"
    assert {h.budget for h in found.held} == {mib * 2**20} and found.held[0].tokens == tokens
    assert f"Tokens in {mib:,} MiB" in found.pictures()["types.svg"].decode()


def test_loss_is_reported_per_model(place: Path) -> None:
    found = run(place)
    assert [(loss.model, loss.types) for loss in found.losses] == [
        (model, types)
        for model in ("llama-dense", "gemma3-dense", "no-cache")
        for types in ("f16 to q8_0", "q8_0 to f16")
    ]
    assert found.losses[0].kl_ratio == pytest.approx(14 / 15) and found.losses[1].kl_ratio == 0, "1e-9 counts as 0"
    assert all(bar.met for bar in found.bars) and found.failure is None
    assert Loss("x", "f16 to q8_0", 0.5, 0.0).kl_ratio > 1.5 and Loss("x", "f16 to q8_0", 1e-9, 0.0).kl_ratio == 0


def test_quick_uses_few_models(place: Path) -> None:
    found = run(place, quick=True)
    assert {loss.model for loss in found.losses} == {"llama-dense", "gemma3-dense"} and found.cells == 2048


def test_missed_bars_are_listed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "wasteful")
    monkeypatch.setattr(models, "toys", lambda *_: (fakes.model(place, "worse"),))
    found = run(place, strict=True)
    assert [bar.name.partition(",")[0] for bar in found.missed] == [
        *(["peak over steady"] * 4),
        *(["time / memcpy"] * 2),
        *(["committed / budget"] * 2),
        "KL of changed cells / from the start",
        "models that are worse",
    ]
    assert "worse/types: retype-quality: twice" in found.missed[-1].note
    assert isinstance(found.failure, MeasureError)


def test_unknown_resident_memory_skips_bar(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "no-rss")
    found = run(place)
    assert {c.over_steady for c in found.changes} == {None}
    assert {bar.name.partition(",")[0] for bar in found.bars if bar.met is None} == {"peak over steady"}


def test_files_match_results(place: Path) -> None:
    out = place / "out"
    found = run(place, out=out)
    assert {file.name for file in out.iterdir()} == {"types.md", "types.json", "types.svg"}
    text = (out / "types.md").read_text()
    assert "Kullback-Leibler" in text
    assert (
        "| in-place | f16 to q8_0 | 512 | 256 | 0.5 | 0.4 | 1.25 | 0 |" in text and "| ladder | 4096 | q4_0 |" in text
    )
    document = json.loads((out / "types.json").read_text())
    assert len(document["losses"]) == len(found.losses) == 6 and document["held"][2]["tokens"] == 4096
    assert "Tokens in 128 MiB" in (out / "types.svg").read_text()


def test_types_and_serve_are_exclusive(place: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        run(place, serve=True)


def test_answer_without_types_is_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "typeless")
    with pytest.raises(MeasureError, match="not understood"):
        run(place)
