"""Test how kvtool verify judges the output of kv-check, and how it checks that enough models grew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtool.result import CheckOutcome
from kvtool.verify import checks, plan
from kvtool.verify.checks import Check, Finding

CHECK = Check("kv-check/llama-dense/fa-on", "kv-check", Path("llama-dense.gguf"))
PLAIN = "llama_kv_cache: size =    1.00 MiB (  2048 cells"


def judged(status: str, code: int, log: str = PLAIN, **more: object) -> Finding:
    answer = json.dumps({"status": status, "reason": "because", **more})
    return checks.judge_kv_check(CHECK, code, f"chatter\n{answer}\n\n", log)


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        ("same", 0, CheckOutcome.PASSED),
        ("same-not-grown", 0, CheckOutcome.PASSED),
        ("static-fails", 0, CheckOutcome.SKIPPED),
        ("no-cache", 0, CheckOutcome.SKIPPED),
        ("differs", 1, CheckOutcome.FAILED),
        ("dynamic-fails", 1, CheckOutcome.FAILED),
        ("load-fails", 2, CheckOutcome.FAILED),
    ],
)
def test_status_maps_to_outcome(status: str, code: int, outcome: CheckOutcome) -> None:
    found = judged(status, code)
    assert (found.status, found.outcome, found.group) == (status, outcome, "plain")


@pytest.mark.parametrize(("status", "code"), [("same", 1), ("same", 2), ("differs", 0), ("static-fails", 1)])
def test_contradicting_exit_code_fails(status: str, code: int) -> None:
    found = judged(status, code)
    assert (found.status, found.outcome) == ("garbage", CheckOutcome.FAILED)
    assert f"printed {status} but ended with exit code {code}" in found.reason


@pytest.mark.parametrize(
    "stdout", ["", "\n\n", "no json", "[1, 2]", '{"status": "splendid"}', '{"reason": "x"}', '{"st']
)
def test_unparsable_answer_is_garbage(stdout: str) -> None:
    found = checks.judge_kv_check(CHECK, 0, stdout, "the log's end")
    assert (found.status, found.outcome) == ("garbage", CheckOutcome.FAILED)
    assert found.details["log"] == "the log's end"


@pytest.mark.parametrize(
    ("asked", "grew", "outcome"),
    [
        ("inplace", "in place", CheckOutcome.PASSED),
        ("copy", "by copy", CheckOutcome.PASSED),
        ("inplace", "by copy", CheckOutcome.FAILED),
        ("inplace", "by copy, in place", CheckOutcome.FAILED),
    ],
)
def test_wrong_growth_storage_fails(asked: str, grew: str, outcome: CheckOutcome) -> None:
    answer = json.dumps({"status": "same", "grown": True, "storage": grew})
    found = checks.judge_kv_check(replace(CHECK, args=("--quick", "--storage", asked)), 0, answer, PLAIN)
    assert found.outcome is outcome


@pytest.mark.parametrize(("code", "words"), [(-11, "signal 11"), (134, "exit code 134"), (3, "exit code 3")])
def test_kv_check_crash_fails(code: int, words: str) -> None:
    found = checks.judge_kv_check(CHECK, code, "", "")
    assert (found.status, found.outcome) == ("crash", CheckOutcome.FAILED)
    assert words in found.reason


def test_difference_names_its_location() -> None:
    diff = {"decode": 2, "row": 1, "index": 7, "static": 0.5, "dynamic": 0.25}
    found = judged(
        "differs",
        1,
        checks=[{"name": "prompt", "status": "same"}, {"name": "shift", "status": "differs", "first_diff": diff}],
    )
    assert found.reason == "shift: decode 2, row 1, value 7: static 0.5, dynamic 0.25"
    assert found.details["first_diff"] == {"shift": diff}


def test_dynamic_failure_names_check() -> None:
    found = judged("dynamic-fails", 1, checks=[{"name": "copy", "status": "dynamic-fails", "reason": "SIGSEGV"}])
    assert found.reason == "copy: SIGSEGV"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (PLAIN, "plain"),
        ("llama_kv_cache_iswa: creating non-SWA\n" + PLAIN, "iSWA"),
        ("llama_memory_recurrent: size\n" + PLAIN, "hybrid"),
        ("llama_memory_recurrent: size\nllama_kv_cache_iswa: creating\n" + PLAIN, "hybrid-iSWA"),
        ("llama_memory_recurrent: size\noperator(): creating indexer KV cache, size\n" + PLAIN, "hybrid-idx"),
        ("llama_memory_recurrent: size", "recurrent"),
        ("llama_kv_cache_dsa: creating main\nllama_kv_cache_dsa: creating indexer KV cache\n" + PLAIN, "DSA"),
        ("llama_kv_cache_dsa_iswa: creating DSA\nllama_kv_cache_dsa: creating main\n" + PLAIN, "DSA-iSWA"),
        ("llama_kv_cache_dsv4: creating DSV4\nllama_kv_cache_iswa: creating\n" + PLAIN, "DSV4"),
        ("llama_kv_cache_msa: creating main\n" + PLAIN, "MSA"),
        ("", ""),
    ],
)
def test_memory_class_from_log(log: str, expected: str) -> None:
    assert checks.memory_class(log) == expected


EMPTY = (
    "dyn_init: dynamic KV cache: start = 256 cells\nllama_kv_cache: size =    0.00 MiB (   256 cells,   0 layers, 1/1"
)
FULL = EMPTY.replace("0 layers", "2 layers")


@pytest.mark.parametrize(
    ("log", "grown"),
    [(FULL, True), (EMPTY, False), (f"{EMPTY}\n{FULL}", True), (f"{EMPTY}\n{EMPTY}", False), (PLAIN, True)],
)
def test_growth_without_layers_is_ignored(log: str, grown: bool) -> None:
    found = judged("same", 0, log, grown=True)
    assert (found.grown, found.status) == (grown, "same" if grown else "same-not-grown")
    assert found.outcome is CheckOutcome.PASSED
    assert ("no layers" in found.reason) == (not grown)


def runs(grown: int, total: int) -> list[Finding]:
    return [
        Finding(f"kv-check/m{i}/fa-on", "kv-check", "plain", CheckOutcome.PASSED, "same", grown=i < grown)
        for i in range(total)
    ]


def test_too_few_grown_models_fail() -> None:
    expected = checks.EXPECTED_GROWN["v0.5.0"]
    assert expected >= 95
    assert checks.judge_grown(runs(expected, 127), "v0.5.0").outcome is CheckOutcome.PASSED
    found = checks.judge_grown(runs(expected - 1, 127), "v0.5.0")
    assert (found.outcome, found.status) == (CheckOutcome.FAILED, "not-grown")
    assert f"only {expected - 1} of 127" in found.reason


def test_unmeasured_upstream_expects_share() -> None:
    assert checks.expected_grown("b12345", 100) == 75
    assert checks.expected_grown("v0.5.0", 10) == 10  # never more than the number of models


def test_grown_counts_flash_attention_runs() -> None:
    off = [Finding("kv-check/m/fa-off", "kv-check", "plain", CheckOutcome.PASSED, "same", grown=True)]
    assert checks.judge_grown([*runs(1, 2), *off], "other").details["grown"] == 1


@pytest.mark.parametrize(
    ("tag", "label", "grown", "fails"),
    [
        ("v0.5.0", "", 2, False),
        ("v0.5.0", "", 1, True),
        ("v0.5.0", "rpc", 1, False),  # the number was measured only in host memory
        ("b12345", "", 1, False),
        ("b12345", "rpc", 0, True),
    ],
)
def test_quick_needs_grown_models(tag: str, label: str, grown: int, fails: bool) -> None:
    again = Finding("kv-check/m0/fa-off", "kv-check", "plain", CheckOutcome.PASSED, "same-not-grown")
    found = checks.judge_quick_grown([*runs(grown, 2), again], tag, label)
    assert [f.status for f in found] == ["not-grown"] * fails
    skipped = [replace(again, outcome=CheckOutcome.SKIPPED, status="static-fails")]
    assert [f.reason for f in checks.judge_quick_grown(skipped, tag, label)] == ["no model grew"]


MEMORY = Check("memory/x/131072", "memory", Path("x"))
GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("static", "dynamic", "status"),
    [
        (8 * GIB, 20 * MIB, "same"),
        (8 * GIB, 65 * MIB, "too-big"),
        (None, 20 * MIB, "same"),
        (None, 8 * GIB, "too-big"),
        (1 * GIB, 20 * MIB, "garbage"),  # less than the cache itself, so the measurement is wrong
    ],
)
def test_memory_is_judged_by_limits(static: int | None, dynamic: int, status: str) -> None:
    found = checks.judge_memory(MEMORY, static, dynamic, 8 * GIB, "too little memory")
    assert found.status == status
    assert ("too little memory" in found.reason) == (static is None)
    assert found.details["dynamic_bytes"] == dynamic


def test_toy_checks_name_the_variant() -> None:
    planned = checks.toy_checks([Path("a.gguf"), Path("b.gguf")], ("-ctk", "q8_0"), flash=("on",))
    assert [c.id for c in planned] == ["kv-check/a/fa-on/ctk/q8_0", "kv-check/b/fa-on/ctk/q8_0"]
    assert planned[0].args == ("-fa", "on", "-ctk", "q8_0")


def test_missing_toy_is_skipped() -> None:
    toys = [Path("gemma3-dense.gguf"), Path("llama-dense.gguf"), Path("zebra.gguf")]
    assert [t.stem for t in checks.named_toys(toys, checks.CLASS_TOYS)] == ["llama-dense", "gemma3-dense"]


def test_copy_checks_fill_compressed_toys() -> None:
    toys = [Path("llama-dense.gguf"), Path(f"{checks.COMPRESSED}.gguf")]
    in_place, by_copy = (plan.kv_checks(toys, quick=False, chosen=False, by_copy=how) for how in (False, True))
    assert [check.id for check in in_place] == [check.id for check in by_copy]
    assert not any("--fill" in check.args for check in in_place)
    assert [check.id for check in by_copy if "--fill" in check.args] == [f"kv-check/{checks.COMPRESSED}/fa-on"]
