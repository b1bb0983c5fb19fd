"""Make an image projector with random weights for a model of any width, and images for it.

Upstream's generator of test models makes no projectors. This one is of LLaVA's kind, the simplest kind that llama.cpp
supports: a vision transformer, followed by two matrices. It turns an image into 16 tokens. Tests measure the
memory of loading and unloading it. So the matrices are wide, which makes the file (20 MiB for a model of width 256)
larger than the error of such a measurement.
"""

import base64
from pathlib import Path
from typing import Any

from kvtool.verify.models import fingerprint, read_model, write_model

EMBD, LAYERS = 64, 2
_HEADS, _FFN, _IMAGE, _PATCH, _HIDDEN = 4, 96, 32, 8, 16384


def projector(model: Path, work: Path) -> Path:
    """Write the projector for a model, unless it exists, and return its path.

    Raise VerifyError if the model is unreadable.
    """
    width = width_of(model)
    out = work / f"projector-{width}-{fingerprint([Path(__file__)])}.gguf"
    return write_model(out, "clip", keys(width), shapes(width))


def width_of(model: Path) -> int:
    """Return the width of a model's embeddings."""
    fields = read_model(model).fields
    return int(fields[f"{fields['general.architecture'].contents()}.embedding_length"].contents())


def keys(width: int) -> dict[str, Any]:
    """Return the keys of a projector for models of this width."""
    vision = {"embedding_length": EMBD, "feed_forward_length": _FFN, "block_count": LAYERS}
    vision |= {"projection_dim": width, "attention.head_count": _HEADS, "image_size": _IMAGE, "patch_size": _PATCH}
    more = {"attention.layer_norm_epsilon": 1e-5, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    named = {f"vision.{name}": value for name, value in {**vision, **more}.items()}
    return {"has_vision_encoder": True, "projector_type": "mlp", "use_gelu": True, **named}


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the projector's tensors. The number of rows is the first number."""
    found: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (EMBD, 3, _PATCH, _PATCH),
        "v.position_embd.weight": ((_IMAGE // _PATCH) ** 2, EMBD),
        "mm.0.weight": (_HIDDEN, EMBD),
        "mm.0.bias": (_HIDDEN,),
        "mm.2.weight": (width, _HIDDEN),
        "mm.2.bias": (width,),
    }
    layer = {"ln1": (EMBD,), "ln2": (EMBD,), "ffn_up": (_FFN, EMBD), "ffn_down": (EMBD, _FFN)}
    layer |= {f"attn_{name}": (EMBD, EMBD) for name in ("q", "k", "v", "out")}
    return found | {f"v.blk.{il}.{name}.weight": shape for il in range(LAYERS) for name, shape in layer.items()}


def image(seed: int, size: int = _IMAGE) -> bytes:
    """Return an image of random pixels as PPM, the simplest format that upstream reads."""
    import numpy as np

    pixels = np.random.default_rng(seed).integers(0, 256, (size, 3 * size), dtype=np.uint8)
    return b"P6 %d %d 255\n" % (size, size) + pixels.tobytes()


def image_url(seed: int) -> dict[str, object]:
    """Return an image of random pixels as a part of a message for OpenAI's API."""
    url = "data:image/x-portable-pixmap;base64," + base64.b64encode(image(seed)).decode()
    return {"type": "image_url", "image_url": {"url": url}}
