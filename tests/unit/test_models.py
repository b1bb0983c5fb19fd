"""Test the models that kvtool makes: made once, readable for gguf's own reader, and never left incomplete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from kvtool.errors import VerifyError
from kvtool.verify import drafts, models
from tests import fakes

VOCAB = ["<unk>", "<s>", "</s>", "\u2581the", "\u2581of", "\u2581and", "e", "t"]


@pytest.fixture
def generator(tmp_path: Path) -> Path:
    return fakes.programs(tmp_path / "bin") / "test-llama-archs"


def generated(generator: Path) -> int:
    log = generator.parent / "generated"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_toys_are_made_once(generator: Path, tmp_path: Path) -> None:
    counted: list[int] = []
    first = models.toys(generator, tmp_path / "work", counted.append)
    assert [t.stem for t in first] == ["same@a", "same@b"]
    assert counted == sorted(counted)
    assert models.toys(generator, tmp_path / "work") == first
    assert generated(generator) == 1


def test_toys_of_parallel_run_are_used(generator: Path, tmp_path: Path) -> None:
    def on_progress(_made: int) -> None:
        if not (others := tmp_path / "others").exists():
            others.mkdir()
            made = models.toys(generator, others)[0].parent
            made.rename(tmp_path / "work" / made.name)

    toys = models.toys(generator, tmp_path / "work", on_progress)
    assert [t.stem for t in toys] == ["same@a", "same@b"]
    assert generated(generator) == 2
    assert [p.name for p in (tmp_path / "work").iterdir()] == [toys[0].parent.name]


def test_new_library_replaces_toys(generator: Path, tmp_path: Path) -> None:
    first = models.toys(generator, tmp_path / "work")
    (generator.parent / "libllama.so").write_bytes(b"another build")
    second = models.toys(generator, tmp_path / "work")
    assert generated(generator) == 2
    assert second[0].parent != first[0].parent
    assert not first[0].exists()


def test_stale_leftovers_are_removed(generator: Path, tmp_path: Path) -> None:
    killed, making = (tmp_path / "work" / f"making-{name}" for name in ("killed", "now"))
    for place in (killed, making):
        (place / "toys").mkdir(parents=True)
    os.utime(killed, (0, 0))
    models.toys(generator, tmp_path / "work")
    assert making.exists() and not killed.exists()


@pytest.mark.parametrize("mode", ["fails", ""])
def test_failing_generator_leaves_nothing(
    generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("FAKE_TOYS", mode or " ")
    with pytest.raises(VerifyError, match="could not be generated") as caught:
        models.toys(generator, tmp_path / "work")
    assert "-o" in caught.value.next_step
    assert list((tmp_path / "work").iterdir()) == []


def write_toy(path: Path, n_vocab: int = 4, n_embd: int = 16) -> Path:
    writer = GGUFWriter(path, "toyarch")
    writer.add_uint32("toyarch.context_length", 256)
    writer.add_uint32("toyarch.vocab_size", n_vocab)
    writer.add_float32("toyarch.rope.freq_base", 10000.0)
    writer.add_array("toyarch.sections", [1, 2, 3])
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"tok_{i}" for i in range(n_vocab)])
    rng = np.random.default_rng(0)
    for name, shape in {
        "token_embd.weight": (n_vocab, n_embd),
        "output.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "blk.0.attn_q.weight": (32, n_embd),
        "blk.0.attn_q_norm.weight": (8,),
        "blk.0.ffn_up.weight": (n_vocab, n_embd),  # as many rows as tokens, but this is not the vocabulary
        "blk.0.ssm_a": (8,),
        "blk.0.attn_q.scale": (1,),
        "blk.0.attn_q.input_scale": (1,),
    }.items():
        writer.add_tensor(name, -np.abs(rng.standard_normal(shape)).astype(np.float32))
    _close(writer)
    return path


def write_vocabulary(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCAB)
    writer.add_token_scores([0.0] * len(VOCAB))
    writer.add_bos_token_id(1)
    _close(writer)
    return path


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    toy, words = write_toy(tmp_path / "toy.gguf"), write_vocabulary(tmp_path / "vocab.gguf")
    return models.text_model(toy, words, tmp_path / "work")


def tensors(path: Path) -> dict[str, Any]:
    return {t.name: t for t in GGUFReader(path).tensors}


def test_text_model_geometry_and_tokens(made: Path) -> None:
    fields = GGUFReader(made).fields
    assert fields["general.architecture"].contents() == "toyarch"
    assert fields["toyarch.context_length"].contents() == models.CONTEXT
    assert fields["toyarch.vocab_size"].contents() == len(VOCAB)
    assert fields["toyarch.rope.freq_base"].contents() == 10000.0
    assert fields["toyarch.sections"].contents() == [1, 2, 3]
    assert fields["toyarch.sections"].types == [GGUFValueType.ARRAY, GGUFValueType.INT32]
    assert fields["tokenizer.ggml.tokens"].contents() == VOCAB
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 1


def test_only_vocabulary_tensors_are_widened(made: Path) -> None:
    shapes = {name: tuple(int(n) for n in t.shape)[::-1] for name, t in tensors(made).items()}
    assert shapes["token_embd.weight"] == (len(VOCAB), 16)
    assert shapes["output.weight"] == (len(VOCAB), 16)
    assert shapes["blk.0.ffn_up.weight"] == (4, 16)
    assert shapes["blk.0.attn_q.weight"] == (32, 16)


def test_weights_are_scaled(made: Path) -> None:
    weights = tensors(made)
    assert abs(float(np.mean(weights["output_norm.weight"].data)) - 1) < 0.2
    assert abs(float(np.mean(weights["blk.0.attn_q_norm.weight"].data)) - 2) < 0.3
    # the gain is 2, and a row has 16 elements
    assert abs(float(np.std(weights["blk.0.attn_q.weight"].data)) - 2 / 4) < 0.1
    assert (weights["blk.0.ssm_a"].data < 0).all()  # a decay must stay negative
    assert not [name for name in weights if name.endswith("scale")]


def test_text_model_depends_on_seed(tmp_path: Path, made: Path) -> None:
    toy, words = tmp_path / "toy.gguf", tmp_path / "vocab.gguf"
    again = models.text_model(toy, words, tmp_path / "elsewhere")
    assert again.read_bytes() == made.read_bytes()
    other = models.text_model(toy, words, tmp_path / "elsewhere", seed=2)
    assert other.read_bytes() != made.read_bytes()
    assert not again.exists()  # only the newest version of a model is kept


def test_changed_toy_renews_text_model(tmp_path: Path, made: Path) -> None:
    toy, words = tmp_path / "toy.gguf", tmp_path / "vocab.gguf"
    before = made.stat().st_mtime_ns
    assert models.text_model(toy, words, tmp_path / "work") == made
    assert made.stat().st_mtime_ns == before
    write_toy(toy, n_vocab=5)
    assert models.text_model(toy, words, tmp_path / "work") != made


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough to look like one"])
def test_unreadable_toy_is_error(tmp_path: Path, content: bytes) -> None:
    toy = tmp_path / "toy.gguf"
    toy.write_bytes(content)
    with pytest.raises(VerifyError, match="is not a readable GGUF file"):
        models.text_model(toy, write_vocabulary(tmp_path / "vocab.gguf"), tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []


def test_empty_vocabulary_is_error(tmp_path: Path) -> None:
    empty = tmp_path / "vocab.gguf"
    writer = GGUFWriter(empty, "llama")
    writer.add_bos_token_id(1)
    _close(writer)
    with pytest.raises(VerifyError, match="lacks the key"):
        models.text_model(write_toy(tmp_path / "toy.gguf"), empty, tmp_path / "work")


def test_cache_model_geometry(tmp_path: Path) -> None:
    path = models.cache_model(models.QWEN35_27B, tmp_path)
    fields = GGUFReader(path).fields
    assert fields["llama.block_count"].contents() == 16
    assert fields["llama.attention.head_count_kv"].contents() == 4
    assert fields["llama.attention.key_length"].contents() == 256
    assert fields["llama.context_length"].contents() >= 131072
    assert tuple(tensors(path)["blk.15.attn_k.weight"].shape) == (64, 1024)
    assert path.stat().st_size < 32 * 2**20
    assert models.QWEN35_27B.bytes_per_cell() == 64 * 1024
    assert models.QWEN35_27B.bytes_per_cell() * 131072 == 8 * 2**30


def test_whole_model_has_heads_and_vocabulary(tmp_path: Path) -> None:
    small = models.Geometry("small", layers=2, kv_heads=1, head_size=8, heads=3, embd=24, ffn=40, vocab=300)
    found = tensors(models.cache_model(small, tmp_path))
    shapes = {
        name: tuple(found[name].shape) for name in ("token_embd.weight", *(f"blk.1.attn_{w}.weight" for w in "qkv"))
    }
    assert list(shapes.values()) == [(24, 300), (24, 24), (24, 8), (24, 8)]
    assert tuple(found["blk.0.ffn_up.weight"].shape) == (24, 40)
    assert models.cache_model(models.Geometry("cache alone", 2, 1, 8), tmp_path) != models.cache_model(small, tmp_path)


def test_sharing_draft_geometry(tmp_path: Path) -> None:
    pair = drafts.draft_pair(tmp_path)
    target, draft = (GGUFReader(path).fields for path in pair)
    for key in ("block_count", "attention.key_length", "attention.sliding_window", "attention.sliding_window_pattern"):
        assert target[f"gemma4.{key}"].contents() == draft[f"gemma4-assistant.{key}"].contents()
    assert draft["gemma4-assistant.embedding_length_out"].contents() == target["gemma4.embedding_length"].contents()
    with_keys = [{name for name in tensors(path) if "attn_k" in name} for path in pair]
    assert len(with_keys[0]) == 4 and not with_keys[1]
    before = pair[0].stat().st_mtime_ns
    assert drafts.draft_pair(tmp_path) == pair and pair[0].stat().st_mtime_ns == before


def test_mtp_layer_repeats_last_layer(tmp_path: Path) -> None:
    toy = tmp_path / "toy.gguf"
    writer = GGUFWriter(toy, "qwen35")
    writer.add_uint32("qwen35.block_count", 2)
    writer.add_uint32("qwen35.embedding_length", 16)
    writer.add_array("qwen35.attention.recurrent_layers", [True, False])
    for layer, name in enumerate(("ssm_a", "attn_k.weight")):
        writer.add_tensor(f"blk.{layer}.{name}", np.full((16,), layer, dtype=np.float32))
    _close(writer)
    made = drafts.mtp_model(toy, tmp_path)
    fields, weights = GGUFReader(made).fields, tensors(made)
    assert (fields["qwen35.block_count"].contents(), fields["qwen35.nextn_predict_layers"].contents()) == (3, 1)
    assert fields["qwen35.attention.recurrent_layers"].contents() == [True, False, False]
    assert (weights["blk.2.attn_k.weight"].data == weights["blk.1.attn_k.weight"].data).all()
    assert tuple(weights["blk.2.nextn.eh_proj.weight"].shape) == (32, 16)
