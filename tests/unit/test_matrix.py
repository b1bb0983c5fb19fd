"""Test the plan and the table of `kvtool verify --matrix`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.result import CheckOutcome
from kvtool.verify import matrix, report
from kvtool.verify.checks import COMPRESSED, Check, Finding

TOY = Path("llama-dense.gguf")


def found(
    check: Check, outcome: CheckOutcome = CheckOutcome.PASSED, group: str = "plain", *, grown: bool = True
) -> Finding:
    return Finding(check.id, "kv-check", group, outcome, "same", grown=grown)


def variants(checks: list[Check]) -> set[tuple[str, ...]]:
    return {tuple(check.id.split("/")[3:]) for check in checks}


def test_plan_combines_caches_sequences_storages() -> None:
    planned = [c for c in matrix.in_memory([Path("a.gguf")]) if not c.id.endswith("/pair")]
    caches = {"f16-fa-on", "q8_0-fa-on", "q4_0-fa-on", "f16-fa-off"}
    sequences = ("1", "4", "4-unified")
    expected = {(c, s, "inplace") for c in caches for s in sequences}
    expected |= {(c, s, "copy") for c in ("f16-fa-on", "f16-fa-off") for s in sequences}
    assert variants(planned) == expected
    assert len(planned) == len(expected)


def test_arguments_match_check_id() -> None:
    (check,) = (c for c in matrix.in_memory([TOY]) if c.id.endswith("/f16-fa-off/4-unified/copy"))
    line = " ".join(check.args)
    assert "-fa off -ctk f16 -ctv f16 --seqs 4 --unified --storage copy --quick" in line


def test_device_plan_has_no_storage() -> None:
    planned = matrix.on_device([TOY], "rpc")
    assert len({check.id for check in planned}) == len(planned) == 14
    assert all("--storage" not in check.args and check.id.endswith("/rpc") for check in planned)


def test_risky_shift_runs_alone() -> None:
    quantized = [c for c in matrix.on_device([TOY, Path("other.gguf")], "rpc") if {"q8_0", "q4_0"} & set(c.args)]
    with_shift = [c for c in quantized if "shift" in c.args[-1]]
    assert [c.args[-1] for c in with_shift] == ["shift", "shift"]
    assert {c.model for c in with_shift} == {TOY}  # one model of each class


def test_each_type_pair_runs_once() -> None:
    pairs = [c.id.split("/")[3] for c in matrix.in_memory([TOY]) if c.id.endswith("/pair")]
    assert len(pairs) == len(set(pairs)) == len(matrix.TYPES) ** 2


def test_table_counts_possible_runs() -> None:
    planned = [c for c in matrix.in_memory([TOY]) if "f16-fa-on" in c.id]
    findings = [found(planned[0]), found(planned[1], CheckOutcome.SKIPPED), found(planned[2], CheckOutcome.FAILED)]
    text = matrix.table(findings)
    assert text.splitlines()[-1].startswith("| plain | 1 | 1/2 **1 FAILED** |")


def test_table_marks_ungrown_runs() -> None:
    planned = [c for c in matrix.in_memory([TOY]) if "f16-fa-on" in c.id and c.id.endswith("/inplace")]
    text = matrix.table([found(planned[0]), found(planned[1], grown=False)])
    assert text.splitlines()[-1].startswith("| plain | 1 | 2/2, 1 not grown |")


def test_grown_model_grows_everywhere() -> None:
    planned = matrix.in_memory([TOY, Path("mamba.gguf")])
    findings = [found(check, grown="mamba" not in check.id) for check in planned]
    assert matrix.judge_grown(findings, 1).outcome is CheckOutcome.PASSED
    assert matrix.judge_grown(findings, 2).reason == "only 1 models grew, 2 are expected"
    (q8_0,) = (i for i, f in enumerate(findings) if "llama-dense/matrix/q8_0-fa-on/1/" in f.id)
    findings[q8_0] = found(planned[q8_0], grown=False)
    judged = matrix.judge_grown(findings)
    assert (judged.outcome, judged.details["not_grown"]) == (CheckOutcome.FAILED, [planned[q8_0].id])


@pytest.mark.parametrize("least", [0, 2])
def test_guard_is_not_counted_as_model(least: int) -> None:
    findings = [found(check) for check in matrix.in_memory([TOY])]
    guarded = [*findings, matrix.judge_grown(findings, least)]
    assert report.class_rows(guarded) == report.class_rows(findings)


def test_columns_are_caches_by_storage() -> None:
    findings = [found(c) for c in (*matrix.in_memory([TOY]), *matrix.on_device([TOY], "rpc"))]
    head = matrix.table(findings).splitlines()[0]
    assert "f16, in place | f16, by copy | f16, RPC | q8_0, in place | q8_0, RPC" in head
    assert "f16 without FA, RPC" in head
    assert "81/81" in matrix.pairs(findings)


def test_unknown_classes_are_listed_last() -> None:
    (check, *_) = matrix.in_memory([TOY])
    rows = matrix.table([found(check, group=g) for g in ("new", "iSWA", "plain")]).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| plain", "| iSWA", "| new"]


def test_table_without_matrix_is_empty() -> None:
    assert matrix.table([Finding("kv-check/a/fa-on", "kv-check", "plain", CheckOutcome.PASSED, "same")]) == ""


def test_window_models_use_swa_full() -> None:
    planned = [*matrix.in_memory([TOY, Path("lfm2-dense.gguf")]), *matrix.on_device([Path("lfm2-dense.gguf")], "rpc")]
    assert {("--swa-full" in check.args, check.model.stem) for check in planned} == {
        (False, "llama-dense"),
        (True, "lfm2-dense"),
    }


def test_copy_plan_fills_compressed_models() -> None:
    toy = Path(f"{COMPRESSED}.gguf")
    planned = [*matrix.in_memory([toy, TOY]), *matrix.on_device([toy], "rpc")]
    longer = [check for check in planned if "--fill" in check.args]
    assert {tuple(check.id.split("/")[-2:]) for check in longer} == {
        (sequences, how) for sequences in ("1", "4", "4-unified") for how in ("copy", "rpc")
    }
    assert {check.model for check in longer} == {toy}
