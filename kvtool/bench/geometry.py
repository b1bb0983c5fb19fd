"""Models to measure with: random weights, the cache geometry of a real model, everything else tiny.

What a KV cache costs depends on its layers, KV heads and head size alone. With small embeddings and feed-forward layers
a decode call is far cheaper than the real model's, so whatever a growth costs weighs more here than it does there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.verify import models

CONTEXT = 262144  # n_ctx_train
_EMBD, _FFN, _VOCAB = 64, 64, 256


@dataclass(frozen=True)
class CacheModel:
    """A model to measure. All sizes for an f16 cache.

    cell_bytes: K and V of one token in the layers that keep every token; cell_layers: how many these are;
    window_bytes: of all sliding-window layers at their full size, which does not depend on the context.
    """

    name: str
    about: str
    file: str
    cell_bytes: int
    cell_layers: int
    window_bytes: int
    write: Callable[[Path], None] | None = None  # None: llama's architecture, written by kvtool.verify.models

    def static_bytes(self, cells: int) -> int:
        """KV bytes of a static cache."""
        return self.cell_bytes * cells + self.window_bytes

    def make(self, work: Path) -> Path:
        """The file, written once under `work`."""
        if self.write is None:
            return models.cache_model(models.QWEN35_27B, work, CONTEXT)
        out = work / f"{self.file}-{CONTEXT}.gguf"
        if out.is_file():
            return out
        work.mkdir(parents=True, exist_ok=True)
        return models.written(out, self.write)


def _writer(out: Path, arch: str, name: str, layers: int) -> Any:
    from gguf import GGUFWriter  # numpy behind it takes 0.1 s to import

    writer = GGUFWriter(out, arch)
    writer.add_name(f"random weights, cache geometry of {name}")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(_EMBD)
    writer.add_feed_forward_length(_FFN)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    return writer


def _fill(writer: Any, layers: int, per_layer: dict[str, tuple[int, ...]]) -> None:
    """Draw the tensors: those of every model, and per_layer's (name within a block, numpy's order) in each block."""
    import numpy as np

    shapes: dict[str, tuple[int, ...]] = {"token_embd": (_VOCAB, _EMBD), "output_norm": (_EMBD,)}
    feed = {"ffn_norm": (_EMBD,), "ffn_gate": (_FFN, _EMBD), "ffn_down": (_EMBD, _FFN), "ffn_up": (_FFN, _EMBD)}
    for il in range(layers):
        shapes |= {f"blk.{il}.{name}": shape for name, shape in {**per_layer, **feed}.items()}
    rng = np.random.default_rng(1)
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape, dtype=np.float32)
        weight = (1 + 0.1 * drawn) if len(shape) == 1 else (drawn / np.sqrt(shape[-1])).astype(np.float16)
        writer.add_tensor(f"{name}.weight", weight)
    models.finish(writer)


# Gemma 3 4B: 34 layers, every sixth keeps all tokens, the others a window of 1024.
_GEMMA_LAYERS, _GEMMA_EVERY, _GEMMA_WINDOW, _GEMMA_HEADS, _GEMMA_HEAD = 34, 6, 1024, 4, 256
_GEMMA_FULL = _GEMMA_LAYERS // _GEMMA_EVERY
_GEMMA_ROW = 2 * _GEMMA_HEADS * _GEMMA_HEAD * 2  # K and V, f16, of one layer


def _write_gemma3(out: Path) -> None:
    heads, head = _GEMMA_HEADS, _GEMMA_HEAD
    writer = _writer(out, "gemma3", "Gemma 3 4B", _GEMMA_LAYERS)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_sliding_window(_GEMMA_WINDOW)
    block = {
        "attn_norm": (_EMBD,),
        "attn_q": (heads * head, _EMBD),
        "attn_k": (heads * head, _EMBD),
        "attn_v": (heads * head, _EMBD),
        "attn_output": (_EMBD, heads * head),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "post_attention_norm": (_EMBD,),
        "post_ffw_norm": (_EMBD,),
    }
    _fill(writer, _GEMMA_LAYERS, block)


# DeepSeek-V2-Lite: multi-head latent attention, one row of 512 + 64 elements per layer and token, V is part of K.
_MLA_LAYERS, _MLA_RANK, _MLA_ROPE, _MLA_NOPE, _MLA_VALUE, _MLA_HEADS = 27, 512, 64, 128, 128, 2


def _write_deepseek2(out: Path) -> None:
    heads = _MLA_HEADS
    writer = _writer(out, "deepseek2", "DeepSeek-V2-Lite", _MLA_LAYERS)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(_MLA_RANK + _MLA_ROPE)
    writer.add_value_length(_MLA_RANK)
    writer.add_key_length_mla(_MLA_NOPE + _MLA_ROPE)
    writer.add_value_length_mla(_MLA_VALUE)
    writer.add_kv_lora_rank(_MLA_RANK)
    writer.add_rope_dimension_count(_MLA_ROPE)
    writer.add_leading_dense_block_count(_MLA_LAYERS)  # no experts: the cache is all that matters
    writer.add_expert_feed_forward_length(_FFN)
    writer.add_expert_shared_count(1)
    block = {
        "attn_norm": (_EMBD,),
        "attn_q": (heads * (_MLA_NOPE + _MLA_ROPE), _EMBD),
        "attn_kv_a_mqa": (_MLA_RANK + _MLA_ROPE, _EMBD),
        "attn_kv_a_norm": (_MLA_RANK,),
        "attn_k_b": (heads, _MLA_RANK, _MLA_NOPE),
        "attn_v_b": (heads, _MLA_VALUE, _MLA_RANK),
        "attn_output": (_EMBD, heads * _MLA_VALUE),
    }
    _fill(writer, _MLA_LAYERS, block)


def _window_cells(window: int, sequences: int, ubatch: int) -> int:
    """Cells of llama.cpp's cache of a sliding window, for sequences in one stream."""
    return -(-(window * sequences + ubatch) // 256) * 256


QWEN = CacheModel(
    "Qwen3.5-27B",
    "16 attention layers, 4 KV heads of 256",
    "cache-16x4x256",
    models.QWEN35_27B.bytes_per_cell(),
    models.QWEN35_27B.layers,
    0,
)
GEMMA = CacheModel(
    "Gemma-3-4B",
    "5 full layers and 29 of a window of 1024, 4 KV heads of 256",
    "cache-gemma3-4b",
    _GEMMA_FULL * _GEMMA_ROW,
    _GEMMA_FULL,
    (_GEMMA_LAYERS - _GEMMA_FULL) * _GEMMA_ROW * _window_cells(_GEMMA_WINDOW, 2, 512),
    _write_gemma3,
)
MLA = CacheModel(
    "DeepSeek-V2-Lite",
    "27 layers of multi-head latent attention, one row of 576",
    "cache-deepseek2-lite",
    _MLA_LAYERS * (_MLA_RANK + _MLA_ROPE) * 2,
    _MLA_LAYERS,
    0,
    _write_deepseek2,
)

MODELS = (QWEN, GEMMA, MLA)
