"""Test POST /requantize_kvcache: types change while a server works, and nothing but precision is lost.

kv-check proves the contents of the cells. The tests here cover the ways to convert cells. A text must be the same after
a conversion in the cache as after a conversion of a saved state while it is restored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify import drafts
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, events, memory_is_plain, refusal, routing, serving, short_of_addresses, until

ONE = ("-c", "2048", "-np", "1", "--cache-ram", "0", "--no-warmup")
SELF_DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")
TEXT = prompt(1, 300)


def both(name: str) -> dict[str, str]:
    return {"ctk": name, "ctv": name}


def requantize(server: LlamaServer, **types: str) -> dict[str, Any]:
    answer = server.post("/requantize_kvcache", types)
    assert answer["success"]
    assert {key: answer[key] for key in types} == types
    return answer


def refused(server: LlamaServer, **types: Any) -> tuple[int, str, str]:
    return refusal(server.http.post("/requantize_kvcache", json=types))


def types_of(server: LlamaServer, context: str = "target") -> tuple[str, str]:
    said = server.http.get("/props").json()["kv_cache"][context]
    return said["type_k"], said["type_v"]


def generating(server: LlamaServer, count: int) -> Callable[[], bool]:
    def all_of_them() -> bool:
        slots = server.http.get("/slots").json()
        busy = [slot for slot in slots if slot["is_processing"] and slot["next_token"][0]["n_decoded"] > 4]
        return len(busy) == count

    return all_of_them


@pytest.mark.parametrize("kind", [("--kv-dynamic",), ("--kv-dynamic", "--no-kv-unified"), ()])
def test_streams_continue_after_change(real: Real, model: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    args = ("-c", "8192", "-np", "4", "--cache-ram", "0", "--metrics", *kind)
    body = {"n_predict": 1500, "temperature": 0.0, "ignore_eos": True}
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(events, server, "/completion", {**body, "prompt": prompt(n, 50)}) for n in range(4)]
        until(generating(server, 4))
        before = "f16"
        for name in ("q8_0", "q4_0", "f16"):
            answer = requantize(server, **both(name))
            assert answer["previous"] == both(before)
            assert answer["n_cells_used"] > 4 * 50
            grew = answer["committed_bytes"]["after"] > answer["committed_bytes"]["before"]
            assert grew == (name == "f16")
            assert types_of(server) == (name, name)
            before = name
        assert not any(stream.done() for stream in running)
        for stream in running:
            *_, last = stream.result()
            assert (last["tokens_predicted"], last["truncated"]) == (1500, False)
        assert {slot["kv_cache"]["type_k"] for slot in server.http.get("/slots").json()} == {"f16"}
        assert 'llamacpp:kv_cache_retype_total{context="target"} 3' in server.get("/metrics")
    said = r"requantizing KV cache: K f16 -> q8_0, V f16 -> q8_0 \(\d+\.\d\d -> \d+\.\d\d MiB\) in \d+ ms"
    assert re.search(said, server.log)


def test_unchanged_types_do_nothing(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ONE, "--metrics") as server:
        completion(server, TEXT, 4)
        assert not any("kv_cache" in server.get(path) for path in ("/props", "/slots", "/metrics"))
        requantize(server, **both("f16"))
        assert server.http.get("/props").json()["kv_cache"]["target"]["retype_total"] == 0


def going_on(server: LlamaServer) -> str:
    """Return a text that continues from the cells of TEXT."""
    answer = completion(server, TEXT + " the", 40)
    assert answer["timings"]["cache_n"] > 200
    return str(answer["content"])


@pytest.fixture(scope="module")
def expected(real: Real, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the text that a static cache generates after its cells were changed to a type, for each type."""
    out = {}
    for name in ("f16", "q8_0", "q4_0"):
        with serving(real, model, tmp_path_factory.mktemp(name) / "log", *ONE) as server:
            completion(server, TEXT, 0)
            requantize(server, **both(name))
            out[name] = going_on(server)
    assert len(set(out.values())) > 1  # if all texts were equal, they would prove nothing
    return out


