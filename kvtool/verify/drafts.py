"""Models that draft, with random weights; upstream's generator of toys writes none.

- A pair: a target, and a draft that has no cells of its own (gemma4-assistant), the only kind of model that reads
  another context's storage. Both are as small as upstream's toys: two layers, the first with a window and the second
  without, which is what the draft's layers take their cells from.
- A toy with an MTP layer more, which drafts in a context with cells of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtool.verify.models import copy_keys, fingerprint, finish, random_weight, read, written

_EMBD, _HEADS, _HEAD, _FFN, _VOCAB, _WINDOW, _CONTEXT = 128, 2, 64, 192, 128, 32, 8192
_DRAFT_EMBD = 64
MTP_TOY = "qwen35-dense"
_PATTERN = (True, False)  # which layers have a window


@dataclass(frozen=True)
class Pair:
    """Paths of the two models."""

    target: Path
    draft: Path


def pair(work: Path) -> Pair:
    """The two models, written once. Only the tests of the shared cells need them, so verify makes no others."""
    work.mkdir(parents=True, exist_ok=True)
    target, draft = work / "gemma4-target.gguf", work / "gemma4-assistant.gguf"
    if not target.is_file():
        written(target, lambda path: _write(path, "gemma4", _EMBD, _target_shapes(), {}))
    if not draft.is_file():
        more = {"embedding_length_out": _EMBD, "nextn_predict_layers": len(_PATTERN)}
        written(draft, lambda path: _write(path, "gemma4-assistant", _DRAFT_EMBD, _draft_shapes(), more))
    return Pair(target, draft)


def mtp(toy: Path, work: Path) -> Path:
    """A copy of Qwen3.5's toy (MTP_TOY) with an MTP layer; written once.

    The layer is the last one's, which has attention, once more, and what leads into it. Raises VerifyError when the toy
    cannot be read.
    """
    out = work / f"{toy.stem}-mtp-{fingerprint([toy, Path(__file__)])}.gguf"
    if not out.is_file():
        work.mkdir(parents=True, exist_ok=True)
        written(out, lambda path: _write_mtp(toy, path))
    return out


def _write_mtp(toy: Path, out: Path) -> None:
    from gguf import GGUFValueType, GGUFWriter

    body = read(toy)
    arch = body.fields["general.architecture"].contents()
    n_layer = body.fields[f"{arch}.block_count"].contents()
    embd = body.fields[f"{arch}.embedding_length"].contents()
    numbers = {"block_count": n_layer + 1, "nextn_predict_layers": 1, "context_length": _CONTEXT}
    by_layer = ("attention.recurrent_layers", "swiglu_clamp_exp", "swiglu_clamp_shexp")
    ours = {f"{arch}.{name}" for name in (*numbers, *by_layer)}
    writer = GGUFWriter(out, arch)
    copy_keys(body, writer, lambda name: name not in ours)
    for name, number in numbers.items():
        writer.add_uint32(f"{arch}.{name}", number)
    for name in by_layer:
        if field := body.fields.get(f"{arch}.{name}"):
            values = field.contents()
            writer.add_key_value(f"{arch}.{name}", [*values, values[-1]], GGUFValueType.ARRAY, field.types[1])
    last = f"blk.{n_layer - 1}."
    for tensor in body.tensors:
        writer.add_tensor(tensor.name, tensor.data)
        if tensor.name.startswith(last):
            writer.add_tensor(tensor.name.replace(last, f"blk.{n_layer}."), tensor.data)
    shapes = {"eh_proj": (embd, 2 * embd), "enorm": (embd,), "hnorm": (embd,), "shared_head_norm": (embd,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.{n_layer}.nextn.{name}.weight", random_weight(name, shape))
    finish(writer)


def _write(out: Path, arch: str, embd: int, shapes: Mapping[str, tuple[int, ...]], more: Mapping[str, int]) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(out, arch)
    writer.add_name(f"random weights, {arch}")
    writer.add_block_count(len(_PATTERN))
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(embd)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(_WINDOW)
    writer.add_vocab_size(_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    writer.add_array(f"{arch}.attention.sliding_window_pattern", list(_PATTERN))
    numbers = {
        "attention.key_length_swa": _HEAD,
        "attention.value_length_swa": _HEAD,
        "rope.dimension_count_swa": _HEAD,
    }
    numbers |= {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0, **more}
    for name, value in numbers.items():
        writer.add_uint32(f"{arch}.{name}", value)
    for name, shape in shapes.items():
        writer.add_tensor(name, random_weight(name, shape))
    finish(writer)


def _layer(il: int, embd: int, *, keys: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, rows first. keys: it has keys and values of its own."""
    width = _HEADS * _HEAD
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (embd,),
        "attn_q": (width, embd),
        "attn_q_norm": (_HEAD,),
        "attn_output": (embd, width),
        "post_attention_norm": (embd,),
        "layer_output_scale": (1,),
        "ffn_norm": (embd,),
        "ffn_gate": (_FFN, embd),
        "ffn_up": (_FFN, embd),
        "ffn_down": (embd, _FFN),
        "post_ffw_norm": (embd,),
    }
    if keys:
        shapes |= {"attn_k": (width, embd), "attn_v": (width, embd), "attn_k_norm": (_HEAD,)}
    return {f"blk.{il}.{name}.weight": shape for name, shape in shapes.items()}


def _target_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_VOCAB, _EMBD),
        "output_norm.weight": (_EMBD,),
        "rope_freqs.weight": (_HEAD // 2,),
    }
    for il in range(len(_PATTERN)):
        shapes |= _layer(il, _EMBD, keys=True)
    return shapes


def _draft_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_VOCAB, _DRAFT_EMBD),
        "output_norm.weight": (_DRAFT_EMBD,),
        "rope_freqs.weight": (_HEAD // 2,),
        "nextn.post_projection.weight": (_EMBD, _DRAFT_EMBD),
        "nextn.pre_projection.weight": (_DRAFT_EMBD, 2 * _EMBD),
    }
    for il in range(len(_PATTERN)):
        shapes |= _layer(il, _DRAFT_EMBD, keys=False)
    return shapes
