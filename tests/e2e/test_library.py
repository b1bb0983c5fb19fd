"""What a program meets that links libllama: with upstream's header, and with calls in an order of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.worktree.status import read_applied
from tests.e2e import encoder
from tests.e2e.adapter import adapter
from tests.e2e.conftest import SANITIZED, Real

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="compiled with cc and c++"),
    pytest.mark.skipif(SANITIZED, reason="a program without the sanitizer cannot load a library with it"),
]


def compiled(real: Real, source: str, out: Path, *headers: Path) -> Path:
    """A program of this folder, linked to the build."""
    compiler = shutil.which("cc" if source.endswith(".c") else "c++")
    assert compiler is not None
    program = out / Path(source).stem
    places = [f"-I{place}" for place in (*headers, real.tree / "include", real.tree / "ggml" / "include")]
    link = [f"-L{real.bin}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{real.bin}"]
    subprocess.run([compiler, *places, "-o", program, HERE / source, *link], check=True)
    return program


def said(*argv: str | Path, **env: str) -> tuple[int, str]:
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | env)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("flag", ["0", "1"])
def test_a_program_that_was_compiled_for_upstream(real: Real, tmp_path: Path, flag: str) -> None:
    """The parameters are of upstream's size, so that bindings go on with another library."""
    applied = read_applied(real.tree)
    assert applied is not None
    show = ["git", "-C", str(real.tree), "show", f"{applied.base}:include/llama.h"]
    (tmp_path / "llama.h").write_bytes(subprocess.run(show, capture_output=True, check=True).stdout)
    program = compiled(real, "upstream.c", tmp_path, tmp_path)
    assert said(program, real.toys / "llama-dense.gguf", LLAMA_KV_DYNAMIC=flag) == (0, "0 0")


@pytest.mark.parametrize("what", ["types", "state", "budget"])
def test_adapters_that_no_batch_has_seen(real: Real, tmp_path: Path, what: str) -> None:
    """With them graphs are larger than what is reserved: it ended the process."""
    model = real.toys / "llama-dense.gguf"
    lora = adapter(model, tmp_path / "lora.gguf", "blk.")
    assert said(compiled(real, "adapters.c", tmp_path), model, lora, what) == (0, "0 0")


@pytest.mark.parametrize("storage", ["inplace", "copy"])
def test_the_heap_is_full_when_cells_are_freed(real: Real, tmp_path: Path, storage: str) -> None:
    """By copy, caches give back together, as their graphs need one size, or none of them does."""
    model = real.toys / "minimax-m3-moe.gguf"
    code, failed = said(compiled(real, "heap.cpp", tmp_path), model, LLAMA_KV_DYNAMIC_STORAGE=storage)
    assert code == 0
    assert int(failed) > 5


@pytest.mark.parametrize(
    ("toy", "what"), [("gemma3-dense", "shift"), ("deepseek4-moe", "rows"), ("llama-dense", "heap")]
)
def test_copies_that_wait_for_memory(real: Real, tmp_path: Path, toy: str, what: str) -> None:
    """What waits behind them, and what fails on the heap while they are tried, is not lost."""
    code, failed = said(compiled(real, "late_copies.cpp", tmp_path), real.toys / f"{toy}.gguf", what)
    assert code == 0
    assert what != "heap" or int(failed) > 5


@pytest.mark.parametrize("toy", ["qwen4exp-moe", "deepseek32-moe", "minimax-m3-moe", "deepseek4-moe"])
def test_copies_of_which_a_part_waits_for_memory(real: Real, tmp_path: Path, toy: str) -> None:
    """Attention's finds it, say, and the indexer's does not: no batch ran any more, with as much memory as there is."""
    program = compiled(real, "late_copies.cpp", tmp_path)
    answers = (said(program, real.toys / f"{toy}.gguf", f"{n}+") for n in itertools.count(1))
    refused = list(itertools.takewhile(lambda answer: answer != (0, "0"), answers))
    assert refused == [(0, "1")] * len(refused)
    assert len(refused) >= 2


def test_cells_that_become_quantized(real: Real, tmp_path: Path) -> None:
    """A state on the device had a part of their rows."""
    assert said(compiled(real, "quantized.cpp", tmp_path), real.toys / "llama-dense.gguf", "device")[0] == 0


def test_a_decoder_without_flash_attention(real: Real, tmp_path: Path) -> None:
    """T5 has none over its cells, though the context says so: a quantized V was written beyond its buffer."""
    assert said(compiled(real, "quantized.cpp", tmp_path), encoder.t5(real.work), "decoder")[0] == 0


def test_the_heap_is_full_in_a_change_of_types(real: Real, tmp_path: Path) -> None:
    """Graphs rotate by matrices that are made for it: without memory for one the next batch ended the process."""
    code, failed = said(compiled(real, "types_heap.cpp", tmp_path), real.toys / "gemma3-dense.gguf")
    assert code == 0
    assert int(failed) > 2


def test_the_heap_is_full_from_some_point_of_a_change_of_types_on(real: Real, tmp_path: Path) -> None:
    """Also on the way back: cells said that they had types of which they had no data."""
    code, failed = said(compiled(real, "types_heap.cpp", tmp_path), real.toys / "gemma3-dense.gguf", "rest")
    assert code == 0
    assert int(failed) > 20


def test_a_budget_that_nothing_fits_costs_no_precision(real: Real, tmp_path: Path) -> None:
    assert said(compiled(real, "types_heap.cpp", tmp_path), real.toys / "llama-dense.gguf", "rungs")[0] == 0


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("toy", ["llama-dense", "gemma3-dense", "qwen35-dense", "deepseek4-moe"])
def test_a_state_that_ends_too_early_leaves_nothing(real: Real, tmp_path: Path, toy: str, storage: str) -> None:
    program = compiled(real, "cut_states.cpp", tmp_path)
    assert said(program, real.toys / f"{toy}.gguf", LLAMA_KV_DYNAMIC_STORAGE=storage)[0] == 0