@pytest.mark.parametrize("storage", ["inplace", "copy"])
def test_text_is_independent_of_storage(
    real: Real, model: Path, tmp_path: Path, expected: dict[str, str], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", storage)
    for name in ("q8_0", "q4_0"):
        with serving(real, model, tmp_path / "log", *ONE, "--kv-dynamic") as server:
            completion(server, TEXT, 0)
            for _ in range(2):  # the second change has nothing to do
                requantize(server, **both(name))
            assert server.http.get("/props").json()["kv_cache"]["target"]["retype_total"] == 1
            assert going_on(server) == expected[name]


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_slot_file_from_before_change(
    real: Real, model: Path, tmp_path: Path, expected: dict[str, str], name: str
) -> None:
    files = ("--slot-save-path", tmp_path)
    with serving(real, model, tmp_path / "log", *ONE, *files) as server:
        completion(server, TEXT, 0)
        server.slot("save", 0, "slot.bin")
        server.slot("erase", 0)
        requantize(server, **both(name))
        server.slot("restore", 0, "slot.bin")
        assert going_on(server) == expected[name]


@pytest.mark.parametrize("kind", [("--kv-dynamic",), ()])
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_cached_prompt_from_before_change(
    real: Real, model: Path, tmp_path: Path, expected: dict[str, str], name: str, kind: tuple[str, ...]
) -> None:
    args = ("-c", "2048", "-np", "1", "--no-warmup", "--cache-ram", "100", "--slot-prompt-similarity", "0.5")
    with serving(real, model, tmp_path / "log", *args, *kind) as server:
        completion(server, TEXT, 0)
        completion(server, prompt(2, 300), 4)
        requantize(server, **both(name))
        assert going_on(server) == expected[name]
        # this also changes prompts that were saved with the new types after the change
        requantize(server, **both("f16"))
        completion(server, prompt(2, 300), 4)
        assert completion(server, TEXT, 4)["timings"]["cache_n"] > 200
    assert "failed to" not in server.log


@pytest.mark.parametrize("toy", ["gemma3-dense", "gemma2-dense", "qwen35-dense"])
def test_checkpoint_from_before_change(real: Real, toy: str, tmp_path: Path) -> None:
    """Use checkpoints of a window or a recurrent state, which were saved before the types changed.

    A checkpoint is restored if a new prompt differs at a position before the first cell.
    """
    small = ("-ub", "32", "-lv", "5")  # a cache with a window has room for one more ubatch
    with serving(real, real.text_model(toy), tmp_path / "log", *ONE, *small, "--kv-dynamic") as server:
        first = completion(server, TEXT, 200)["content"]  # longer than the window
        for name in ("q8_0", "q4_0", "f16"):
            requantize(server, **both(name))
            answer = completion(server, TEXT + " the", 24)
            assert answer["timings"]["cache_n"] > 200
            assert answer["tokens_predicted"] == 24
            completion(server, TEXT + first, 8)
    assert server.log.count("restored context checkpoint") >= 3
    assert "failed to load" not in server.log


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_draft_with_own_cells(real: Real, model: Path, tmp_path: Path, name: str) -> None:
    """Compare the text with the text of a server without a draft model.

    With one token in each ubatch, both servers run the same kernel for attention. The kernels for one token and for
    several tokens round differently.
    """
    one = (*ONE, "-ub", "1")
    with serving(real, model, tmp_path / "plain", *one) as server:
        completion(server, TEXT, 100)
        requantize(server, **both(name))
        text = completion(server, TEXT, 100)["content"]
    with serving(real, model, tmp_path / "log", *one, "-md", model, *SELF_DRAFT, "--kv-dynamic") as server:
        completion(server, TEXT, 100)
        answer = requantize(server, ctkd="q4_0", ctvd="q4_0")
        assert (answer["ctk"], answer["previous"]["ctkd"]) == ("f16", "f16")
        assert types_of(server) == ("f16", "f16")
        assert types_of(server, "draft") == ("q4_0", "q4_0")
        requantize(server, **both(name), ctkd=name, ctvd=name)
        answer = completion(server, TEXT, 100)
        assert answer["content"] == text
        assert answer["timings"]["draft_n_accepted"] > 0


def test_draft_reload_between_changes(real: Real, model: Path, tmp_path: Path) -> None:
    """Load the draft model again, so that its cells have the types of the command line.

    The prompt cache then has states of the old draft model in other types.
    """
    with serving(real, model, tmp_path / "log", *ONE, "-md", model, *SELF_DRAFT, "--kv-dynamic") as server:
        completion(server, TEXT, 20)
        requantize(server, ctkd="q8_0", ctvd="q8_0")
        server.post("/speculative", {"action": "unload"})
        assert refused(server, ctkd="q4_0")[0] == 501
        server.post("/speculative", {"action": "load"})
        assert types_of(server, "draft") == ("f16", "f16")
        assert completion(server, TEXT, 20)["timings"]["draft_n_accepted"] > 0


def test_mtp_layer_changes_types(real: Real, tmp_path: Path) -> None:
    model = drafts.mtp_model(real.text_model(drafts.MTP_TOY), real.work)
    with serving(real, model, tmp_path / "log", *ONE, "--spec-type", "draft-mtp", "--kv-dynamic") as server:
        completion(server, TEXT, 50)
        requantize(server, **both("q8_0"))
        assert types_of(server, "draft") == ("f16", "f16")
        assert completion(server, TEXT + " the", 50)["tokens_predicted"] == 50
        requantize(server, ctkd="q8_0", ctvd="q8_0")
        answer = completion(server, TEXT + " river", 50)
        assert answer["tokens_predicted"] == 50
        assert answer["timings"]["draft_n"] > 0


def test_router_forwards_requantize(real: Real, model: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "toy.gguf").symlink_to(model)
    with routing(real, tmp_path / "log", "--models-dir", tmp_path / "models", *ONE) as server:
        completion(server, "Once", 4, model="toy")
        answer = server.post("/requantize_kvcache", {"model": "toy", "ctk": "q8_0"})
        assert (answer["ctk"], answer["ctv"]) == ("q8_0", "f16")


# --- refusals --------------------------------------------------------------------------------------------------------


def test_invalid_requests_are_refused(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *ONE, "-fa", "off") as server:
        for types, said in (
            ({}, "must name a type"),
            ({"ctk": "q3"}, '"ctk": "q3" is not'),
            ({"ctv": 8}, '"ctv": 8 is not'),
            ({"ctk": "q4_K", "ctv": "f16"}, "K q4_K"),
            ({"ctv": "q8_0"}, "flash attention"),
        ):
            code, kind, message = refused(server, **types)
            assert (code, kind) == (400, "invalid_request_error")
            assert said in message
        assert refused(server, ctkd="q8_0")[:2] == (501, "not_supported_error")
        requantize(server, ctk="q8_0")
        assert types_of(server) == ("q8_0", "f16")


@pytest.mark.parametrize(
    ("toy", "types", "code"),
    [
        ("mamba-dense", {"ctk": "q8_0"}, 501),  # this model has no cells with types
        ("deepseek2-moe", {"ctk": "q8_0"}, 400),  # V is a part of K in this model
    ],
)
def test_models_without_change_refuse(real: Real, tmp_path: Path, toy: str, types: dict[str, str], code: int) -> None:
    with serving(real, real.text_model(toy), tmp_path / "log", *ONE, "--kv-dynamic") as server:
        expected = completion(server, TEXT, 8)["content"]
        assert refused(server, **types)[0] == code
        assert completion(server, TEXT, 8)["content"] == expected


@memory_is_plain
@pytest.mark.parametrize("kind", [("--kv-dynamic",), ()])
def test_larger_cells_without_memory(real: Real, model: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    args = ("-c", "65536", "-np", "1", "--cache-ram", "0", "--no-warmup", "-ctk", "q4_0", "-ctv", "q4_0")
    with serving(real, model, tmp_path / "log", *args, *kind) as server:
        expected = completion(server, TEXT, 20)["content"]
        with short_of_addresses(server, 128 * 1024 * 1024):  # enough memory for the compute buffers
            code, error, _ = refused(server, **both("f32"))
            assert (code, error) == (503, "out_of_memory_error")
            assert completion(server, TEXT, 20)["content"] == expected
        requantize(server, **both("f32"))
        assert completion(server, TEXT, 20)["tokens_predicted"] == 20


def has_shifted(server: LlamaServer, times: int) -> bool:
    return server.log.count("slot context shift") >= times


@pytest.mark.parametrize("toy", ["llama-dense", "deepseek2-moe", "gptneox-dense"])
def test_context_shift_after_change(real: Real, toy: str, tmp_path: Path) -> None:
    """Shift the context after each change of types.

    Two models are special: in one, quantized keys have no Hadamard rotation (MLA). The other has partial rotary
    embeddings.
    """
    args = ("-c", "256", "-np", "1", "--cache-ram", "0", "--no-warmup", "--context-shift")
    with serving(real, real.text_model(toy), tmp_path / "log", *args) as server, ThreadPoolExecutor(1) as pool:
        text = pool.submit(completion, server, prompt(1, 40), 3000)
        for count, name in enumerate(("q8_0", "q4_0", "f16"), 1):
            until(partial(has_shifted, server, 2 * count))
            requantize(server, **both(name))
        assert not text.done()
        assert text.result()["tokens_predicted"] == 3000


def test_state_during_conversion(real: Real, model: Path, tmp_path: Path) -> None:
    """Read the state often. Another thread answers, and must not see a change that is only half done."""
    args = ("-c", "8192", "-np", "2", "--cache-ram", "0", "--metrics", "--kv-dynamic")
    with serving(real, model, tmp_path / "log", *args) as server, ThreadPoolExecutor(3) as pool:
        text = pool.submit(completion, server, prompt(1, 2000), 800)
        changes = pool.submit(lambda: [requantize(server, **both(n)) for n in ("q8_0", "q4_0", "f16") * 10])
        while not changes.done():
            target = json.loads(server.get("/props"))["kv_cache"]["target"]
            assert target["type_k"] == target["type_v"]
            assert server.http.get("/slots").status_code == 200
        changes.result()
        assert text.result()["tokens_predicted"] == 800
