"""kvtool bench against a stand-in for kv-bench: bars, tables, files, plots, and what can go wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvtool.alone import alone
from kvtool.bench import bars, baseline, figures, plan, plots, runner
from kvtool.bench.sample import parse
from kvtool.commands import bench
from kvtool.console import Console
from kvtool.errors import DiskError, KvtoolError, MeasureError, MissingToolError, UsageError
from kvtool.project import Project
from tests import fakes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    fakes.program(bin_dir / "kv-bench", fakes.KV_BENCH)
    monkeypatch.setenv("FAKE_BENCH_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(runner, "available_memory", lambda: 2**40)
    monkeypatch.setattr(bench, "load_lock", lambda _path: type("Lock", (), {"current": "v1"}))
    return tmp_path


def project(place: Path) -> Project:
    return Project(place, place / "patches", place / "cpp", place / "llama.cpp", place / "cache")


def run(place: Path, **options: object) -> bench.Benched:
    given = bench.Options(**{"bin_dir": place / "bin", "quick": True, "repeats": 2, **options})  # type: ignore[arg-type]
    return bench.run(project(place), Console(quiet=True), given)


def named(result: bench.Benched, name: str, mode: str) -> bars.Bar:
    return next(b for b in result.bars if (b.name, b.mode) == (name, mode))


def test_the_noise_is_said_beside_a_speed(place: Path) -> None:
    assert figures.noise([2.0, 1.9, 2.4]) == "0.95 to 1.20"
    assert figures.noise([2.0]) == ""
    assert named(run(place), "prompt speed / static", "copy").note.endswith("at 89; static alone varies 1.00 to 1.00")


def test_a_run_ends_in_bars_with_what_was_measured(place: Path) -> None:
    result = run(place)
    assert (place / "log").read_text().split() == ["static", "copy", "inplace", "copy", "inplace", "static"]
    creation = named(result, "creation time / static", "in-place")
    assert creation.value == pytest.approx(0.005) and creation.met
    assert named(result, "resident after creation / static", "in-place").value == pytest.approx(24 / 8200)
    assert named(result, "growth time / commit", "in-place").value == pytest.approx(0.003 / 0.00285)
    assert named(result, "bytes copied", "in-place").value == 0
    assert named(result, "growth time / memcpy", "copy").value == pytest.approx(1.2)
    assert named(result, "peak over steady", "in-place").met
    assert named(result, "peak over steady", "copy").most == 32 + 512 / 16
    assert named(result, "generation speed / static", "copy").value == pytest.approx(1.0)
    assert named(result, "prompt speed / static", "copy").value == pytest.approx(0.99)
    assert named(result, "worst call with a growth / median", "in-place").value == pytest.approx(1.5)
    assert named(result, "KV resident after clear", "copy").value == 16
    assert named(result, "KV committed / used", "in-place").met
    assert result.failure is None


def test_a_missed_bar_fails_only_when_strict(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "wasteful")
    assert run(place).failure is None
    failure = run(place, strict=True).failure
    assert isinstance(failure, MeasureError) and failure.exit_code == 8
    assert "peak over steady, Qwen3.5-27B, copy" in failure.why


def test_a_side_that_does_not_fit_is_left_out_and_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_memory", lambda: 6 * 2**30)
    result = run(place)
    assert [(s.mode, "10.0 GiB" in s.why) for s in result.skipped] == [("static", True)]
    assert "static" not in (place / "log").read_text()
    creation = named(result, "creation time / static", "copy")
    assert creation.met is None and creation.note.startswith("static left out")
    assert named(result, "growth time / commit", "in-place").value is not None


def test_without_resident_memory_the_rest_is_still_measured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "no-rss")
    result = run(place)
    assert named(result, "peak over steady", "copy").value is None
    assert named(result, "resident after creation / static", "copy").value is None
    assert named(result, "growth time / commit", "in-place").value is not None


@pytest.mark.parametrize(
    ("fate", "what", "why"),
    [
        ("crash", "could not measure Qwen3.5-27B static 1", "exit code 134"),
        ("garbage", "could not measure", "no document"),
        ("no-context", "could not measure", "context-fails: out of memory"),
        ("old", "is not understood", "n_shrink"),
    ],
)
def test_a_program_that_fails_is_an_error_that_says_why(
    place: Path, monkeypatch: pytest.MonkeyPatch, fate: str, what: str, why: str
) -> None:
    monkeypatch.setenv("FAKE_BENCH", fate)
    with pytest.raises(MeasureError) as caught:
        run(place)
    assert what in caught.value.what and why in caught.value.why and caught.value.next_step


def test_a_program_that_hangs_is_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "slow")
    planned = dataclasses.replace(plan.make(quick=True, full=False), timeout=0.5)
    with pytest.raises(MeasureError, match="did not finish"):
        runner.one(planned, plan.runs(planned)[0], place / "bin" / "kv-bench", place / "m.gguf")


def test_a_document_of_another_shape_is_an_error() -> None:
    with pytest.raises(MeasureError, match="not understood"):
        parse({"kv_dynamic": True})


def test_no_room_for_the_models_is_said_before_anything_starts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1000}))
    with pytest.raises(DiskError, match="no room"):
        run(place)
    assert not (place / "log").exists()


def test_a_missing_program_is_an_error(place: Path) -> None:
    (place / "bin" / "kv-bench").unlink()
    with pytest.raises(MeasureError, match="kv-bench is not in"):
        run(place)


@pytest.mark.parametrize(
    "options",
    [{"quick": True, "full": True}, {"models": "gpt*"}, {"repeats": -1}, {"threads": 0}, {"n_ctx": 100}],
    ids=str,
)
def test_options_that_make_no_sense(place: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        run(place, **options)


def test_models_are_chosen_by_glob() -> None:
    assert [m.name for m in bench.make_plan(bench.Options(models="gemma*")).models] == ["Gemma-3-4B"]


def test_files_are_written_with_everything_in_them(place: Path) -> None:
    out = place / "out"
    result = run(place, out=out)
    wanted = {"bench.md", "bench.json", "bench.csv", "memory.svg", "memory.png", "growth.svg", "growth.png"}
    assert {f.name for f in result.files} == wanted == {f.name for f in out.iterdir()}
    for name in ("memory", "growth"):
        assert ET.parse(out / f"{name}.svg").getroot().tag.endswith("svg")
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.png").stat().st_size < 200_000
    text = (out / "bench.md").read_text("utf-8")
    assert "![memory](memory.svg)" in text and "| growth time / commit | Qwen3.5-27B | in-place |" in text
    with (out / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["mode"], r["depth"]) for r in rows if r["mode"] == "copy"] == [
        ("copy", str(d)) for d in (89, 809, 6409, 8192)
    ]
    doc = json.loads((out / "bench.json").read_text("utf-8"))
    assert doc["command"] == "bench" and doc["ok"] is True
    assert {"bars", "summary", "machine", "skipped", "depths", "repeats", "threads", "n_ctx"} <= set(doc)
    assert {"name", "model", "mode", "value", "low", "high", "bound", "met", "note"} <= set(doc["bars"][0])
    assert {"creations", "depths", "cleared", "growths", "rates"} == set(doc["summary"])


def test_the_same_figures_give_the_same_plots(place: Path) -> None:
    found = run(place).summary
    assert plots.draw(found) == plots.draw(found)


def test_a_static_side_left_out_is_still_drawn(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_memory", lambda: 6 * 2**30)
    assert b"static (reserved)" in plots.draw(run(place).summary)["memory.svg"]


def test_without_matplotlib_the_error_comes_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingToolError, match="matplotlib is not installed") as caught:
        run(place, out=place / "out")
    assert "kvtool[bench]" in caught.value.next_step
    assert not (place / "log").exists()


def test_a_directory_that_cannot_be_written_is_an_error(place: Path) -> None:
    (place / "file").write_text("")
    with pytest.raises(DiskError, match="cannot write to"):
        run(place, out=place / "file")


def test_two_benchmarks_at_once_are_refused(place: Path) -> None:
    work = project(place).tree / "build" / "bench"
    work.mkdir(parents=True)
    with alone(work, MeasureError, "bench is running"), pytest.raises(MeasureError, match="another kvtool"):
        run(place)


def test_the_tables_are_rendered_for_people(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BENCH", "wasteful")
    run(place).render(Console())
    said = capsys.readouterr().out
    assert "Memory at each depth" in said and "bars met" in said and "MISSED" in said


def unpatched(place: Path, *, batched: bool = True) -> Path:
    for directory in (place / "bin", place / "unpatched"):
        directory.mkdir(exist_ok=True)
        fakes.program(directory / "llama-bench", fakes.UPSTREAM_BENCH)
        if batched:
            fakes.program(directory / "llama-batched-bench", fakes.UPSTREAM_BENCH)
    return place / "unpatched"


def test_the_flag_off_is_held_against_an_unpatched_build(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SPEED", "102")
    result = run(place, baseline=unpatched(place))
    assert named(result, "flag off: prompt speed", "off").value == pytest.approx(100 / 102)
    assert named(result, "flag off: generation speed", "off").met is False
    assert named(result, "flag off: creation time", "off").value == pytest.approx(1.02, rel=1e-4)


def test_creation_is_not_compared_without_the_program_for_it(place: Path) -> None:
    result = run(place, baseline=unpatched(place, batched=False))
    found = named(result, "flag off: creation time", "off")
    assert found.met is None and "llama-batched-bench" in found.note
    assert named(result, "flag off: prompt speed", "off").met


def test_an_unpatched_build_without_llama_bench_is_an_error(place: Path) -> None:
    unpatched(place)
    (place / "unpatched" / "llama-bench").unlink()
    with pytest.raises(UsageError, match="no llama-bench"):
        run(place, baseline=place / "unpatched")


def test_an_answer_of_llama_bench_that_is_not_understood(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SPEED", "0")
    directory = unpatched(place, batched=False)
    with pytest.raises(MeasureError, match="not understood"):
        baseline.measure(place / "bin", directory, place / "m.gguf", 1, 1)


def test_measure_errors_have_an_exit_code() -> None:
    assert issubclass(MeasureError, KvtoolError) and MeasureError.exit_code == 8
