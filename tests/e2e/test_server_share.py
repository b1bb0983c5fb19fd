"""Test slots that share the cells of a common beginning of their prompts: --kv-share-prefix."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.adapter import adapter
from tests.e2e.conftest import Real
from tests.e2e.servers import at_once, completion, events, generated, part, serving, until, until_logged

FLAG = "--kv-share-prefix"
KEEP = ("--no-cache-idle-slots", "--cache-ram", "0")
ARGS = ("-c", "8192", "-np", "4", "--kv-unified", "--kv-dynamic", "--no-warmup", "-b", "64", "-ub", "1", *KEEP)
# a slot for each prompt, so that no cell is freed while the first slot generates, and its own cells stay in order
MANY = ("-np", "9")
COMMON = prompt(1, 150)
PROMPTS = [f"{COMMON} {prompt(10 + i, 20)}" for i in range(8)]
BUSY = 6000  # most tokens that the slot generates whose cells are shared
# models with a window or a recurrent state, which must return to a checkpoint
FORGETFUL = ("gemma2-dense", "qwen35-dense", "mamba2-dense")


def tokens(server: LlamaServer, text: str) -> list[int]:
    out: list[int] = server.post("/tokenize", {"content": text, "add_special": True})["tokens"]
    return out


def common(server: LlamaServer, one: str, other: str) -> int:
    """Return the number of tokens at the start that two prompts have in common."""
    pairs = zip(tokens(server, one), tokens(server, other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def of_slots(server: LlamaServer) -> list[dict[str, int]]:
    return [slot["kv_cache"]["target"] for slot in server.http.get("/slots").json()]


@contextlib.contextmanager
def generating(server: LlamaServer, text: str, n_predict: int) -> Iterator[Callable[[], str]]:
    """Generate in slot 0 while the block runs, then disconnect. Yield a function that returns the generated text."""
    leaves = threading.Event()
    body = {"prompt": text, "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True, "id_slot": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(events, server, "/completion", body, leaves.is_set)
        try:
            until(lambda: generated(server, 0) or answer.done())
            yield lambda: "".join(event["content"] for event in answer.result())
        finally:
            leaves.set()


def chats(real: Real, toy: str, log: Path, *args: str) -> tuple[str, list[str], list[int], list[int]]:
    """Return the results of prompts that share their beginning with a slot that generates.

    These are the text of that slot and, for the other prompts, their texts, the number of tokens that were found in the
    cache, and the number that could be found.
    """
    with serving(real, real.text_model(toy), log, *ARGS, *MANY, *args) as server:
        with generating(server, COMMON, BUSY) as text:
            answers = [completion(server, p, 8, id_slot=1 + i) for i, p in enumerate(PROMPTS)]
            assert server.http.get("/slots").json()[0]["is_processing"], "the donor has ended too early"
            possible = [common(server, COMMON, p) for p in PROMPTS]
            shared = [slot["cells_shared"] for slot in of_slots(server)]
            if FLAG in args and toy not in FORGETFUL:
                assert shared[1:] == possible and shared[0] == max(shared)
        donor = text()
    return donor, [a["content"] for a in answers], [a["timings"]["cache_n"] for a in answers], possible


@pytest.mark.parametrize("toy", ["llama-dense", "deepseek2-moe", *FORGETFUL])
def test_prefix_of_generating_slot_is_shared(real: Real, toy: str, tmp_path: Path) -> None:
    donor, apart, _, _ = chats(real, toy, tmp_path / "apart")
    busy, shared, found, possible = chats(real, toy, tmp_path / "shared", FLAG)
    assert shared == apart
    shorter, longer = sorted((busy, donor), key=len)
    assert len(shorter) > 60 and longer.startswith(shorter)
    if toy in FORGETFUL:
        assert all(0 < n <= most for n, most in zip(found[:3], possible, strict=False))
    else:
        assert found == possible


def test_simultaneous_prompts_compute_prefix_once(real: Real, model: Path, tmp_path: Path) -> None:
    def ask(log: Path, *args: str) -> tuple[list[str], int, int]:
        with serving(real, model, log, *ARGS, *args) as server:
            answers = at_once(server, PROMPTS[:4], 8)
            own = sum(len(tokens(server, p)) - common(server, COMMON, p) for p in PROMPTS[:4])
            once = len(tokens(server, COMMON)) + own
        return [a["content"] for a in answers], sum(a["timings"]["prompt_n"] for a in answers), once

    apart, all_of_it, _ = ask(tmp_path / "apart")
    shared, computed, once = ask(tmp_path / "shared", FLAG)
    assert shared == apart
    assert computed <= once < all_of_it / 2


def test_unstarted_slot_donates_prefix(real: Real, model: Path, tmp_path: Path) -> None:
    """Share the cells of a slot's last prompt.

    The next prompt with this beginning gets the slot, and others share its cells.
    """
    with serving(real, model, tmp_path / "log", *ARGS, FLAG) as server:
        completion(server, PROMPTS[0], 8, id_slot=3)
        answers = at_once(server, PROMPTS[1:4], 8)
        own = sum(len(tokens(server, p)) - common(server, COMMON, p) for p in PROMPTS[1:4])
    assert sum(a["timings"]["prompt_n"] for a in answers) <= own


def test_shared_cells_are_not_freed_in_vain(real: Real, model: Path, tmp_path: Path) -> None:
    """Let two waiting requests share cells with a slot that generates. Freeing shared cells would not make room."""
    args = ("-c", "1024", "-np", "3", "--kv-unified", "--kv-dynamic", "--no-warmup", FLAG, *KEEP)
    with serving(real, model, tmp_path / "log", *args) as server, generating(server, COMMON, 800):
        # earlier, the first request would fit at first, and then have no cell for its last token
        until(lambda: generated(server, 0) > 60)
        long = [f"{COMMON} {prompt(n, 830)}" for n in (2, 3)]
        assert [answer["tokens_predicted"] for answer in at_once(server, long, 8)] == [8, 8]
    assert "waits for cells" in server.log
    assert server.log.count("shares the cells") <= 4
    assert server.log.count("not started yet, purging") <= 1


def test_slot_without_sharing_computes_prompt(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, FLAG) as server, generating(server, COMMON, 1500):
        assert completion(server, PROMPTS[0], 4, id_slot=1, cache_prompt=False)["timings"]["cache_n"] == 0
        assert completion(server, PROMPTS[1], 4, id_slot=2)["timings"]["cache_n"] > 0
    streams = [arg if arg != "--kv-unified" else "--no-kv-unified" for arg in ARGS]
    for toy, args in (
        ("llama-dense", streams),
        ("deepseek4-moe", ARGS),
    ):  # the second server always has streams
        with serving(real, real.text_model(toy), tmp_path / toy, *args, FLAG) as server:
            completion(server, COMMON, 4, id_slot=0)
            assert completion(server, PROMPTS[0], 4, id_slot=1)["timings"]["cache_n"] == 0
        assert "--kv-share-prefix needs a unified KV cache" in server.log


@pytest.mark.parametrize("shifting", ["the donor", "the other"])
def test_shared_cells_do_not_shift(real: Real, model: Path, shifting: str, tmp_path: Path) -> None:
    """Shift the context of a slot that shares cells.

    The slot first gets cells of its own, and both texts are the same as without sharing.
    """
    # with flash attention, the order of the cells, and so the order of arrival, would change the rounding of f16 sums
    args = (*ARGS, "--context-shift", "--kv-unified-per-slot", "512", "--keep", "16", "-fa", "off")
    lengths = (700, 100) if shifting == "the donor" else (340, 700)

    def both(log: Path, *more: str) -> list[str]:
        with serving(real, model, log, *args, *more) as server, generating(server, COMMON, lengths[0]) as text:
            other = completion(server, PROMPTS[0], lengths[1], id_slot=1)
            assert (other["timings"]["cache_n"] > 0) == (FLAG in more)
            donor = text()
        assert "slot context shift" in server.log
        return [donor, other["content"]]

    assert both(tmp_path / "shared", FLAG) == both(tmp_path / "apart")


def test_cache_reuse_moves_no_shared_cells(real: Real, model: Path, tmp_path: Path) -> None:
    middle = prompt(5, 60)
    with serving(real, model, tmp_path / "log", *ARGS, FLAG, "--cache-reuse", "8") as server:
        text = f"{COMMON} {prompt(6, 10)} {middle}"
        before = completion(server, text, 40, id_slot=0)["content"]
        # Send the same text without a part before its end. The rest could be moved, but the other slot shares it.
        completion(server, f"{COMMON} {middle}", 4, id_slot=1)
        assert completion(server, text, 40, id_slot=0)["content"] == before


# --- only cells that the slot would compute itself -------------------------------------------------------------------


def found(server: LlamaServer, text: str | list[int], slot: int) -> int:
    """Return the number of prompt tokens that were found in the cache."""
    answer = server.post("/completion", {"prompt": text, "n_predict": 1, "temperature": 0.0, "id_slot": slot})
    return int(answer["timings"]["cache_n"])


def test_shifted_cells_are_not_shared(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*ARGS, "--context-shift", "--kv-unified-per-slot", "512", FLAG)
    keep = 32
    with serving(real, model, tmp_path / "log", *args) as server:
        first = completion(server, COMMON, 500, id_slot=0, n_keep=keep, n_discard=64, return_tokens=True)
        until_logged(server, "slot context shift")
        held = tokens(server, COMMON) + first["tokens"]
        kept = next(n for n in (keep, keep + 1) if f"n_keep = {n}," in server.log)
        while len(held) > 512:
            del held[kept : kept + 64]
        assert found(server, held[:200], 0) > kept  # the slot itself uses them, as in upstream
        assert 0 < found(server, held[:200], 1) <= kept
        # cells that are computed afterwards can be shared
        assert found(server, f"{COMMON} river", 0) == kept
        assert found(server, PROMPTS[0], 2) == common(server, COMMON, PROMPTS[0])


def test_cells_of_other_lora_are_not_shared(real: Real, model: Path, tmp_path: Path) -> None:
    lora = adapter(model, tmp_path / "lora.gguf", "blk.0.attn_q.")
    with serving(real, model, tmp_path / "log", *ARGS, FLAG, "--lora", lora) as server:
        found(server, COMMON, 0)
        assert found(server, PROMPTS[0], 1) > 100
        server.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.0}]).raise_for_status()
        assert found(server, f"{COMMON} river", 0) > 100  # the slot itself uses them, as in upstream
        assert found(server, PROMPTS[1], 2) == 0
        assert found(server, PROMPTS[2], 3) > 100  # shared with slot 2


def test_cells_from_file_are_not_shared(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ARGS, FLAG, "--slot-save-path", tmp_path) as server:
        found(server, COMMON, 0)
        server.slot("save", 0, "slot.bin")
        server.slot("erase", 0)
        server.slot("restore", 0, "slot.bin")
        assert found(server, f"{COMMON} river", 0) > 100
        assert found(server, PROMPTS[0], 1) == 0


def test_checkpoints_after_prefix_are_kept(real: Real, tmp_path: Path) -> None:
    with serving(real, real.text_model("gemma2-dense"), tmp_path / "log", *ARGS, FLAG, "-lv", "5") as server:
        found(server, COMMON, 0)
        found(server, f"{COMMON} {prompt(8, 100)}", 0)
        assert found(server, PROMPTS[0], 1) > 0
    assert "shares the cells of slot 0" in server.log
    assert "erased invalidated context checkpoint" not in server.log


def test_draft_without_cells_for_shared_prefix(real: Real, model: Path, tmp_path: Path) -> None:
    """Load the draft model while three slots share cells of the target and generate.

    The draft model has no shared cells, so its cache is full before the target's. The slots continue without a draft.
    """
    draft = ("-md", model, "--spec-type", "draft-simple", "--spec-draft-n-max", "4", "--draft-lazy")
    args = ("-c", "4096", "-np", "3", "--kv-unified", "--kv-dynamic", "--no-warmup", *KEEP, *draft, FLAG)
    long = prompt(1, 1165)
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor() as pool:
        completion(server, long, 0, id_slot=0)
        running = [pool.submit(completion, server, f"{long} {i}", 900, id_slot=i) for i in range(3)]
        until(lambda: sum(slot["cells_shared"] >= 1165 for slot in of_slots(server)) == 3)
        part(server, "speculative", "load")
        assert [answer.result()["tokens_predicted"] for answer in running] == [900] * 3
    assert "no memory for the draft, the batch continues without it" in server.log


def test_draft_catches_up_in_part(real: Real, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft model catch up with a prompt of several batches.

    It finds no cells for the last batch, and skips the tokens after this batch.
    """
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")
    draft = ("-md", model, "--spec-type", "draft-simple", "--spec-draft-n-max", "4", "--draft-lazy")
    args = ("-c", "4096", "-np", "3", "--kv-unified", "--no-warmup", "-b", "64", "-ub", "64", *KEEP, *draft)
    body = {"prompt": prompt(1, 1325), "n_predict": 880, "temperature": 0.0, "ignore_eos": True, "n_cmpl": 3}
    for flags in ((), ("--kv-dynamic",)):
        with serving(real, model, tmp_path / f"log{len(flags)}", *args, *flags) as server, ThreadPoolExecutor() as pool:
            running = pool.submit(server.http.post, "/completion", json=body)
            until(lambda: sum(generated(server, slot) > 0 for slot in range(3)) == 3)
            part(server, "speculative", "load")
            assert [answer["tokens_predicted"] for answer in running.result().json()] == [880] * 3
        assert "still no memory" in server.log and "starting position" not in server.log


