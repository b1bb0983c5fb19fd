"""Test kvtool verify with all test models, the usual programs, and the memory of a large context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtool.machine import cores
from kvtool.result import to_plain
from kvtool.verify import checks, plan, report, runner
from kvtool.verify.devices import IN_MEMORY
from tests.e2e.conftest import ROOT, Real, kvtool

CLASSES = {"plain", "iSWA", "hybrid", "hybrid-iSWA", "hybrid-idx", "DSA", "DSA-iSWA", "DSV4", "MSA"}
# --quick runs one or two models of each memory class (kind of cache). They run all checks, with and without flash
# attention. The other models run only the checks that may depend on the architecture. At night, all models run all
# checks (ci/nightly.sh full). Without flash attention, an architecture changes only how its graph reads the cells.
# Operations that move cells depend on the layout of the cells, and the memory classes cover all layouts.
IN_FULL = {"deepseek2-moe", "minimax-m3-moe"}
FEW, FEW_OFF = "prompt,generate,copy,shift,state-self,div", "prompt,generate"


@pytest.fixture(scope="module")
def quick(real: Real) -> tuple[int, dict[str, Any]]:
    return kvtool("verify", "--quick", "--bin", str(real.bin))


def shorter(check: checks.Check) -> checks.Check:
    return replace(check, args=(*check.args, "--checks", FEW_OFF if "/fa-off/" in check.id else FEW))


@pytest.fixture(scope="module")
def kv_checks(real: Real, quick: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings of kv-check for all test models. Findings of `kvtool verify --quick` are used again."""
    known = [found for found in quick[1]["findings"] if found["kind"] == "kv-check"]
    ids = {found["id"] for found in known}
    toys = sorted(real.toys.glob("*.gguf"))
    planned = [
        check if check.model.stem in IN_FULL else shorter(check)
        for check in plan.kv_checks(toys, quick=True, chosen=True)
        if check.id not in ids
    ]
    found = runner.kv_checks(planned, real.bin / "kv-check", (IN_MEMORY,) * cores())
    (ROOT / "report" / "kv-check.xml").write_text(report.as_junit(found), "utf-8")
    return [*known, *to_plain(found)]


@pytest.mark.timeout(1800)
def test_quick_passes(quick: tuple[int, dict[str, Any]]) -> None:
    code, found = quick
    assert [f"{f['id']}: {f['reason']}" for f in found["findings"] if f["outcome"] == "failed"] == []
    assert (code, found["ok"]) == (0, True)


def test_quick_grows_every_memory_class(quick: tuple[int, dict[str, Any]]) -> None:
    rows = {row["memory_class"]: row["variants"] for row in quick[1]["classes"]}
    assert set(rows) == CLASSES
    grown = {name: sum(v["grown"] for v in variants.values()) for name, variants in rows.items()}
    assert [name for name, number in grown.items() if number == 0] == []


def test_completion_and_server_texts_are_equal(quick: tuple[int, dict[str, Any]]) -> None:
    texts = [f for f in quick[1]["findings"] if f["kind"] in ("completion", "server")]
    assert {f["status"] for f in texts} == {"same"}
    assert {f["id"] for f in texts} >= {"completion/llama-dense", "server/qwen35-dense/single"}
    # the cache must grow for the prompt, and again while text is generated
    assert all(len(f["details"]["growths"]) >= 2 for f in texts)


def test_large_context_starts_small(quick: tuple[int, dict[str, Any]]) -> None:
    (found,) = (f for f in quick[1]["findings"] if f["kind"] == "memory")
    details = found["details"]
    assert details["cache_bytes"] == 8 * 2**30
    assert details["dynamic_bytes"] < 64 * 2**20
    if details["static_bytes"] is None:
        assert "static not run" in found["reason"]
    else:
        assert details["static_bytes"] > 8 * 2**30


@pytest.mark.timeout(3600)
def test_no_toy_model_differs(kv_checks: list[dict[str, Any]]) -> None:
    assert [f"{f['id']}: {f['reason']}" for f in kv_checks if f["outcome"] == "failed"] == []


def test_all_toys_ran_with_both_attentions(kv_checks: list[dict[str, Any]]) -> None:
    ids = {f["id"] for f in kv_checks}
    assert len({i for i in ids if i.endswith("/fa-on/quick")}) >= 127
    assert len({i for i in ids if i.endswith("/fa-off/quick")}) >= 127


def test_enough_toys_grew(kv_checks: list[dict[str, Any]]) -> None:
    on = [f for f in kv_checks if f["id"].endswith("/fa-on/quick")]
    assert sum(f["grown"] for f in on) >= checks.EXPECTED_GROWN["b11549"]
    assert [f["id"] for f in on if not f["grown"] and not f["reason"]] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("toy", ["llama-dense", "qwen35-dense", "gemma3-dense"])
def test_long_run_of_common_classes(real: Real, toy: str) -> None:
    """Run the checks of `make verify`, which are longer than those of --quick.

    They divide batches in more ways, and use more than twice as many cells.
    """
    code, found = kvtool("verify", "--models", toy, "--bin", str(real.bin))
    assert (code, [f"{f['id']}: {f['reason']}" for f in found["findings"] if f["outcome"] == "failed"]) == (0, [])
    assert any(f["id"].endswith("/fa-on") and f["grown"] for f in found["findings"])


def test_values_were_compared(kv_checks: list[dict[str, Any]]) -> None:
    for found in kv_checks:
        if found["status"] == "same":
            assert found["details"]["values"] > 10_000, found["id"]
