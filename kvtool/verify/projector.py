"""An image projector with random weights for a model of any width, and questions for it; upstream's generator of toys
writes none.

It is of LLaVA's kind, the plainest that mtmd has: a vision transformer, then two matrices. An image becomes 16 tokens.
The matrices are wide, so that the file is larger (20 MiB for a width of 256) than what a measurement of memory misses.
A merging one is of Qwen2-VL's kind: two by two patches become a token, of an image of any size, and with M-RoPE these
take as many positions as its longer side has tokens.
"""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

from kvtool.verify.models import fingerprint, read, write_model, written

_EMBD, _HEADS, _FFN, _LAYERS, _IMAGE, _PATCH, _HIDDEN = 64, 4, 96, 2, 32, 8, 16384


def projector(model: Path, work: Path, width: int = 0, *, merging: bool = False) -> Path:
    """The projector for this model, or for one of another width; written once.

    Raises VerifyError when the model cannot be read.
    """
    if not width:
        fields = read(model).fields
        width = int(fields[f"{fields['general.architecture'].contents()}.embedding_length"].contents())
    kind = "qwen2vl_merger" if merging else "mlp"
    out = work / f"projector-{kind}-{width}-{fingerprint([Path(__file__)])}.gguf"
    return written(out, lambda path: _write(path, width, kind))


def _write(out: Path, width: int, kind: str) -> None:
    vision = {"embedding_length": _EMBD, "feed_forward_length": _FFN, "block_count": _LAYERS}
    vision |= {"projection_dim": width, "attention.head_count": _HEADS, "image_size": _IMAGE, "patch_size": _PATCH}
    more = {"attention.layer_norm_epsilon": 1e-5, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    keys = {"has_vision_encoder": True, "projector_type": kind, "use_gelu": True}
    keys |= {f"vision.{name}": value for name, value in {**vision, **more}.items()}
    write_model(out, "clip", keys, _shapes(width) if kind == "mlp" else _shapes_merging(width))


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    """The tensors, rows first."""
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (_EMBD, 3, _PATCH, _PATCH),
        "v.position_embd.weight": ((_IMAGE // _PATCH) ** 2, _EMBD),
        "mm.0.weight": (_HIDDEN, _EMBD),
        "mm.0.bias": (_HIDDEN,),
        "mm.2.weight": (width, _HIDDEN),
        "mm.2.bias": (width,),
    }
    for il in range(_LAYERS):
        layer = {"ln1": (_EMBD,), "ln2": (_EMBD,), "ffn_up": (_FFN, _EMBD), "ffn_down": (_EMBD, _FFN)}
        layer |= {f"attn_{name}": (_EMBD, _EMBD) for name in ("q", "k", "v", "out")}
        shapes |= {f"v.blk.{il}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _shapes_merging(width: int) -> dict[str, tuple[int, ...]]:
    shapes = {name: shape for name, shape in _shapes(width).items() if name != "v.position_embd.weight"}
    shapes |= {"v.patch_embd.weight.1": shapes["v.patch_embd.weight"], "mm.0.weight": (_HIDDEN, 4 * _EMBD)}
    return shapes | {f"v.blk.{il}.attn_{name}.bias": (_EMBD,) for il in range(_LAYERS) for name in "qkv"}


def image(seed: int, size: int = _IMAGE) -> bytes:
    """A PNG of random pixels."""
    import numpy as np

    pixels = np.random.default_rng(seed).integers(0, 256, (size, 3 * size), dtype=np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def image_url(seed: int) -> dict[str, object]:
    """The same as a part of an OpenAI message."""
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(image(seed)).decode()},
    }