# --- in a full pool --------------------------------------------------------------------------------------------------

FULL = ("-c", "1024", "-np", "3", "--kv-unified", "--no-warmup", "--no-cache-idle-slots", FLAG)
SHIFTING = ("--kv-unified-per-slot", "512", "--context-shift")


def test_waiting_slot_spares_shifting_slot(real: Real, model: Path, tmp_path: Path) -> None:
    """Let a slot that waits for cells share the beginning of a slot that makes a context shift.

    The waiting slot must release the shared cells, so that the other slot can shift them without a copy.
    """
    common = prompt(1, 100)
    texts = [prompt(2, 400), f"{common} stone {prompt(5, 365)}", f"{common} river {prompt(6, 200)}"]
    with serving(real, model, tmp_path / "log", *FULL, *SHIFTING) as server:
        answers = at_once(server, texts, 400)
    assert [answer["tokens_predicted"] for answer in answers] == [400] * 3
    before, _ = server.log.split("slot context shift", 1)
    assert "shares the cells of slot" in before and "not started yet, purging" in before


def test_idle_slots_yield_to_shifting_slot(real: Real, model: Path, tmp_path: Path) -> None:
    text = prompt(1, 300)
    with serving(real, model, tmp_path / "log", *FULL, *SHIFTING) as server:
        completion(server, f"{text} stone", 1, id_slot=1)
        completion(server, prompt(2, 380), 1, id_slot=2)
        last = completion(server, f"{text} river", 400, id_slot=0)
    assert last["timings"]["cache_n"] > 300 and last["tokens_predicted"] == 400
    assert "purging slot 1" in server.log


