"""Make draft models with random weights, because upstream's generator of test models makes none.

A draft proposes tokens, which the large model (the target) checks. This module makes two kinds of drafts:

- A target and its draft of the architecture gemma4-assistant. The draft has no cells of its own: it reads the cells of
  the target. No other kind of model reads the storage of another context. Both models are as small as upstream's test
  models. They have two layers, the first with a sliding window and the second without.
- A test model with an additional MTP layer (multi-token prediction). This layer drafts in a context with its own cells.
"""

from pathlib import Path
from typing import Any

from kvtool.verify import models
from kvtool.verify.models import Geometry, attention_keys, cached_model, fingerprint, write_model

_PATTERN = (True, False)  # whether each layer has a window
_TARGET = Geometry("gemma4", layers=len(_PATTERN), kv_heads=2, head_size=64, embd=128, ffn=192, vocab=128)
_DRAFT = _TARGET._replace(embd=64)
_WINDOW, _CONTEXT = 32, 8192
MTP_TOY = "qwen35-dense"


def draft_pair(work: Path) -> tuple[Path, Path]:
    """Write a target and its draft model, unless they exist, and return their paths.

    Only the tests of a draft that reads the cells of its target use these models.
    """
    keys = _keys(_DRAFT, embedding_length_out=_TARGET.embd, nextn_predict_layers=_DRAFT.layers)
    into, out = (_DRAFT.embd, 2 * _TARGET.embd), (_TARGET.embd, _DRAFT.embd)
    shapes = _shapes(_DRAFT, keys=False, **{"nextn.post_projection": out, "nextn.pre_projection": into})
    return (
        write_model(work / "gemma4-target.gguf", "gemma4", _keys(_TARGET), _shapes(_TARGET, keys=True)),
        write_model(work / "gemma4-assistant.gguf", "gemma4-assistant", keys, shapes),
    )


def mtp_model(toy: Path, work: Path) -> Path:
    """Write a copy of MTP_TOY, a test model of Qwen3.5, with an additional MTP layer, unless it exists.

    Return its path.

    The new layer is a copy of the last layer, which has attention, plus the tensors that connect it with the model.
    Raises VerifyError if the test model cannot be read.
    """
    out = work / f"{toy.stem}-mtp-{fingerprint([toy, Path(__file__)])}.gguf"
    return cached_model(out, lambda path: _write_mtp(toy, path))


def _write_mtp(toy: Path, out: Path) -> None:
    from gguf import GGUFValueType, GGUFWriter

    body = models.read_model(toy)
    arch = body.fields["general.architecture"].contents()
    n_layer = body.fields[f"{arch}.block_count"].contents()
    embd = body.fields[f"{arch}.embedding_length"].contents()
    numbers = {"block_count": n_layer + 1, "nextn_predict_layers": 1, "context_length": _CONTEXT}
    by_layer = ("attention.recurrent_layers", "swiglu_clamp_exp", "swiglu_clamp_shexp")
    ours = {f"{arch}.{name}" for name in (*numbers, *by_layer)}
    writer = GGUFWriter(out, arch)
    models.copy_keys(body, writer, lambda name: name not in ours)
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
        writer.add_tensor(f"blk.{n_layer}.nextn.{name}.weight", models.random_weight(name, shape))
    models.seal(writer)


def _keys(of: Geometry, **more: int) -> dict[str, Any]:
    heads = {f"attention.{what}_length_swa": of.head_size for what in ("key", "value")}
    rope = {"rope.dimension_count": of.head_size, "rope.dimension_count_swa": of.head_size}
    window = {"attention.sliding_window": _WINDOW, "attention.sliding_window_pattern": list(_PATTERN)}
    none = {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
    return {**attention_keys(of, _CONTEXT), **heads, **rope, **window, **none, **more}


def _shapes(of: Geometry, *, keys: bool, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors: the number of rows, then the number of columns.

    keys: whether its layers have keys and values of their own
    more: additional tensors
    """
    embd, head, width = of.embd, of.head_size, of.kv_heads * of.head_size
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (embd,),
        "attn_q": (width, embd),
        "attn_q_norm": (head,),
        "attn_output": (embd, width),
        "post_attention_norm": (embd,),
        "layer_output_scale": (1,),
        "ffn_norm": (embd,),
        "ffn_gate": (of.ffn, embd),
        "ffn_up": (of.ffn, embd),
        "ffn_down": (embd, of.ffn),
        "post_ffw_norm": (embd,),
    }
    if keys:
        layer |= {"attn_k": (width, embd), "attn_v": (width, embd), "attn_k_norm": (head,)}
    shapes = {"token_embd": (of.vocab, embd), "output_norm": (embd,), "rope_freqs": (head // 2,), **more}
    shapes |= {f"blk.{il}.{name}": shape for il in range(of.layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}
