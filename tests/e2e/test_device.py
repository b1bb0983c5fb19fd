"""Test the cache on a simulated GPU (kv-check --fake-device): growth in place in pages, and growth by copy.

A program that accesses memory that is not mapped ends with SIGSEGV. The memory after the last row of a quantized tensor
is not mapped either.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.e2e.conftest import Real
from tests.e2e.traps.device import ONLY_F16, PAGES_OF_4K, SMALL

TOYS = ("llama-dense", "qwen35-dense", "gemma3-dense", "deepseek2-moe", "minimax-m3-moe")
# these memory classes have only one model each, so only one variant is tested
SLOW = ("deepseek32-moe", "deepseek4-moe")
THERE = ("--fake-device", "1024,4", "--device", "FAKE0")  # pages of 4 KiB, so that a small test model has many pages
POOL = ("--seqs", "8", "--unified")
CHECKS = "prompt,uneven,copy,shift,state-self,clear,shrink"


def kv_check(real: Real, toy: str, checks: str, *args: str) -> dict[str, Any]:
    program, model = str(real.bin / "kv-check"), str(real.toys / f"{toy}.gguf")
    argv = [program, "-m", model, "--quick", "--checks", checks, "--verbose", *args]
    done = subprocess.run(argv, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    answer["log"] = done.stderr
    return answer


def same(answer: dict[str, Any], how: str) -> None:
    assert answer["status"] == "same", answer["reason"]
    assert answer["grown"] and f"grows {how}" in answer["log"]


@pytest.mark.parametrize(
    "args",
    [(), ("--seqs", "4"), ("-ctk", "q8_0", "-ctv", "q8_0"), ("-ngl", "1")],
    ids=["one-stream", "four-streams", "quantized", "one-layer-on-device"],
)
@pytest.mark.parametrize("toy", TOYS)
def test_in_place_growth_is_equal(real: Real, toy: str, args: tuple[str, ...]) -> None:
    same(kv_check(real, toy, CHECKS, *PAGES_OF_4K, *args), "in place")


@pytest.mark.parametrize("toy", SLOW)
def test_in_place_growth_of_slow_classes(real: Real, toy: str) -> None:
    same(kv_check(real, toy, "prompt,uneven,state-self,shrink", *PAGES_OF_4K, "--seqs", "2"), "in place")


@pytest.mark.parametrize(
    "args",
    [THERE, ("-fa", "off", *PAGES_OF_4K), ("--storage", "inplace", "--fake-device", "1024,0", "--device", "FAKE0")],
    ids=["default", "transposed-V", "no-pages"],
)
def test_copy_growth_is_equal(real: Real, args: tuple[str, ...]) -> None:
    same(kv_check(real, "llama-dense", CHECKS, *args), "by copy")


@pytest.mark.parametrize("toy", ["llama-dense", "gemma3-dense", "deepseek2-moe"])
@pytest.mark.parametrize("seqs", ["1", "4"])
def test_type_change_in_place(real: Real, toy: str, seqs: str) -> None:
    """Change the types of cells on a device.

    In a graph for a device, some inputs are copies. The rotation of K and V must be recognized in these copies, too.
    """
    same(kv_check(real, toy, "retype-bits,retype-generate,retype-grow", *PAGES_OF_4K, "--seqs", seqs), "in place")


@pytest.mark.parametrize("storage", ["inplace", "copy"])
@pytest.mark.parametrize("toy", ["llama-dense", "qwen35-dense", "deepseek2-moe"])
def test_unwritable_type_is_refused(real: Real, toy: str, storage: str) -> None:
    args = ("--fake-device", "1024,4,f16", "--device", "FAKE0", "--storage", storage)
    assert [c["status"] for c in kv_check(real, toy, "no-kernel", *args)["checks"]] == ["same"]


@pytest.mark.parametrize("args", [(), ("--seqs", "4")], ids=["one-stream", "four-streams"])
@pytest.mark.parametrize("toy", ["llama-dense", "deepseek2-moe"])
def test_type_change_by_copy(real: Real, toy: str, args: tuple[str, ...]) -> None:
    """Test MLA with quantized rows, which can begin at any offset.

    The device requires aligned copies, as Vulkan does.
    """
    checks = "retype-bits,retype-generate,retype-grow,retype-restore"
    same(kv_check(real, toy, checks, *PAGES_OF_4K, "--storage", "copy", "-fa", "on", *args), "by copy")


@pytest.mark.parametrize("which", ["1", "2", "5", "1+", "4+"])
def test_failing_map_loses_nothing(real: Real, which: str) -> None:
    same(kv_check(real, "llama-dense", "no-memory", *PAGES_OF_4K, "--fail", which, "--seqs", "2"), "in place")


def test_cache_on_two_devices(real: Real) -> None:
    two = ("--storage", "inplace", "--fake-device", "64,4", "--fake-device", "64,4", "--device", "FAKE0,FAKE1")
    same(kv_check(real, "llama-dense", CHECKS, *two, "--seqs", "2"), "in place")


def test_second_device_without_room(real: Real) -> None:
    """Let the second device fail to commit its first page, after the first device has started in place.

    A page is as large as the whole second device, and a part of the device is in use. So the cache must start again,
    with growth by copy, also on the first device.
    """
    two = ("--storage", "inplace", "--fake-device", "32,4", "--fake-device", "96,98304", "--device", "FAKE0,FAKE1")
    answer = kv_check(real, "llama-dense", CHECKS, *two, "--seqs", "2")
    same(answer, "by copy")
    assert "FAKE0 KV memory reserved" in answer["log"]


@pytest.mark.parametrize("toy", ["llama-dense", "gemma3-dense", "qwen4exp-moe"])
def test_attention_on_other_device(real: Real, toy: str) -> None:
    """Use quantized cells, for which attention runs on another device.

    ggml then copies the rows of all streams to that device, together with the pages between two streams. In place, some
    of these pages are not mapped, and nothing may access them. So a cache with several streams must grow by copy.
    """
    checks = "prompt,uneven,copy,state-self" if toy == "qwen4exp-moe" else CHECKS
    quantized = (*ONLY_F16, "-ctk", "q8_0", "-ctv", "q8_0")
    same(kv_check(real, toy, checks, *quantized), "in place")
    same(kv_check(real, toy, checks, *ONLY_F16, "--seqs", "4"), "in place")
    answer = kv_check(real, toy, checks, *quantized, "--seqs", "4")
    same(answer, "by copy")
    assert "attention does not run where the cells are" in answer["log"]


@pytest.mark.parametrize("seqs", ["1", "2"])
def test_unsupported_flash_attention(real: Real, seqs: str) -> None:
    """Use a device that has no flash attention for K in q8_0.

    Attention then multiplies matrices, and V is stored in rows.
    """
    args = ("--storage", "inplace", "--fake-device", "1024,4,f16", "--device", "FAKE0", "-fa", "auto", "-ctk", "q8_0")
    answer = kv_check(real, "llama-dense", CHECKS, *args, "--seqs", seqs)
    same(answer, "in place")
    assert "Flash Attention not supported, set to disabled" in answer["log"]


def test_indexer_on_other_device(real: Real) -> None:
    """Use a model whose indexer reads all of the storage on another device, even rows that are not mapped.

    Such a cache must grow by copy.
    """
    answer = kv_check(real, "qwen4exp-moe", "prompt,uneven,state-self", *PAGES_OF_4K, "-fa", "on", "-ctk", "iq4_nl")
    assert answer["status"] == "same" and answer["grown"], answer["reason"]
    assert "attention does not run where the cells are" in answer["log"] and "grows by copy" in answer["log"]


def test_type_without_attention_is_refused(real: Real) -> None:
    for storage in ("inplace", "copy"):
        answer = kv_check(real, "llama-dense", "retype-bits", *ONLY_F16, "--storage", storage, "--retype", "f16:q8_0")
        assert "the device of a layer cannot compute attention over this type" in answer["reason"]


@pytest.mark.parametrize(
    ("toy", "args"),
    [
        *(
            pytest.param(toy, (*SMALL, *POOL), id=f"{toy}-pages")
            for toy in ("llama-dense", "qwen35-dense", "deepseek2-moe")
        ),
        pytest.param("llama-dense", ("--storage", "copy", *POOL), id="llama-dense-copy"),
        pytest.param("llama-dense", (*SMALL, "--seqs", "3"), id="llama-dense-streams"),
        pytest.param("gemma3-dense", (*SMALL, "--seqs", "3"), id="gemma3-dense-streams"),
    ],
)
def test_random_operations_with_little_memory(real: Real, toy: str, args: tuple[str, ...]) -> None:
    answer = kv_check(real, toy, "random", *args)
    assert answer["status"] == "same", answer["reason"]
    assert answer["checks"][0]["measured"]["refused"] > 0