@pytest.mark.parametrize("toy", ["llama-dense", "gemma2-dense"])
def test_waiting_slot_releases_unused_cells(real: Real, toy: str, tmp_path: Path) -> None:
    """Let a slot wait for cells, although it shares the beginning of its prompt with another slot.

    While it waits, the slot may have only the cells of the shared beginning. It must start when the other slot has
    ended, although a third slot still generates.
    """
    common, long = prompt(1, 100), 2000
    args = [arg if arg != "1024" else "4096" for arg in FULL]
    with (
        serving(real, real.text_model(toy), tmp_path / "log", *args, "--kv-dynamic") as server,
        ThreadPoolExecutor() as pool,
    ):
        completion(server, common, 1, id_slot=0)  # this makes a checkpoint
        donor = pool.submit(completion, server, f"{common} stone {prompt(3, 2500)}", 600, id_slot=0)
        until(lambda: generated(server, 0))
        other = pool.submit(completion, server, prompt(2, 80), long, id_slot=2)
        until(lambda: generated(server, 2))
        waiting = pool.submit(completion, server, f"{common} river {prompt(6, 1500)}", 5, id_slot=1)
        until_logged(server, "waits for cells")
        cells = of_slots(server)[1]["cells"]
        assert donor.done() or cells <= 150, "no more than the prefix"
        donor.result()
        waiting.result()
        assert "shares the cells of slot 0, n_tokens" in server.log
        assert not other.done() and generated(server, 2) < long - 100
        server.process.kill()


def test_waiting_slot_keeps_own_cells(real: Real, tmp_path: Path) -> None:
    """Let a slot wait that has cells of its last turn and shared cells.

    It must free only the cells that it got for this turn.
    """
    common, own = prompt(1, 100), prompt(4, 300)
    args = [arg if arg != "1024" else "4096" for arg in FULL]
    with (
        serving(real, real.text_model("gemma2-dense"), tmp_path / "log", *args, "--kv-dynamic") as server,
        ThreadPoolExecutor() as pool,
    ):
        completion(server, common, 1, id_slot=0)
        completion(server, f"{common} {own}", 1, id_slot=1)
        assert of_slots(server)[1]["cells_shared"] > 90
        donor = pool.submit(completion, server, f"{common} stone {prompt(3, 2500)}", 600, id_slot=0)
        until(lambda: generated(server, 0))
        waiting = pool.submit(completion, server, f"{common} {own} {prompt(6, 1500)}", 5, id_slot=1)
        until_logged(server, "waits for cells")
        assert not donor.done()
        assert waiting.result()["timings"]["cache_n"] > 300
