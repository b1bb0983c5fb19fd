"""Write a model with an encoder and a decoder (T5) and random weights, because upstream's generator writes none.

The decoder has an ordinary KV cache, cells for the output of the encoder, and relative positions.
"""

from __future__ import annotations

from pathlib import Path

from kvtool.verify.models import Geometry, attention_keys, write_model

_LAYERS, _EMBD, _HEADS, _HEAD, _FFN, _VOCAB, _CONTEXT, _BUCKETS = 2, 128, 2, 64, 192, 128, 8192, 32


def t5(work: Path) -> Path:
    """Write the model unless it exists, and return its path."""
    keys = attention_keys(Geometry("t5", _LAYERS, _HEADS, _HEAD, embd=_EMBD, ffn=_FFN, vocab=_VOCAB), _CONTEXT)
    more = {"attention.relative_buckets_count": _BUCKETS, "decoder_start_token_id": 0}
    return write_model(work / "t5.gguf", "t5", {**keys, **more}, _shapes())


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors, with the rows first."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_VOCAB, _EMBD),
        "enc.output_norm.weight": (_EMBD,),
        "dec.output_norm.weight": (_EMBD,),
    }
    width = _HEADS * _HEAD
    for il in range(_LAYERS):
        for side, attentions in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
            block = f"{side}.blk.{il}"
            for attention in attentions:
                shapes |= {f"{block}.{attention}_{what}.weight": (width, _EMBD) for what in "qkv"}
                shapes[f"{block}.{attention}_o.weight"] = (_EMBD, width)
                shapes[f"{block}.{attention}_norm.weight"] = (_EMBD,)
            if il == 0:  # the other layers use the tensor of the first layer
                shapes[f"{block}.attn_rel_b.weight"] = (_BUCKETS, _HEADS)
            shapes |= {
                f"{block}.ffn_norm.weight": (_EMBD,),
                f"{block}.ffn_gate.weight": (_FFN, _EMBD),
                f"{block}.ffn_up.weight": (_FFN, _EMBD),
                f"{block}.ffn_down.weight": (_EMBD, _FFN),
            }
    return shapes
