"""Send requests with images, read the answers, and write projectors that differ from those of verify."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx

from kvtool.verify.models import write_model
from kvtool.verify.projector import EMBD, LAYERS, image, keys, shapes, width_of
from kvtool.verify.server import LlamaServer
from tests.e2e.conftest import MARKER
from tests.e2e.servers import part, refusal

APART = ("-c", "8192", "-np", "4", "--no-kv-unified", "--cache-ram", "0")


def projector_of_width(out: Path, width: int) -> Path:
    """Write verify's projector for models with another width of the embeddings."""
    return write_model(out, "clip", keys(width), shapes(width))


def merging_projector(out: Path, model: Path) -> Path:
    """Write a projector like that of Qwen2-VL, for images of any size.

    Two by two patches of the image become one token. With M-RoPE, an image uses as many positions as its longer side
    has tokens.
    """
    tensors = shapes(width := width_of(model))
    del tensors["v.position_embd.weight"]
    hidden, _ = tensors["mm.0.weight"]
    tensors |= {"v.patch_embd.weight.1": tensors["v.patch_embd.weight"], "mm.0.weight": (hidden, 4 * EMBD)}
    tensors |= {f"v.blk.{il}.attn_{name}.bias": (EMBD,) for il in range(LAYERS) for name in "qkv"}
    return write_model(out, "clip", {**keys(width), "projector_type": "qwen2vl_merger"}, tensors)


def looking(*seeds: int, before: str = "", after: str = " what is it?", **of_each: int) -> dict[str, Any]:
    """Return a prompt with one image for each seed."""
    files = [base64.b64encode(image(seed, **of_each)).decode() for seed in seeds]
    return {"prompt_string": before + MARKER * len(seeds) + after, "multimodal_data": files}


def see(server: LlamaServer, *seeds: int, n_predict: int = 8, **more: Any) -> httpx.Response:
    body = {"prompt": looking(*seeds), "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True, **more}
    return server.http.post("/completion", json=body)


def is_unloaded(answer: httpx.Response) -> bool:
    code, kind, message = refusal(answer)
    return (code, kind) == (400, "invalid_request_error") and "is unloaded: POST /mmproj" in message


def act(server: LlamaServer, action: str, **more: Any) -> dict[str, Any]:
    return part(server, "mmproj", action, **more)


def state(server: LlamaServer) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(server.get("/mmproj"))
    return answer
