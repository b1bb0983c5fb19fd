"""Write a LoRA adapter for a model of these tests."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy


def adapter(model: Path, out: Path, prefix: str) -> Path:
    """Write a LoRA adapter of rank 4 for each weight matrix whose name begins with `prefix`.

    Its values are random, with a fixed seed.
    """
    random = numpy.random.default_rng(1)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for weight in gguf.GGUFReader(model).tensors:
        if weight.name.startswith(prefix) and weight.name.endswith(".weight") and len(weight.shape) == 2:
            n_in, n_out = map(int, weight.shape)
            writer.add_tensor(f"{weight.name}.lora_a", random.standard_normal((4, n_in)).astype(numpy.float32))
            writer.add_tensor(f"{weight.name}.lora_b", random.standard_normal((n_out, 4)).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
