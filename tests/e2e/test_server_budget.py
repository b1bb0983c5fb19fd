"""Test the limits of a server's caches: --kv-budget, --kv-auto-quant, --kv-cache-tokens, --kv-cache-demand-paged."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvtool.verify import drafts
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.budgets import LADDER, MIB, props, within
from tests.e2e.conftest import Real
from tests.e2e.servers import at_once, completion, refusal, serving, until_logged, weights

PLAIN = ("-np", "1", "--cache-ram", "0", "--no-warmup")


def n_ctx(server: LlamaServer) -> int:
    return int(props(server)["default_generation_settings"]["n_ctx"])


@pytest.mark.parametrize(
    ("args", "cells"),
    [
        (("--kv-budget", "100"), range(1400, 1601)),  # 100 MiB of f16 cells, minus the growth of the compute buffers
        (("--kv-budget", "100", "--kv-auto-quant", "f16,q8_0,q4_0"), range(5000, 5690)),
        (("--kv-budget", "100", "--kv-auto-quant", "q8_0"), range(2700, 3012)),
        (("--kv-budget", "100000"), (262144,)),
        (("--kv-budget", "100", "-c", "4096"), (4096,)),
        # as many as the model supports, because the user requested that
        (("--kv-budget", "100", "-c", "0"), (262144,)),
        (("--kv-budget", "100", "--kv-cache-tokens", "512"), (512,)),
        (("--kv-budget", "100", "-np", "3", "--no-kv-unified"), range(256, 531, 256)),  # for each slot
        (("--kv-cache-tokens", "1024"), (1024,)),
        (("--kv-cache-tokens", "1000"), (768,)),  # the largest multiple of 256 that is not above 1000
        (("--kv-cache-tokens", "100"), (256,)),
        (("--kv-cache-tokens", "1024", "-c", "8192"), (1024,)),
        (("--kv-cache-tokens", "8192", "-c", "1024"), (1024,)),
        (("--kv-cache-tokens", "1000000"), (262144,)),
    ],
)
def test_context_size_from_limits(
    real: Real, no_vocab_model: Path, tmp_path: Path, args: tuple[str, ...], cells: range | tuple[int, ...]
) -> None:
    with serving(real, no_vocab_model, tmp_path / "log", *PLAIN, "--no-jinja", *args, "--kv-dynamic") as server:
        assert n_ctx(server) in cells


@pytest.mark.parametrize("slots", ["1", "16"])
def test_budget_excludes_recurrent_states_from_plan(real: Real, tmp_path: Path, slots: str) -> None:
    """Use a budget of 1 MiB, which has room for 768 cells of this model and the growth of the compute buffers.

    The recurrent states of the slots must not count in the budget: the states of 7 slots alone would fill it.
    """
    args = (*PLAIN, "-np", slots, "--kv-unified", "--kv-budget", "1")
    with serving(real, real.text_model("qwen35-dense"), tmp_path / "log", *args) as server:
        assert n_ctx(server) == 768


def test_unsupported_ladder_type_is_skipped(real: Real, tmp_path: Path) -> None:
    """Expect a warning at the start if the model cannot have a type of the list. --fit must plan without this type."""
    args = (*PLAIN, "--kv-budget", "1", "--kv-auto-quant", "f16,q8_0")
    with serving(real, real.text_model("laguna-moe"), tmp_path / "log", *args) as server:
        until_logged(server, "cannot have q8_0 and q8_0: the block size of the type does not divide the size of a head")
        assert n_ctx(server) == 768
        assert "error while trying to fit" not in server.log


def test_dependent_draft_is_not_planned(real: Real, tmp_path: Path) -> None:
    target, draft = map(real.with_vocabulary, drafts.draft_pair(real.work))
    args = (*PLAIN, "-md", draft, "--spec-type", "draft-mtp", "--kv-budget", "8")
    with serving(real, target, tmp_path / "log", *args) as server:
        until_logged(server, "planning without the draft")
        assert n_ctx(server) in range(4096, 8192)


@pytest.mark.parametrize(("most", "each"), [(2048, 512), (2047, 256)])
def test_cache_tokens_limit_all_slots(real: Real, model: Path, tmp_path: Path, most: int, each: int) -> None:
    args = ("-c", "8192", "-np", "4", "--no-kv-unified", "--kv-cache-tokens", str(most), "--kv-dynamic")
    with serving(real, model, tmp_path / "log", *args) as server:
        assert n_ctx(server) == each
        assert props(server)["kv_cache"]["target"]["cells_max"] == 4 * each


def test_props_report_budget(real: Real, model: Path, tmp_path: Path) -> None:
    args = ("-c", "4096", *PLAIN, "--metrics", "--kv-budget", "64", "--kv-auto-quant", "f16,q8_0,q4_0")
    with serving(real, model, tmp_path / "log", *args) as server:
        completion(server, prompt(1, 300), 4)
        said = props(server)["kv_budget"]
        assert said["types"] == ["f16", "q8_0", "q4_0"]
        assert said["bytes"] == 64 * 1024 * 1024
        assert (said["down_total"], said["up_total"]) == (0, 0)
        assert "llamacpp:kv_budget_down_total 0" in server.get("/metrics")
        assert props(server)["kv_cache"]["target"]["cells"] < 4096  # the budget implies --kv-dynamic
    with serving(real, model, tmp_path / "log", "-c", "4096", *PLAIN, "--kv-cache-demand-paged") as server:
        assert props(server)["kv_cache"]["target"]["cells"] < 4096
        assert "kv_budget" not in props(server)


def test_limits_from_environment(
    real: Real, no_vocab_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "KV_BUDGET": "100",
        "KV_AUTO_QUANT": "q4_0",
        "KV_CACHE_TOKENS": "3000",
        "KV_CACHE_DEMAND_PAGED": "1",
    }.items():
        monkeypatch.setenv(f"LLAMA_ARG_{name}", value)
    with serving(real, no_vocab_model, tmp_path / "log", *PLAIN, "--no-jinja") as server:
        said = props(server)
        assert said["kv_budget"]["types"] == ["q4_0"]
        assert n_ctx(server) == 2816  # a multiple of 256, at most 3000


# --- within the budget -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "mib", "words"),
    # by copy, a block of 256 cells is always reserved after those in use
    [("inplace", 32, (250, 325, 650, 1100)), ("copy", 64, (350, 450, 900, 1750))],
)
def test_idle_slots_shrink_before_precision(
    real: Real,
    large_cell_model: Path,
    tmp_path: Path,
    storage: str,
    mib: int,
    words: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    few, more, many, most = words
    with within(real, large_cell_model, tmp_path, mib, *LADDER, "--kv-unified") as watched:
        watched.ask(0, few)
        assert watched.look() == ("f16", 0, 0)
        watched.ask(1, more)  # both do not fit with f16
        assert watched.look() == ("f16", 0, 0)
        until_logged(watched.server, "purging slot 0")
        watched.ask(1, many)
        assert watched.look() == ("q8_0", 1, 0)
        watched.ask(1, most)
        assert watched.look() == ("q4_0", 2, 0)
        assert watched.taken > mib * MIB / 2
        for slot in (0, 1):
            watched.server.slot("erase", slot)
        watched.ask(0, few)
        assert watched.look() == ("f16", 2, 1)


def test_budget_without_ladder(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    with within(real, large_cell_model, tmp_path, 64, "--kv-unified") as watched:
        watched.ask(0, 500)
        answer = watched.server.http.post("/completion", json={"prompt": prompt(1, 1300), "id_slot": 1})
        assert refusal(answer)[:2] == (400, "exceed_context_size_error")  # refused at once, because it could never fit
        assert watched.look() == ("f16", 0, 0)
        assert watched.ask(1, 500)["tokens_predicted"] == 8


def test_draft_counts_in_budget(real: Real, model: Path, tmp_path: Path) -> None:
    draft = ("-md", model, "--spec-type", "draft-simple", "-np", "1")
    loaded = weights(model)
    with within(real, model, tmp_path, 2 + loaded, *LADDER, *draft) as watched:
        for words in (300, 600, 1200):  # 2 KiB for each cell in each context
            watched.ask(0, words)
        assert watched.look()[1] > 0
        assert 0 <= loaded * MIB - props(watched.server)["kv_budget"]["loaded_bytes"] < MIB
        watched.server.post("/speculative", {"action": "unload"})
        freed = watched.taken
        watched.look()
        said = props(watched.server)["kv_budget"]
        assert said["committed_bytes"] < freed - (loaded - 1) * MIB
        assert said["loaded_bytes"] == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kv-auto-quant", "f16,foo"), "Unsupported cache type: foo"),
        (("--kv-auto-quant", "f16,,q8_0"), "Unsupported cache type: "),
        (("--kv-auto-quant", "q8_0,f16"), "f16 does not take less than q8_0 before it"),
        (("--kv-auto-quant", "f16,bf16"), "bf16 does not take less than f16 before it"),
        (("--kv-auto-quant", "q4_0,iq4_nl"), "iq4_nl does not take less than q4_0 before it"),
        (("--kv-auto-quant", "f16"), "f16 does not take less than what the cache begins with"),
        (("--kv-auto-quant", "f16,q8_0", "-ctk", "q8_0", "-ctv", "q8_0"), "it begins with f16, the cache with less"),
        (("--kv-auto-quant", "f16,q8_0", "-fa", "off"), "q8_0 needs flash attention"),
        (("--kv-budget", "0"), "must be positive"),
        (("--kv-cache-tokens", "-5"), "must be positive"),
    ],
)
def test_bad_limits_fail_before_loading(real: Real, args: tuple[str, ...], said: str) -> None:
    done = subprocess.run([real.bin / "llama-server", "-m", "none.gguf", *args], capture_output=True, text=True)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


def test_recurrent_state_is_outside_budget(real: Real, tmp_path: Path) -> None:
    """Use a budget of 1 MiB. All 1024 cells fit, because the recurrent states do not count, so no request waits."""
    args = ("-np", "4", "--kv-unified", "-c", "1024", "--kv-budget", "1", "--cache-ram", "0", "--no-warmup")
    with serving(real, real.text_model("qwen35-dense"), tmp_path / "log", *args) as server:
        answers = at_once(server, [prompt(i, 200) for i in range(4)], 30)
    assert [answer["tokens_predicted"] for answer in answers] == [30] * 4
    assert "waits for cells" not in server.log


def test_budget_error_reports_tokens(
    real: Real, large_cell_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "inplace")
    args = ("-np", "2", "--kv-unified", "-c", "4096", "--kv-budget", "17", "--cache-ram", "0", "--no-warmup")
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        answer = server.http.post("/completion", json={"prompt": prompt(1, 252), "n_predict": 1})
        assert "holds (256 tokens)" in refusal(answer)[2]
