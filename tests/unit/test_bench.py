"""Test kvtool bench with an imitated kv-bench: figures and targets, tables, files, plots and failures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvtool.bench import runs
from kvtool.bench.report import Bar
from kvtool.bench.runs import Benched
from kvtool.commands import bench
from kvtool.console import Console
from kvtool.errors import DiskError, MeasureError, MissingToolError, UsageError
from kvtool.locks import try_lock_dir
from kvtool.verify import models
from tests import fakes
from tests.unit.benches import project, run_bench


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    fakes.program(bin_dir / "kv-bench", fakes.KV_BENCH)
    monkeypatch.setenv("FAKE_BENCH_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(runs, "available_memory", lambda: 2**40)
    monkeypatch.setattr(models, "cache_model", lambda geometry, work: fakes.model(work, geometry.name))
    return tmp_path


def run(place: Path, **options: object) -> Benched:
    return run_bench(place, Benched, **{"quick": True, "rounds": 2, **options})


def named(result: Benched, name: str, mode: str) -> Bar:
    return next(b for b in result.bars if (b.name, b.mode) == (name, mode))


def test_run_reports_measured_bars(place: Path) -> None:
    result = run(place)
    in_place, copy, static = "inplace", "copy", "static"
    rounds = [f"{mode} rounds" for mode in (in_place, in_place, copy, copy)]
    assert (place / "log").read_text().splitlines() == [in_place, copy, static, *rounds]
    assert named(result, "creation time / static", "in-place").value == pytest.approx(0.005)
    assert named(result, "resident after creation / static", "in-place").value == pytest.approx(24 / 8200)
    assert named(result, "growth time / commit", "in-place").value == pytest.approx(0.003 / 0.00285)
    assert named(result, "growth time / memcpy", "copy").value == pytest.approx(1.2)
    assert named(result, "peak over steady", "in-place").value == 0
    assert named(result, "peak over steady", "copy").value == 40
    assert named(result, "peak over steady", "copy").most == 32 + 512 / 16
    assert named(result, "KV resident after clear and a decode", "copy").value == 16
    assert named(result, "generate speed / static", "copy").value == pytest.approx(1 / (0.98 * 255 / 256 + 1.5 / 256))
    assert named(result, "prompt speed / static, no flash attention", "in-place").value == pytest.approx(1 / 1.005)
    assert named(result, "token with a growth / static", "in-place").value == pytest.approx(1.5)
    assert all(b.met for b in result.bars) and result.failure is None


def test_rounds_rotate_the_first_mode(place: Path) -> None:
    run(place, quick=False)
    modes = (place / "log").read_text().splitlines()[:9]
    assert [modes[i] for i in (0, 3, 6)] == ["inplace", "copy", "static"]


@pytest.mark.parametrize(
    ("fate", "name"), [("wasteful", "peak over steady, copy"), ("slow-prompt", "prompt speed / static, in-place")]
)
def test_missed_bar_fails_only_strict_run(place: Path, monkeypatch: pytest.MonkeyPatch, fate: str, name: str) -> None:
    monkeypatch.setenv("FAKE_BENCH", fate)
    assert run(place).failure is None
    failure = run(place, strict=True).failure
    assert isinstance(failure, MeasureError) and failure.exit_code == 8
    assert name in failure.why


def test_oversized_static_cache_is_skipped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "available_memory", lambda: 6 * 2**30)
    result = run(place)
    assert "8.0 GiB" in result.skipped
    assert "static" not in (place / "log").read_text()
    assert named(result, "creation time / static", "copy").met is None
    assert named(result, "growth time / commit", "in-place").value is not None
    assert named(result, "peak over steady", "copy").value is not None
    assert b">static</text>" in result.pictures()["memory.svg"], "its size is known without a run"


def test_unknown_resident_memory_skips_bars(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "no-rss")
    result = run(place)
    unknown = {"peak over steady", "resident after creation / static", "KV resident after clear and a decode"}
    assert {b.name for b in result.bars if b.met is None} == unknown


@pytest.mark.parametrize(
    ("fate", "what", "why"),
    [
        ("crash", "could not measure in-place", "exit code 134"),
        ("garbage", "could not measure", "no document"),
        ("no-context", "could not measure", "fails: the context cannot be created"),
        ("old", "is not understood", "n_shrink"),
        ("dies-late", "could not measure", "exit code 139"),
    ],
)
def test_failing_program_reports_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch, fate: str, what: str, why: str
) -> None:
    monkeypatch.setenv("FAKE_BENCH", fate)
    with pytest.raises(MeasureError) as caught:
        run(place)
    assert what in caught.value.what and why in caught.value.why and caught.value.next_step


def test_hanging_program_is_killed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BENCH", "slow")
    monkeypatch.setattr(runs, "_TIMEOUT", 0.5)
    with pytest.raises(MeasureError, match="did not finish"):
        run(place)


def test_missing_program_is_error(place: Path) -> None:
    (place / "bin" / "kv-bench").unlink()
    with pytest.raises(MeasureError, match="kv-bench is not in"):
        run(place)


@pytest.mark.parametrize(
    "options",
    [{"rounds": -1}, {"rounds": 1}, {"n_ctx": 100}, {"model": Path("no.gguf")}, {"baseline": Path("nowhere")}],
    ids=str,
)
def test_bad_options_are_refused(place: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        run(place, **options)
    assert not (place / "log").exists()


def test_depths_beyond_context_are_skipped(place: Path) -> None:
    result = run(place, n_ctx=2048)
    assert {r.depth for r in result.rows if r.moment == "depth"} == {89, 809}
    assert {s.depth for s in result.speeds} == {250, 1000}


def test_out_writes_all_files(place: Path) -> None:
    out = place / "out"
    run(place, out=out)
    wanted = {"bench.md", "bench.json", "memory.svg", "growth.svg", "speed.svg"}
    assert {f.name for f in out.iterdir()} == wanted
    for name in ("memory", "growth", "speed"):
        assert ET.parse(out / f"{name}.svg").getroot().tag.endswith("svg")
    text = (out / "bench.md").read_text("utf-8")
    assert "![memory](memory.svg)" in text and "| growth time / commit | in-place |" in text
    assert "| copy | off | generate 1 at 250 | 10.0 | 1.018 (1.018-1.018) | 1.020 (1.020-1.020) | 1.5, 2 of 4 |" in text
    doc = json.loads((out / "bench.json").read_text("utf-8"))
    assert doc["command"] == "bench" and doc["ok"] is True
    assert {"tag", "model", "machine", "n_ctx", "repeats", "rounds", "bars", "rows", "speeds", "skipped"} <= set(doc)
    assert {"name", "mode", "value", "low", "high", "bound", "met", "note"} <= set(doc["bars"][0])
    assert str(place) not in json.dumps(doc)  # the document must not contain a path of this machine


def test_speed_is_drawn_as_tokens_per_second(place: Path) -> None:
    found = run(place)
    static = runs._speed_lines(found.speeds, "generate")["static"]
    assert static[250] == pytest.approx(100), "a call of one token needs 10 ms"
    assert "Generated tokens" in found.pictures()["speed.svg"].decode()


def test_plots_are_reproducible(place: Path) -> None:
    found = run(place)
    assert found.pictures() == found.pictures()


def test_missing_matplotlib_fails_before_measuring(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingToolError, match="matplotlib is not installed") as caught:
        run(place, out=place / "out")
    assert "pip install matplotlib" in caught.value.next_step
    assert not (place / "log").exists()


def test_unwritable_directory_is_error(place: Path) -> None:
    (place / "file").write_text("")
    with pytest.raises(DiskError, match="cannot write to"):
        run(place, out=place / "file")
    assert not (place / "log").exists(), "before anything is measured"


def test_unwritten_results_are_printed(place: Path) -> None:
    (place / "out/bench.md").mkdir(parents=True)
    result = run(place, out=place / "out")
    assert isinstance(result.failure, DiskError) and result.rows
    assert result.to_json()["error"]["code"] == "disk" and "unwritten" not in result.to_json()


def test_title_names_applied_upstream(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(place).markdown(()).startswith("# kvtool bench\n")
    assert not (place / "llama.cpp").exists(), "kvtool apply would refuse it"
    monkeypatch.setattr(bench, "read_applied", lambda _tree: type("Applied", (), {"tag": "v1"}))
    assert run(place).markdown(()).startswith("# kvtool bench, llama.cpp v1\n")
    assert (place / "llama.cpp/build/bench").is_dir()


def test_second_benchmark_is_refused(place: Path) -> None:
    work = project(place).cache / "bench"
    work.mkdir(parents=True)
    with try_lock_dir(work, MeasureError, "bench is running"), pytest.raises(MeasureError, match="another kvtool"):
        run(place)


def test_console_prints_tables(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BENCH", "wasteful")
    run(place).render(Console())
    said = capsys.readouterr().out
    assert "Growth up to each depth" in said and "figures meet their target" in said and "MISSED" in said


def test_flag_off_compares_with_baseline(place: Path) -> None:
    unpatched = place / "unpatched"
    unpatched.mkdir()
    (unpatched / "libllama.so").write_bytes(b"")
    result = run(place, baseline=unpatched)
    turns = "unpatched", "unpatched", "bin", "bin"
    # with an odd seed, the other build is loaded first
    others = [f"static rounds {name} {seed}" for name in turns for seed in range(4)]
    assert (place / "log").read_text().splitlines()[-16:] == others
    speeds = {speed.mode: speed.rounds for speed in result.speeds}
    assert speeds == {"in-place": 2, "copy": 2, "off": 2, "same": 2}
    for mode, base in (("off", "unpatched"), ("same", "itself")):
        creation = named(result, f"create speed / {base}", mode)
        assert creation.met and creation.bound == "0.99 to 1.01"
        # a speed that is 2 % higher misses the target, too
        assert named(result, f"generate speed / {base}", mode).met is False
