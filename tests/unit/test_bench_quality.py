"""Test kvtool bench --quality with an imitated llama-perplexity: runs, budgets, continuation and errors."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from kvtool.bench import quality
from kvtool.bench.quality import QualityResult, changes_in
from kvtool.errors import DiskError, MeasureError, UsageError
from tests import fakes
from tests.unit.benches import run_bench

# A cell of f16 has 10 KiB. The cache grows by 256 cells. --kv-budget also counts 2 MiB of compute buffers.
PERPLEXITY = """
import os, sys
args = sys.argv[1:]
def arg(name, default=""): return args[args.index(name) + 1] if name in args else default
if "--kl-divergence" not in args and arg("--chunks") != "1" or "--kl-divergence" in args:
    with open(os.environ["FAKE_LOG"], "a") as log:
        print(arg("-ctk"), arg("-ctv"), arg("-c"), arg("--kv-auto-quant", "-"), arg("--kv-budget", "0"), file=log)
if os.environ.get("FAKE_FATE") == arg("-ctk"):
    sys.exit(3)
print("alloc: CPU KV memory reserved =    10.00 MiB, committed = 2.50 MiB", file=sys.stderr)
budget, types = int(arg("--kv-budget", "0")), arg("--kv-auto-quant", "f16").split(",")
sizes = {"f16": 10.0, "q8_0": 5.3, "q4_0": 2.8}
for chunk in range(int(arg("--chunks"))):
    if chunk > 0 and len(types) > 1:
        print("requantizing KV cache: back to the first type (1.00 -> 2.00 MiB) in 4 ms", file=sys.stderr)
    left, cells = list(types), 256
    while cells < int(arg("-c")):
        while budget and (cells + 256) * sizes[left[0]] / 1024 + 2 > budget:
            if len(left) == 1:
                sys.exit(1)
            old, new = (sizes[each] * cells / 1024 for each in left[:2])
            print(f"requantizing KV cache: {left.pop(0)} ({old:.2f} -> {new:.2f} MiB) in 4 ms", file=sys.stderr)
        print(f"grow: resizing KV cache from {cells} to {cells + 256} cells", file=sys.stderr)
        cells += 256
if "--kl-divergence" in args:
    kl = {"f16": 0.0001, "q8_0": 0.002, "q4_0": 0.03}[max(types[-1], arg("-ctk"), key=lambda t: -sizes[t])]
    print(f"Mean PPL(Q)                   :  11.500000 ±   0.100000")
    print(f"Mean ln(PPL(Q)/PPL(base))     :  {kl / 2:.6f} ±   0.000100")
    print(f"Mean    KLD:   {kl:.6f} ±   0.000050")
    print(f"Same top p: 98.500 ± 0.100 %")
else:
    if "--kl-divergence-base" in args:
        open(arg("--kl-divergence-base"), "wb").write(b"x" * 1000)
    print("Final estimate: PPL = %s +/- 0.10000" % (14.0 if arg("-c") == "512" else 11.4))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    fakes.program(tmp_path / "bin" / "llama-perplexity", PERPLEXITY)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path


def run(place: Path, **options: object) -> QualityResult:
    return run_bench(place, QualityResult, **{"quality": True, "model": fakes.model(place, "small"), **options})


def test_every_kind_is_measured(place: Path) -> None:
    found = run(place)
    assert [loss.kind for loss in found.losses] == ["f16, static", *(kind.name for kind in quality.KINDS)]
    by_kind = {loss.kind: loss for loss in found.losses}
    assert by_kind["q4_0 from the start"].divergence == (0.03, 0.00005)
    assert by_kind["q8_0 from the start"].same_top == (98.5, 0.1)
    assert by_kind["context shift"].log_ratio[0] == pytest.approx(0.2054, abs=1e-4)
    assert not by_kind["context shift"].divergence
    assert all(bar.met for bar in found.bars) and len(found.bars) == 2
    assert "Divergence from f16" in found.pictures()["quality.svg"].decode()
    assert "`llama-perplexity -c 1024" in found.markdown(())


def test_budgets_make_types_change_at_the_wanted_place(place: Path) -> None:
    by_kind = {loss.kind: loss for loss in run(place).losses}
    assert by_kind["f16 to q8_0 in the middle"].changes == (512,)
    assert by_kind["f16 to q8_0 near the end"].changes == (768,)
    assert by_kind["ladder: f16, q8_0, q4_0"].changes == (256, 768)
    assert by_kind["f16, dynamic"].changes == ()


def test_finished_runs_are_kept_after_a_failure(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FATE", "q4_0")
    with pytest.raises(MeasureError, match="exit code 3"):
        run(place)
    monkeypatch.delenv("FAKE_FATE")
    (place / "log").unlink()
    assert len(run(place).losses) == 1 + len(quality.KINDS)
    runs = (place / "log").read_text().splitlines()
    assert "q8_0 q8_0 1024 - 0" not in runs, "it was measured before the failure"
    assert "f16 f16 1024 - 0" not in runs, "its probabilities were stored before the failure"


def test_full_disk_is_found_before_the_long_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 50_000))
    with pytest.raises(DiskError, match="the probabilities need"):
        run(place)
    assert not (place / "log").exists()


def test_missing_model_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="needs a trained model"):
        run(place, model=None)


def test_changes_end_with_the_first_chunk() -> None:
    grow = "grow: resizing KV cache from 256 to {} cells"
    change = "requantizing KV cache: K f16 -> q8_0 ({} MiB) in 4 ms"
    smaller, larger = change.format("11.25 -> 6.09"), change.format("3.05 -> 5.62")
    log = [grow.format(512), smaller, grow.format(768), grow.format(512), smaller]
    assert changes_in("\n".join(log)) == (512,)
    log = [grow.format(512), smaller, grow.format(768), smaller, grow.format(1024), larger, grow.format(512), smaller]
    assert changes_in("\n".join(log)) == (512, 768)
    assert changes_in("\n".join([smaller, *log])) == (256, 512, 768)
