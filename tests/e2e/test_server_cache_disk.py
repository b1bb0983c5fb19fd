"""Test conversations that continue from files (--cache-disk): RAM is too small, or an earlier server wrote them."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.adapter import adapter
from tests.e2e.conftest import Real
from tests.e2e.projector import looking, merging_projector
from tests.e2e.servers import completion, routing, serving, until

ARGS = ("-c", "4096", "-np", "2", "--no-warmup", "--cache-ram", "64", "--kv-dynamic")
SMALL = (*ARGS, "--cache-ram", "1")  # if a flag is given twice, the last one counts
CHATS = [prompt(i, 400 + 20 * i) for i in range(6)]
KINDS: list[tuple[str, ...]] = [("--no-kv-dynamic",), (), ("--kv-unified", "--kv-share-prefix")]
IGNORED = "ignoring the conversation"


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.conversation"))


def ask(server: LlamaServer, text: str, n_predict: int = 8, **more: Any) -> dict[str, Any]:
    return completion(server, text, n_predict, **more)


def computed(answer: dict[str, Any]) -> int:
    """Return the number of prompt tokens that the server computed."""
    return int(answer["timings"]["prompt_n"])


def conversations(server: LlamaServer) -> dict[str, Any]:
    said: dict[str, Any] = server.http.get("/props").json()["conversations"]
    return said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("toy", ["llama-dense", "gemma2-dense", "qwen35-dense"])  # plain, window, hybrid
def test_chats_continue_after_restart(real: Real, toy: str, tmp_path: Path, kind: tuple[str, ...]) -> None:
    disk = tmp_path / "disk"
    args: tuple[str | Path, ...] = (*ARGS, *kind, "--cache-disk", disk)
    with serving(real, real.text_model(toy), tmp_path / "first", *args) as server:
        expected = [ask(server, text)["content"] for text in CHATS[:3]]
    assert len(files(disk)) == 3
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(disk))
    with serving(real, real.text_model(toy), tmp_path / "second", *args) as server:
        for text, content in zip(CHATS, expected, strict=False):
            answer = ask(server, text)
            assert answer["content"] == content
            assert computed(answer) <= 64  # the tokens after the last checkpoint
    assert IGNORED not in server.log


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("toy", ["llama-dense", "gemma2-dense", "qwen35-dense"])  # plain, window, hybrid
def test_longer_prompts_and_branches_use_files(real: Real, toy: str, tmp_path: Path, kind: tuple[str, ...]) -> None:
    model = real.text_model(toy)
    args: tuple[str | Path, ...] = (*ARGS, *kind, "-ub", "32", "--cache-disk", tmp_path)
    longer = f"{CHATS[0]} {CHATS[1][:400]}"
    branch = f"{longer[: len(CHATS[0]) // 2]} {CHATS[2][:400]}"
    with serving(real, model, tmp_path / "first", *args) as server:
        expected = [ask(server, text, cache_prompt=False)["content"] for text in (longer, branch)]
        ask(server, CHATS[0], id_slot=1)
    with serving(real, model, tmp_path / "second", *args) as server:
        answer = ask(server, longer, id_slot=0)
        assert answer["content"] == expected[0]
        assert computed(answer) <= 64 + len(server.post("/tokenize", {"content": CHATS[1][:400]})["tokens"])
        assert ask(server, branch)["content"] == expected[1]


@pytest.mark.parametrize(
    ("first", "second", "is_used"),
    [
        (("-np", "4", "--no-kv-unified"), ("-np", "4", "--no-kv-unified"), True),
        (("-np", "4", "--no-kv-unified"), ("-np", "2", "--no-kv-unified"), False),
        (("-np", "4", "--no-kv-unified"), ("-np", "4", "--kv-unified"), False),
        (("-np", "4", "--kv-unified"), ("-np", "2", "--kv-unified"), True),
    ],
)
def test_layout_of_streams_decides_use(
    real: Real, model: Path, tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], is_used: bool
) -> None:
    disk = ("--cache-disk", tmp_path)
    with serving(real, model, tmp_path / "first", *ARGS, *first, *disk) as server:
        expected = [ask(server, CHATS[i], id_slot=3 - i)["content"] for i in range(2)]
    with serving(real, model, tmp_path / "second", *ARGS, *second, *disk) as server:
        answers = [ask(server, CHATS[i], id_slot=i) for i in range(2)]
        assert [computed(answer) == 1 for answer in answers] == [is_used] * 2
        assert [answer["content"] for answer in answers] == expected
    assert IGNORED not in server.log


def test_other_adapter_or_scale_does_not_use_file(real: Real, model: Path, tmp_path: Path) -> None:
    lora = adapter(model, tmp_path / "lora.gguf", "blk")
    disk = ("--cache-disk", tmp_path / "disk")
    strong, weak = (dict[str, Any](lora=[{"id": 0, "scale": scale}]) for scale in (1.0, 0.5))
    with serving(real, model, tmp_path / "plain", *ARGS, "--cache-ram", "0", "--lora", lora) as server:
        expected = [ask(server, CHATS[0], **scale)["content"] for scale in (strong, weak)]
        assert expected[0] != expected[1]
    with serving(real, model, tmp_path / "first", *ARGS, *disk, "--lora", lora) as server:
        assert ask(server, CHATS[0], **strong)["content"] == expected[0]
    with serving(real, model, tmp_path / "weak", *ARGS, *disk, "--lora", lora) as server:
        answer = ask(server, CHATS[0], **weak)
        assert computed(answer) > 100 and answer["content"] == expected[1]
    with serving(real, model, tmp_path / "second", *ARGS, *disk, "--lora", lora) as server:
        for scale, content in zip((strong, weak), expected, strict=True):
            answer = ask(server, CHATS[0], **scale)
            assert (computed(answer), answer["content"]) == (1, content)
    with serving(real, model, tmp_path / "without", *ARGS, *disk) as server:
        assert computed(ask(server, CHATS[0])) > 100
    (lora := adapter(model, tmp_path / "other.gguf", "blk.0")).replace(tmp_path / "lora.gguf")
    with serving(real, model, tmp_path / "other", *ARGS, *disk, "--lora", tmp_path / "lora.gguf") as server:
        assert computed(ask(server, CHATS[0], **strong)) > 100
    assert IGNORED not in server.log


DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")


def test_draft_continues_from_file(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*ARGS, *DRAFT, "-md", model, "--cache-disk", tmp_path)
    with serving(real, model, tmp_path / "first", *args) as server:
        expected = ask(server, CHATS[0], 16)["content"]
    with serving(real, model, tmp_path / "second", *args) as server:
        answer = ask(server, CHATS[0], 16)
        assert (computed(answer), answer["content"]) == (1, expected)
        # a draft with other cells than its target's would be refused now and then
        assert answer["timings"]["draft_n_accepted"] == answer["timings"]["draft_n"] > 0
    assert IGNORED not in server.log


@pytest.mark.parametrize("change", ["without", "types", "model"])
def test_file_of_other_draft_serves_target(real: Real, model: Path, tmp_path: Path, change: str) -> None:
    other = real.text_model("gptneox-dense")
    drafts = {
        "without": (),
        "types": (*DRAFT, "-md", model, "-ctkd", "q8_0", "-ctvd", "q8_0"),
        "model": (*DRAFT, "-md", other),
    }
    with serving(real, model, tmp_path / "first", *ARGS, *DRAFT, "-md", model, "--cache-disk", tmp_path) as server:
        expected = ask(server, CHATS[0], 16)["content"]
    with serving(real, model, tmp_path / "second", *ARGS, *drafts[change], "--cache-disk", tmp_path) as server:
        answer = ask(server, CHATS[0], 16)
        assert (computed(answer), answer["content"]) == (1, expected)
    assert IGNORED not in server.log


def test_images_continue_from_file(real: Real, model: Path, mmproj: Path, marker: None, tmp_path: Path) -> None:
    def see(server: LlamaServer, seed: int, **more: Any) -> dict[str, Any]:
        body = {"prompt": looking(seed, before=f"{CHATS[0]} "), "n_predict": 8, "temperature": 0.0, "ignore_eos": True}
        return server.post("/completion", {**body, **more})

    args = (*ARGS, "--mmproj", mmproj, "--cache-disk", tmp_path / "disk")
    with serving(real, model, tmp_path / "plain", *ARGS, "--mmproj", mmproj, "--cache-ram", "0") as server:
        expected = [see(server, seed)["content"] for seed in (1, 2)]
        assert expected[0] != expected[1]
    with serving(real, model, tmp_path / "first", *args) as server:
        assert see(server, 1)["content"] == expected[0]
    with serving(real, model, tmp_path / "second", *args) as server:
        answer = see(server, 1)
        assert (computed(answer), answer["content"]) == (1, expected[0])
        answer = see(server, 2)  # it uses the text before the image
        assert answer["content"] == expected[1] and computed(answer) > 8
    other = ("--mmproj", merging_projector(tmp_path / "other.gguf", model))
    with serving(real, model, tmp_path / "other", *ARGS, *other, "--cache-disk", tmp_path / "disk") as server:
        answer = see(server, 1)
        assert computed(answer) > 8 and answer["content"] == see(server, 1, cache_prompt=False)["content"]
    with serving(real, model, tmp_path / "without", *ARGS, "--cache-disk", tmp_path / "disk") as server:
        assert computed(ask(server, CHATS[0])) > 100  # a text cannot begin with a conversation of images
    assert IGNORED not in server.log


def test_disk_keeps_what_ram_drops(real: Real, model: Path, tmp_path: Path) -> None:
    with serving(real, model, tmp_path / "log", *SMALL, "--metrics", "--cache-disk", tmp_path) as server:
        for text in CHATS:
            ask(server, text)
        assert [computed(ask(server, text)) for text in CHATS] == [1] * len(CHATS)
        metrics = server.http.get("/metrics").text
        said = conversations(server)
        assert said["entry_bytes"] <= 2**20
        assert said["disk_entries"] == len(files(tmp_path)) > 0
        assert said["disk_bytes"] == sum(path.stat().st_size for path in files(tmp_path))
        assert said["disk_hits_total"] > 0 and said["disk_misses_total"] == said["misses_total"] > 0
        assert 0 < said["disk_saved_tokens_total"] <= said["saved_tokens_total"]
        assert f"llamacpp:conversation_disk_hits_total {said['disk_hits_total']}\n" in metrics


def test_limit_removes_oldest_files(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*SMALL, "--cache-disk", tmp_path, "--cache-disk-limit", "1")
    with serving(real, model, tmp_path / "log", *args) as server:
        for i in range(12):
            ask(server, prompt(i, 400), 0)
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob("*.conversation*")) <= 2**20
    with serving(real, model, tmp_path / "log", *args) as server:
        assert computed(ask(server, prompt(11, 400))) == 1
        assert computed(ask(server, prompt(0, 400))) > 100


def test_smaller_types_and_other_models_are_not_used(real: Real, model: Path, tmp_path: Path) -> None:
    disk, smaller = ("--cache-disk", tmp_path), ("-ctk", "q4_0", "-ctv", "q4_0")
    with serving(real, real.text_model("gptneox-dense"), tmp_path / "other", *ARGS, *disk) as server:
        ask(server, CHATS[0])
    with serving(real, model, tmp_path / "q4_0", *ARGS, *smaller, *disk) as server:
        assert computed(ask(server, CHATS[0])) > 100
    with serving(real, model, tmp_path / "f16", *ARGS, *disk) as server:
        answer = ask(server, CHATS[0])
        assert computed(answer) > 100
        assert answer["content"] == ask(server, CHATS[0], cache_prompt=False)["content"]
    with serving(real, model, tmp_path / "q4_0 again", *ARGS, *smaller, *disk) as server:
        assert computed(ask(server, CHATS[0])) == 1


@pytest.mark.parametrize("kind", [("--kv-dynamic",), ("--no-kv-dynamic",)])
@pytest.mark.parametrize("rotation", ["0", "1"])
def test_larger_types_are_converted(
    real: Real, model: Path, tmp_path: Path, kind: tuple[str, ...], rotation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(real, model, tmp_path / "f16", *ARGS, "--cache-disk", tmp_path) as server:
        ask(server, CHATS[0])
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", rotation)
    q8 = ("-ctk", "q8_0", "-ctv", "q8_0", *kind)
    with serving(real, model, tmp_path / "q8_0", *ARGS, *q8, "--cache-disk", tmp_path) as server:
        assert computed(ask(server, CHATS[0])) == 1
    assert IGNORED not in server.log


def test_damaged_files_cost_no_request(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*ARGS, "--cache-disk", tmp_path)
    with serving(real, model, tmp_path / "first", *args) as server:
        expected = [ask(server, text)["content"] for text in CHATS]
    rng = random.Random(1)
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data if rng.random() < 0.7 else data[: rng.randrange(len(data))])
    with serving(real, model, tmp_path / "second", *args) as server:
        for text, content in zip(CHATS, expected, strict=True):
            answer = ask(server, text)
            assert answer["content"] == content
            assert computed(answer) > 100
    assert server.log.count(IGNORED) == len(CHATS)


def test_killed_server_leaves_usable_files(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*SMALL, "--cache-disk", tmp_path)
    with serving(real, model, tmp_path / "first", *args) as server:
        for text in CHATS * 2:
            ask(server, text)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert files(tmp_path)
    with serving(real, model, tmp_path / "second", *args) as server:
        assert 1 in [computed(ask(server, text)) for text in CHATS]
    assert IGNORED not in server.log


def test_servers_share_directory(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*SMALL, "--cache-disk", tmp_path)
    with (
        serving(real, model, tmp_path / "first", *args) as first,
        serving(real, model, tmp_path / "second", *args) as second,
    ):
        expected = [ask(first, text)["content"] for text in CHATS]
        answers = [ask(second, text) for text in CHATS]
        assert [answer["content"] for answer in answers] == expected
        assert sum(computed(answer) == 1 for answer in answers) >= 3  # the first server has the others in RAM
    assert IGNORED not in first.log + second.log


def test_unwritable_directory_costs_no_request(real: Real, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with serving(real, model, tmp_path / "log", *SMALL, "--cache-disk", tmp_path / "file") as server:
        for text in CHATS * 2:
            assert ask(server, text)["tokens_predicted"] == 8
    assert server.log.count("conversations cannot be saved") == 1


def test_sleeping_server_keeps_files(real: Real, model: Path, tmp_path: Path) -> None:
    args = (*SMALL, "--cache-disk", tmp_path, "--sleep-idle-seconds", "1")
    with serving(real, model, tmp_path / "first", *args) as server:
        expected = [ask(server, text)["content"] for text in CHATS]
        until(lambda: server.http.get("/props").json()["is_sleeping"])
        for text, content in zip(CHATS, expected, strict=True):
            answer = ask(server, text)
            assert (answer["content"], computed(answer)) == (content, 1)
        until(lambda: server.http.get("/props").json()["is_sleeping"])
    with serving(real, model, tmp_path / "second", *args) as server:
        assert [computed(ask(server, text)) for text in CHATS] == [1] * len(CHATS)


def test_router_finds_chats_again(real: Real, model: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name, path in (("one", model), ("two", real.text_model("gptneox-dense"))):
        (models / f"{name}.gguf").symlink_to(path)
    args = ("--models-dir", models, "--models-max", "1", *ARGS, "--cache-disk", tmp_path / "disk")
    with routing(real, tmp_path / "log", *args) as server:
        for name in ("one", "two"):
            assert computed(ask(server, CHATS[0], model=name)) > 100
        for name in ("one", "two"):
            assert computed(ask(server, CHATS[0], model=name)) == 1
