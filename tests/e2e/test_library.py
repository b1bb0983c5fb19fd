"""Test programs that are linked with libllama: compiled with upstream's header, or with an unusual order of calls."""

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
    """Compile a program of this folder, and link it with the libraries of the build."""
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
def test_program_with_upstream_header(real: Real, tmp_path: Path, flag: str) -> None:
    """Expect parameter structs as large as upstream's, so that existing bindings work with the patched library."""
    applied = read_applied(real.tree)
    assert applied is not None
    show = ["git", "-C", str(real.tree), "show", f"{applied.base}:include/llama.h"]
    (tmp_path / "llama.h").write_bytes(subprocess.run(show, capture_output=True, check=True).stdout)
    program = compiled(real, "upstream.c", tmp_path, tmp_path)
    assert said(program, real.toys / "llama-dense.gguf", LLAMA_KV_DYNAMIC=flag) == (0, "0 0")


@pytest.mark.parametrize("what", ["types", "state", "budget"])
def test_adapters_without_a_batch(real: Real, tmp_path: Path, what: str) -> None:
    """Prevent a crash that happened before: with adapters, graphs were larger than the reserved buffers."""
    model = real.toys / "llama-dense.gguf"
    lora = adapter(model, tmp_path / "lora.gguf", "blk.")
    assert said(compiled(real, "adapters.c", tmp_path), model, lora, what) == (0, "0 0")


@pytest.mark.parametrize("storage", ["inplace", "copy"])
def test_full_heap_while_freeing_cells(real: Real, tmp_path: Path, storage: str) -> None:
    """Let allocations fail while cells are removed. Either all caches of the context must free memory, or none.

    With growth by copy, the graphs need caches of equal size.
    """
    model = real.toys / "minimax-m3-moe.gguf"
    code, failed = said(compiled(real, "heap.cpp", tmp_path), model, LLAMA_KV_DYNAMIC_STORAGE=storage)
    assert code == 0
    assert int(failed) > 5


@pytest.mark.parametrize(
    ("toy", "what"), [("gemma3-dense", "shift"), ("deepseek4-moe", "rows"), ("llama-dense", "heap")]
)
def test_pending_copies_survive_failures(real: Real, tmp_path: Path, toy: str, what: str) -> None:
    """Expect that no pending copy is lost, whether other operations follow or an allocation on the heap fails."""
    code, failed = said(compiled(real, "late_copies.cpp", tmp_path), real.toys / f"{toy}.gguf", what)
    assert code == 0
    assert what != "heap" or int(failed) > 5


@pytest.mark.parametrize("toy", ["qwen4exp-moe", "deepseek32-moe", "minimax-m3-moe", "deepseek4-moe"])
def test_partly_pending_copies(real: Real, tmp_path: Path, toy: str) -> None:
    """Let a copy of a sequence find memory in the attention's cache but not in the indexer's cache.

    Before the patch indexer-copies, all later batches failed in this case.
    """
    program = compiled(real, "late_copies.cpp", tmp_path)
    answers = (said(program, real.toys / f"{toy}.gguf", f"{n}+") for n in itertools.count(1))
    refused = list(itertools.takewhile(lambda answer: answer != (0, "0"), answers))
    assert refused == [(0, "1")] * len(refused)
    assert len(refused) >= 2


def test_device_state_after_quantization(real: Real, tmp_path: Path) -> None:
    """Prevent a bug that happened before: a state that was saved on a device had only a part of the quantized rows."""
    assert said(compiled(real, "quantized.cpp", tmp_path), real.toys / "llama-dense.gguf", "device")[0] == 0


def test_decoder_without_flash_attention(real: Real, tmp_path: Path) -> None:
    """Prevent a bug that happened before: a quantized V was written beyond the end of its buffer.

    T5 has no flash attention over its cells, although the context reports that it has.
    """
    assert said(compiled(real, "quantized.cpp", tmp_path), encoder.t5(real.work), "decoder")[0] == 0


def test_full_heap_in_type_change(real: Real, tmp_path: Path) -> None:
    """Prevent a crash that happened before.

    After a change of types, graphs need matrices for the rotation. If there was no memory for such a matrix, the next
    batch ended the process.
    """
    code, failed = said(compiled(real, "types_heap.cpp", tmp_path), real.toys / "gemma3-dense.gguf")
    assert code == 0
    assert int(failed) > 2


def test_full_heap_until_end_of_type_change(real: Real, tmp_path: Path) -> None:
    """Prevent a bug that happened before when a change of types was undone.

    The cache reported other types than the types of the data in its cells.
    """
    code, failed = said(compiled(real, "types_heap.cpp", tmp_path), real.toys / "gemma3-dense.gguf", "rest")
    assert code == 0
    assert int(failed) > 20


def test_tiny_budget_keeps_precision(real: Real, tmp_path: Path) -> None:
    assert said(compiled(real, "types_heap.cpp", tmp_path), real.toys / "llama-dense.gguf", "rungs")[0] == 0


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("toy", ["llama-dense", "gemma3-dense", "qwen35-dense", "deepseek4-moe"])
def test_truncated_state_leaves_nothing(real: Real, tmp_path: Path, toy: str, storage: str) -> None:
    program = compiled(real, "cut_states.cpp", tmp_path)
    assert said(program, real.toys / f"{toy}.gguf", LLAMA_KV_DYNAMIC_STORAGE=storage)[0] == 0
