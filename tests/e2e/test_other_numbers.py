"""Test models with other parameters: indexers that select cells, windows longer than a batch, several threads.

By default, the indexers of upstream's test models select all cells, so that their keys do not matter. The windows of
these models have 32 tokens, so the cache of a window never grows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e import broken
from tests.e2e.conftest import Real
from tests.e2e.test_device import kv_check

CELLS = "prompt,generate,uneven,copy,state-self,clear,shrink"


def same(real: Real, toy: str, checks: str, *args: str) -> None:
    answer = kv_check(real, toy, checks, *args)
    assert answer["status"] == "same", answer["reason"]
    assert answer["grown"]
    assert {"in place": "inplace", "by copy": "copy"}[answer["storage"]] in args


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("toy", ["deepseek32", "dots3note", "qwen4exp", "glm-dsa", "minimax-m3"])
def test_selecting_indexers_are_equal(real: Real, toy: str, storage: str) -> None:
    few = ("--override", f"{toy}.attention.indexer.top_k=16")
    # glm-dsa has the same cache as deepseek32, but another graph
    checks = "prompt,generate,state-self" if toy == "glm-dsa" else CELLS
    same(real, f"{toy}-moe", checks, *few, "--seqs", "2", "--storage", storage)


# Break the library: do not copy the keys of an indexer when the cache grows.
FORGOTTEN = broken.Edit(
    "src/llama-kv-storage-copy.cpp",
    "llama_kv_copy_from(to.ctx.get(), l.k, to.k, false, n_used);",
    "if (to.k->ne[0] != 128) { llama_kv_copy_from(to.ctx.get(), l.k, to.k, false, n_used); }",
)


@pytest.mark.skipif(sys.platform != "linux", reason="the broken library is linked by Linux's rules")
def test_lost_indexer_keys_are_noticed(real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken.build(real, [(FORGOTTEN,)], tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{real.bin}")
    monkeypatch.setenv(broken.VARIABLE, "1")
    few = ("--override", "deepseek32.attention.indexer.top_k=16", "--storage", "copy")
    assert kv_check(real, "deepseek32-moe", "prompt", *few[2:])["status"] == "same"
    assert kv_check(real, "deepseek32-moe", "prompt", *few)["status"] == "differs"


# Only the context with the small budget refuses a batch. The number of its tokens is no multiple of the sequences, so
# the next batch of the static context would begin with another sequence.
@pytest.mark.parametrize("storage", ["inplace", "copy"])
def test_refused_batch_keeps_order_of_sequences(real: Real, storage: str) -> None:
    same(real, "llama-dense", "retype-budget", "--seqs", "3", "--unified", "--storage", storage)


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("seqs", ["1", "4"])
def test_growing_windows_are_equal(real: Real, seqs: str, storage: str) -> None:
    wide = ("--override", "gemma3.attention.sliding_window=600", "-ub", "512", "-n", "1100")
    same(real, "gemma3-dense", f"{CELLS},shift,keep", *wide, "--seqs", seqs, "--storage", storage)


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("toy", ["llama-dense", "deepseek2-moe"])
def test_several_threads_are_equal(real: Real, toy: str, storage: str) -> None:
    same(real, toy, "generate,state-self,shrink", "-t", "4", "-n", "1100", "--storage", storage)
